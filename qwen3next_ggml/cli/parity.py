"""`qgraph parity`: the first node where two runs part, and every op against float64 (level 12)."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import BackendError
from .options import CACHE_TYPES, Listed, Switch, graph_parameters, json_option, option, path_options, provider_option
from .output import emit, emit_json, note, size, write_text
from .parity_report import Sweep, document, number, report
from .prompts import prompt_options

DIFFERENT = 1
AXES = ("ubatch", "flash_attn", "delta_net", "graph", "ggml")


@click.command(name="parity")
@path_options
@prompt_options
@option("--ref", default="llama.cpp", metavar="SIDE",
        help="llama.cpp, a folder with a build of it, float64, plain (llama.cpp's graph on the same device), a device such as CPU, "
             "or a file that --save or `qgraph trace` wrote")  # fmt: skip
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
@click.option("--sweep", "axes", is_flag=False, flag_value=",".join(AXES[:-1]), type=Listed(click.Choice(AXES)), metavar="[AXIS,…]",
              help="compare over every combination of: ubatch (1, 3, 64, 512), flash_attn, delta_net, graph, ggml (every libggml "
                   "installed); without a list all but ggml")  # fmt: skip
@click.option("--shrink", type=click.Path(dir_okay=False, path_type=Path), metavar="FNAME.py",
              help="write the op of the first difference, with what it reads, as a script that runs it alone")  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FNAME.svg",
              help="draw how far every node is off, in the order of the graph")  # fmt: skip
@click.option("--ops", "only_ops", is_flag=True, help="instead: every op our graphs emit, over shapes that break kernels, against float64")
@click.option("--save", metavar="FNAME", help="write the recording of the run that is examined, as safetensors")
@json_option
@click.pass_context
def command(ctx, path, prompt, ref, ref_ggml, tolerance, axes, shrink, plot, only_ops, save, as_json, **run) -> None:
    """Compare two runs of the same tokens node by node, joined by llama.cpp's names.

    The last token is decoded by itself. Each side has a process of its own. Printed are the first node, in the order of the graph, whose
    NMSE exceeds the tolerance, with what it reads and the Python line that made it, and the worst node of every layer. Quantised weights
    make kernels round activations, so float64 is 1e-4 away there. Exit code: 0 equal, 1 different.

    The script that --shrink writes takes its operands from the reference where that has the same op, else from the run that is examined.
    It compares with the reference's value and with float64, and its exit code is the answer, on any --device of any --ggml.
    """
    if sum(map(bool, (axes, only_ops, save or shrink or plot))) > 1:
        raise click.UsageError("--ops, --sweep, and --save, --shrink or --plot exclude each other")
    if shrink and shrink.suffix != ".py":
        raise click.UsageError(f"--shrink writes a Python script, and {shrink} does not end in .py")
    if only_ops:
        same, result = _ops(run["ggml"], run["device"])
    else:
        examined = _run(path, prompt, run)
        how = (examined, ref, ref_ggml, tolerance)
        same, result = _sweep(*how, axes) if axes else _compare(*how, save, shrink, plot)
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


def _compare(
    run, ref: str, ref_ggml: str | None, tolerance: float, save: str | None, script: Path | None, picture: Path | None
) -> tuple[bool, object]:
    from ..parity import Recording, compare, cut_like, look_apart, plot, record_apart, reference_of

    wanted = reference_of(ref, run, ggml=ref_ggml)
    run = cut_like(run, wanted)
    try:
        look_apart(wanted, run)
        reference = wanted if isinstance(wanted, Recording) else record_apart(wanted)
    except BackendError as error:
        # a device is what is left when a name is nothing else
        other = str(error).startswith(f"no device {ref};")
        raise BackendError(f"{error}; other references are llama.cpp, float64, plain, a folder, a file") if other else error from None
    ours = record_apart(run)
    if save:
        ours.save(save)
        note(f"wrote {save}")
    found = compare(ours, reference, tolerance=tolerance)
    for line in report(found):
        emit(line + "\n")
    if picture:
        write_text(picture, plot(found))
        note(f"wrote {picture}")
    if script and found.first:
        _shrink(script, found, run, wanted, ours, reference)
    elif script:
        note("no node differs, so there is no op to write")
    return not found.misses, document(found)


def _shrink(path: Path, found, *sides) -> None:
    from ..parity import providers, shrink

    run, arrays = sides[0], path.with_suffix(".safetensors")
    one = shrink(found.first, *sides)
    n_bytes = one.save(arrays)
    write_text(path, one.script(device=run.device, ggml=providers(run.ggml)[0], tolerance=found.tolerance))
    note(f"wrote {path} and {arrays}, {size(n_bytes)}; run it with: python {path}")


def _sweep(run, ref: str, ref_ggml: str | None, tolerance: float, axes: tuple[str, ...]) -> tuple[bool, object]:
    from ..parity import sweep

    shown = Sweep(axes)
    for variant, found in sweep(run, ref, axes, tolerance=tolerance, ggml=ref_ggml):
        text = shown.row(variant, found)
        emit(text + "\n" if len(shown.rows) > 1 else f"{shown.head}\n{text}\n")
    return not any(row["first"] for row in shown.rows), shown.rows


def _ops(ggml: str | None, device: str) -> tuple[bool, object]:
    from ..parity.ops import HALF, MISS, check_ops

    rows = []
    for row in check_ops(device, ggml_name=ggml):
        emit(f"{row.op:16}  {row.shape:58}  {row.nmse:8.1e}  {row.verdict}{row.why and f': {row.why}'}\n")
        rows.append({**vars(row), "nmse": number(row.nmse)})
    n_bad, n_half = (sum(row["verdict"] == verdict for row in rows) for verdict in (MISS, HALF))
    emit(f"{len(rows)} cases, {n_bad} missed" + (f", {n_half} in float16" if n_half else "") + "\n")
    return not n_bad, rows
