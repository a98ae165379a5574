"""`qgraph parity`: the first node where two runs part, and every op against float64 (level 12)."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import click

from .options import CACHE_TYPES, Switch, graph_parameters, json_option, option, path_options, provider_option
from .output import emit, emit_json, note, table
from .prompts import prompt_options

DIFFERENT = 1


@click.command(name="parity")
@path_options
@prompt_options
@option("--ref", default="llama.cpp", metavar="SIDE",
        help="llama.cpp, float64, plain (llama.cpp's graph on the same device), a device such as CPU, or a file that --save wrote")  # fmt: skip
@click.option("--ref-ggml", metavar="NAME|DIR", help="libggml of --ref plain or a device  [default: that of --ggml]")
@option("-dev", "--device", default="CPU", metavar="DEV,…", env="DEVICE", help="devices of the run that is examined")
@provider_option
@option("--tolerance", default=1e-6, metavar="X", help="NMSE from which a node counts as different")
@option("--capture", "patterns", multiple=True, default=("*",), metavar="GLOB", show_default=False,
        help="names of the nodes that are compared  [default: all]")  # fmt: skip
@option("-ub", "--ubatch-size", "n_ubatch", type=click.IntRange(min=1), default=512, env="UBATCH", help="tokens computed at once")
@option("-t", "--threads", "n_threads", type=click.IntRange(min=1), env="THREADS", help="CPU threads  [default: all this process may use]")
@option("-fa", "--flash-attn", "flash_attn", type=Switch(), default="auto", metavar="on|off|auto", env="FLASH_ATTN", help="flash attention")
@option("-ctk", "--cache-type-k", "type_k", type=click.Choice(CACHE_TYPES), default="f32", help="type of the K cache, on both sides")
@option("-ctv", "--cache-type-v", "type_v", type=click.Choice(CACHE_TYPES), default="f32", help="type of the V cache, on both sides")
@graph_parameters[0]
@graph_parameters[1]
@click.option("--sweep", "sweeping", is_flag=True, help="compare over ubatches 1, 3, 64, 512, flash attention, delta-net forms and graphs")
@click.option("--ops", "only_ops", is_flag=True, help="instead: every op our graphs emit, over shapes that break kernels, against float64")
@click.option("--save", metavar="FNAME", help="write the recording of the run that is examined, as safetensors")
@json_option
@click.pass_context
def command(ctx, path, prompt, ref, ref_ggml, tolerance, sweeping, only_ops, save, as_json, **run) -> None:
    """Compare two runs of the same tokens node by node, joined by llama.cpp's names.

    The last token is decoded by itself. Each side has a process of its own. Printed are the first node, in the order of the graph, whose
    NMSE exceeds the tolerance, with what it reads and the Python line that made it, and the worst node of every layer. Quantised weights
    make kernels round activations, so float64 is 1e-4 away there. Exit code: 0 equal, 1 different.
    """
    if sweeping and save or only_ops and (sweeping or save):
        raise click.UsageError("--ops, --sweep and --save exclude each other")
    if only_ops:
        same, result = _ops(run["ggml"], run["device"])
    else:
        same, result = _runs(_run(path, prompt, run), ref, ref_ggml, tolerance, sweeping, save)
    if as_json:
        emit_json(result)
    ctx.exit(0 if same else DIFFERENT)


def _run(path: str | None, prompt, options: dict):
    from ..gguf_file import GgufFile
    from ..model import embedded_model
    from ..parity import Run
    from ..tokenizer import Tokenizer

    text = prompt.given_or_piped()
    if not text:
        raise click.UsageError("no prompt: give one with -p or -f")
    with GgufFile.open(path or embedded_model()) as file:
        tokens = Tokenizer.from_metadata(file.metadata).encode(text)
    return Run(path=path, tokens=tuple(tokens), **options)


def _runs(run, ref: str, ref_ggml: str | None, tolerance: float, sweeping: bool, save: str | None) -> tuple[bool, object]:
    from ..parity import Recording, compare, record_apart, reference_of, sweep

    if sweeping:
        rows = []
        for variant, found in sweep(run, ref, tolerance=tolerance, ggml=ref_ggml):
            rows.append({"flash_attn": variant.flash_attn, "n_ubatch": variant.n_ubatch, "delta_net": variant.delta_net,
                         "graph": variant.graph, **_summary(found)})  # fmt: skip
            if len(rows) == 1:
                emit(f"{'flash':5}  {'ubatch':>6}  {'delta net':14}  {'graph':5}  {'nodes':>5}  {'worst':>8}  first difference\n")
            emit("{flash_attn:5}  {n_ubatch:6}  {delta_net:14}  {graph:5}  {nodes:5}  {worst:8.1e}  {first}\n".format_map(
                {**rows[-1], "worst": found.worst.nmse, "first": rows[-1]["first"] or "-"}))  # fmt: skip
        return not any(row["first"] for row in rows), rows
    wanted = reference_of(ref, run, ggml=ref_ggml)
    reference = wanted if isinstance(wanted, Recording) else record_apart(wanted)
    ours = record_apart(run)
    if save:
        ours.save(save)
        note(f"wrote {save}")
    found = compare(ours, reference, tolerance=tolerance)
    for line in report(found):
        emit(line + "\n")
    return not found.misses, {"here": found.title, "reference": found.reference, "tolerance": tolerance, **_summary(found),
                              "first": found.first and _node(found.first)}  # fmt: skip


def _summary(found) -> dict:
    first = found.first and found.first.value
    return {"nodes": len(found.nodes), "misses": len(found.misses), "worst": _number(found.worst.nmse), "first": first and first.name}


def _node(node) -> dict:
    known = {key: x for key, x in vars(node.value).items() if key != "array"}
    return known | {"nmse": _number(node.nmse), "why": node.why, "ubatch": node.ubatch}


def _number(x: float) -> float | None:
    """JSON has no infinity."""
    return x if isfinite(x) else None


def report(found) -> Iterator[str]:
    """Yield what was compared, the first difference, and a row per layer."""
    yield f"here       {found.title}"
    yield f"reference  {found.reference}"
    yield (f"compared   {len(found.nodes)} nodes; {len(found.only_here)} only here, {len(found.only_there)} only in the reference, "
           f"{len(found.unlike)} of other extent")  # fmt: skip
    yield ""
    if found.first is None:
        yield f"no difference above {found.tolerance:.0e}"
    else:
        first = found.first
        yield f"first difference: {first.value.name} #{first.value.occurrence}, {first.why or f'NMSE {first.nmse:.2e}'}, from ubatch {first.ubatch} on"
        of = f" of {first.value.kernel}" if first.value.kernel not in ("", first.value.op) else ""
        yield f"  {first.value.op}{of} {list(first.value.ne)}" + (f", made by {first.value.line}" if first.value.line else "")
        yield from (f"    reads {name} {list(shape)}" for name, shape in first.value.inputs)
    yield ""
    rows = [("" if layer is None else layer, n, f"{worst.nmse:.2e}", worst.value.name) for layer, n, worst in found.by_layer()]
    yield from table([("layer", "nodes", "worst", "node"), *rows], right=(0, 1, 2))


def _ops(ggml: str | None, device: str) -> tuple[bool, object]:
    from ..parity.ops import MISS, check_ops

    rows = []
    for row in check_ops(device, ggml_name=ggml):
        emit(f"{row.op:16}  {row.shape:58}  {row.nmse:8.1e}  {row.verdict}{row.why and f': {row.why}'}\n")
        rows.append({**vars(row), "nmse": _number(row.nmse)})
    n_bad = sum(row["verdict"] == MISS for row in rows)
    emit(f"{len(rows)} cases, {n_bad} missed\n")
    return not n_bad, rows
