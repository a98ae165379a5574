"""`qgraph graph`: the graph of a model as text, drawing or data, from metadata alone (level 12)."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..errors import OptionError
from .options import CACHE_TYPES, Switch, graph_parameters, layer_parameters, option, path_options, provider_option
from .output import emit, note, size, write_text

# of a session whose options say nothing about it
N_CTX = 4096
FORMATS = ("text", "csv", "dot", "json", "svg", "html")


@click.command(name="graph")
@path_options
@click.option("--geometry", metavar="NAME", help="no file: the shape of a published model, such as qwen3-next-80b")
@click.option("--type", "type_", default="bf16", metavar="TYPE", show_default=True, help="with --geometry: type of the matrices")
@layer_parameters[0]
@layer_parameters[1]
@option("--layer", type=click.IntRange(min=0), help="this layer alone  [default: the whole model]")
@click.option("--scope", metavar="NAME", help="this part of the model alone, such as attn, delta-net, router or experts")
@option("--tokens", "n_tokens", type=click.IntRange(min=1), default=1, help="tokens taken at once: 1 is a decode step")
@option("-d", "--n-depth", type=click.IntRange(min=0), default=0, help="tokens that are in the context before")
@option("-c", "--ctx-size", "n_ctx", type=click.IntRange(min=0), env="CTX_SIZE",
        help="tokens the context holds: in a long one few tokens attend group by group; 0: as many as the model was trained on  "
             f"[default: {N_CTX}, or what --n-depth and --tokens come to]")  # fmt: skip
@click.option("--format", "format_", type=click.Choice(FORMATS), default="text", show_default=True,
              help="json is what Google's Model Explorer opens; svg is meant for one layer")  # fmt: skip
@click.option("--stats", is_flag=True, help="count nodes, kernels, barriers, bytes and FLOPs instead, as text or json")
@click.option("--mtp", is_flag=True, help="the NextN block instead of the trunk")
@graph_parameters[0]
@graph_parameters[1]
@option("-fa", "--flash-attn", "flash_attn", type=Switch(), default="auto", metavar="on|off|auto", env="FLASH_ATTN", help="flash attention")
@option("-ctk", "--cache-type-k", "type_k", type=click.Choice(CACHE_TYPES), default="f16", env="CACHE_TYPE_K", help="type of the K cache")
@option("-ctv", "--cache-type-v", "type_v", type=click.Choice(CACHE_TYPES), default="f16", env="CACHE_TYPE_V", help="type of the V cache")
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE", help="write to a file instead of stdout")
@provider_option
def command(path, geometry, type_, layer_list, skip, layer, scope, format_, stats, output, ggml, **options) -> None:
    """Show the graph a model is computed with.

    Every node with its op, name, type, shape (in ggml order), device, sources, bytes, FLOPs, part of the model, and the Python line
    that made it. Nothing but metadata is read.
    """
    if path and geometry:
        raise click.UsageError("a model and --geometry were given; one of them says what to show")
    if geometry and (layer_list or skip):
        raise click.UsageError("--layers and --skip choose among the layers of a file, and --geometry has none")
    if stats and format_ not in ("text", "json"):
        raise click.UsageError(f"--stats is written as text or json, not as {format_}")
    chosen = dict(layers=layer_list, skip=skip or ())
    view = _view(path, geometry, type_, ggml, chosen, **options)
    if layer is not None:
        if layer not in view.layers:
            raise OptionError(f"layer {layer} has no nodes in this graph, which has layers {view.layers[0]} to {view.layers[-1]}")
        view = view.of_layer(layer)
    if scope is not None:
        view = _part(view, scope)
    text = _stats(view, format_) if stats else getattr(view, f"to_{format_}")()
    if output is None:
        emit(text if text.endswith("\n") else text + "\n")
    else:
        write_text(Path(output), text)
        note(f"wrote {output}, {size(Path(output).stat().st_size)}")


def _view(path, geometry, type_, ggml, chosen, *, n_tokens, n_depth, n_ctx, mtp, graph, delta_net, flash_attn, type_k, type_v):
    from ..geometry import model_of
    from ..graph.support import resolve_options
    from ..graph_view import outline
    from ..model import load

    with model_of(geometry, type=type_, mtp=mtp, ggml=ggml) if geometry else load(path, ggml=ggml, weights=False, **chosen) as model:
        n_ctx = _context(n_ctx, n_depth + n_tokens, model.hparams)
        options = resolve_options(graph, delta_net, flash_attn, model.hparams, model.devices, n_ctx=n_ctx)
        return outline(model, options, n_tokens=n_tokens, n_past=n_depth, type_k=type_k, type_v=type_v, mtp=mtp, lines=True)


def _context(n_ctx: int | None, taken: int, hp) -> int:
    """Return how many cells a session of -c has, rounded up as it does; without -c at least those that are `taken`."""
    from ..memory.kv_cache import padded

    wanted = max(N_CTX, taken) if n_ctx is None else n_ctx or hp.n_ctx_train
    holds = padded(wanted)
    if holds < taken:
        raise OptionError(f"a context of {holds} tokens does not hold the {taken} that --n-depth and --tokens come to")
    return holds


def _part(view, scope: str):
    scopes = dict.fromkeys(node.scope for node in view.nodes)
    if scope not in scopes:
        raise OptionError(f"no nodes of scope {scope!r} here; there are {', '.join(scopes)}")
    return view.only({node.id for node in view.nodes if node.scope == scope})


def _stats(view, format_: str) -> str:
    from ..graph_view.text import counts

    return json.dumps({"title": view.title, **view.stats()}) if format_ == "json" else counts(view)
