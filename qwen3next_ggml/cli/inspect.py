"""`qgraph inspect`: what is in a file, read without its tokenizer and without touching a tensor (level 12)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby

import click

from ..errors import QGraphError
from .options import json_option, opened, path_options, provider_option
from .output import count, emit, emit_json, placement, size, table


@click.command(name="inspect")
@path_options
@json_option
@provider_option
def command(path: str | None, as_json: bool, ggml: str | None) -> None:
    """Show what is in a GGUF file.

    Metadata, hyperparameters, kinds of layers, and every tensor with its role, type, shape (in ggml order, fastest dimension first)
    and size. A file that cannot be run is still shown; the command then ends with the reason.
    """
    from ..ggml import provider

    provider(ggml)
    with opened(path) as file:
        report, problem = describe(file)
    if as_json:
        emit_json(report)
    else:
        emit("\n".join(lines(report)) + "\n")
    if problem:
        raise problem


def describe(file) -> tuple[dict, QGraphError | None]:
    """Return everything `inspect` shows as plain values, and what is wrong with the file."""
    hp, roles, leftovers, load, problem = _read_model(file)
    tensors = [
        {
            "name": info.name, "layer": _layer(info.name), "role": roles.get(info.name), "type": info.type_name,
            "shape": list(info.ne), "nbytes": info.nbytes, "n_params": _product(info.ne), "shard": info.shard,
        }
        for info in file.tensors.values()
    ]  # fmt: skip
    report = {
        "path": str(file.path),
        "gguf_version": file.version,
        "n_files": len(file.shards),
        "arch": file.metadata.get("general.architecture"),
        "name": file.metadata.get("general.name"),
        "n_params": sum(t["n_params"] for t in tensors),
        "nbytes": sum(t["nbytes"] for t in tensors),
        "metadata": {key: file.metadata.summary(key) for key in file.metadata},
        "hparams": asdict(hp) if hp else None,
        "tensors": tensors,
        "by_role": _totals(tensors, "role"),
        "by_type": _totals(tensors, "type"),
        "load": load,
        "leftovers": leftovers,
        "notes": list(file.notes),
        "error": str(problem) if problem else None,
    }
    return report, problem


def _read_model(file) -> tuple[object, dict[str, str], list[str], dict | None, QGraphError | None]:
    """Go as far as the file allows: hyperparameters, roles of the tensors, leftovers, how it loads, and the error met on the way."""
    from .. import models
    from ..hparams import Metadata
    from ..tensors import TensorTable

    hp, roles, leftovers, load, problem = None, {}, [], None, None
    try:
        arch = models.find(file.arch)
        hp = arch.load_arch_hparams(Metadata(file.metadata, file.arch))
        table = TensorTable()
        arch.load_arch_tensors(table, hp)
        roles = {decl.name: decl.role for decl in table.decls()}
        checked = table.check(file)
        roles |= {decl.name: decl.role for decl, _ in checked.found}
        leftovers = list(checked.leftovers)
        load = _load_plan(file, table)
    except QGraphError as error:
        problem = error
    return hp, roles, leftovers, load, problem


def _load_plan(file, table) -> dict:
    """Return how loading would place the weights on this machine's CPU, and why; nothing is read."""
    from ..ggml import device, provider
    from ..tensors import load_weights

    with load_weights(file, table, device("CPU"), repack="auto", mmap="auto", data=False) as weights:
        return {
            "ggml": f"{provider().version} from {provider().name}", "nbytes": dict(weights.planned), "placement": placement(weights),
            "why": weights.policy.why, "notes": list(weights.notes),
        }  # fmt: skip


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal() else None


def _product(ne) -> int:
    total = 1
    for n in ne:
        total *= n
    return total


def _totals(tensors: list[dict], key: str) -> list[dict]:
    """Add up tensors of the same role or type, the largest sum first; a role's types are counted."""
    totals: dict[str, dict] = {}
    for tensor in tensors:
        sums = totals.setdefault(tensor[key], {key: tensor[key], "n_tensors": 0, "n_params": 0, "nbytes": 0, "types": {}})
        sums["types"][tensor["type"]] = sums["types"].get(tensor["type"], 0) + 1
        sums["n_tensors"] += 1
        sums["n_params"] += tensor["n_params"]
        sums["nbytes"] += tensor["nbytes"]
    return sorted(totals.values(), key=lambda sums: -sums["nbytes"])


def lines(report: dict) -> Iterator[str]:
    """Yield the report as text."""
    files = f" in {report['n_files']} files" if report["n_files"] > 1 else ""
    yield f"{report['path']}: GGUF v{report['gguf_version']}{files}, {report['arch']} {report['name'] or ''}".rstrip()
    yield (
        f"{len(report['tensors'])} tensors, {count(report['n_params'])} parameters, {size(report['nbytes'])}"
        + (f", {8 * report['nbytes'] / report['n_params']:.2f} bits each" if report["n_params"] else "")
    )
    yield from ("", "metadata")
    yield from table(report["metadata"].items(), indent="  ")
    if report["hparams"]:
        yield from _hparams(report["hparams"])
    yield from _tensors(report)
    for key in ("role", "type"):
        yield from ("", f"by {key}")
        rows = []
        for sums in report[f"by_{key}"]:
            types = ", ".join(f"{n} x {name}" for name, n in sums["types"].items()) if key == "role" else ""
            rows.append((sums[key] or "unknown", sums["n_tensors"], count(sums["n_params"]), size(sums["nbytes"]), types))
        yield from table(rows, right=(1, 2, 3), indent="  ")
    if report["load"]:
        load = report["load"]
        yield from ("", f"how it loads on the CPU, ggml {load['ggml']}", f"  {load['placement']}", f"  {load['why']}")
        yield from (f"  {line}" for line in load["notes"])
    for what in ("leftovers", "notes"):
        yield from ("", what) if report[what] else ()
        yield from (f"  {line}" for line in report[what])


def _hparams(hp: dict) -> Iterator[str]:
    yield from ("", "hyperparameters")
    flat = {key: value for key, value in hp.items() if key not in ("recurrent_layers", "rope")}
    flat |= {f"rope.{key}": value for key, value in hp["rope"].items()}
    yield from table(((key, f"{value:.7g}" if isinstance(value, float) else value) for key, value in flat.items()), indent="  ")
    yield from ("", "layers (r recurrent, a attention, n NextN)")
    letters = [kind[0] for kind in _kinds(hp)]
    yield from (f"  {il:3d}  {' '.join(letters[il : il + 16])}" for il in range(0, len(letters), 16))


def _kinds(hp: dict) -> list[str]:
    n_layer = hp["n_layer_all"] - hp["n_layer_nextn"]
    kinds = ("recurrent" if recurrent else "attention" for recurrent in hp["recurrent_layers"])
    return [kind if il < n_layer else "nextn" for il, kind in enumerate(kinds)]


def _tensors(report: dict) -> Iterator[str]:
    def layer_of(tensor: dict) -> int:
        return -1 if tensor["layer"] is None else tensor["layer"]

    kinds = _kinds(report["hparams"]) if report["hparams"] else []
    ordered = sorted(report["tensors"], key=lambda t: (layer_of(t), t["role"] or ""))
    rows = [(t["name"], t["role"] or "unknown", t["type"], f"[{', '.join(map(str, t['shape']))}]", size(t["nbytes"])) for t in ordered]
    for il, group in groupby(zip(ordered, table(rows, right=(4,), indent="  ")), key=lambda pair: layer_of(pair[0])):
        kind = f", {kinds[il]}" if 0 <= il < len(kinds) else ""
        yield from ("", f"layer {il}{kind}" if il >= 0 else "outside the layers")
        yield from (line for _, line in group)
