"""What `qgraph parity` prints of comparisons, as text and as plain data (level 12)."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from .output import table


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
        off = first.why or f"NMSE {first.nmse:.2e}"
        yield f"first difference: {first.value.name} #{first.value.occurrence}, {off}, from ubatch {first.ubatch} on"
        of = f" of {first.value.kernel}" if first.value.kernel not in ("", first.value.op) else ""
        yield f"  {first.value.op}{of} {list(first.value.ne)}" + (f", made by {first.value.line}" if first.value.line else "")
        yield from (f"    reads {name} {list(shape)}" for name, shape in first.value.inputs)
        if first.value.quantised:
            name, kind = first.value.quantised
            yield f"  {name} is {kind}: kernels may round what they multiply with it, a CPU's to 8 bits; --ref float64 does not"
    yield ""
    rows = [("" if layer is None else layer, n, f"{worst.nmse:.2e}", worst.value.name) for layer, n, worst in found.by_layer()]
    yield from table([("layer", "nodes", "worst", "node"), *rows], right=(0, 1, 2))


def document(found) -> dict:
    """Return a comparison as JSON has it: in short, the first difference, a row per layer, and what could not be compared."""
    return {
        "here": found.title, "reference": found.reference, "tolerance": found.tolerance, **summary(found),
        "first": found.first and _node(found.first),
        "layers": [
            {"layer": layer, "nodes": n, "worst": number(worst.nmse), "node": worst.value.name} for layer, n, worst in found.by_layer()
        ],
        "only_here": found.only_here, "only_there": found.only_there, "unlike": found.unlike,
    }  # fmt: skip


def summary(found) -> dict:
    """Return how many nodes there are and differ, the largest NMSE, and the name of the first that differs."""
    first = found.first and found.first.value
    return {"nodes": len(found.nodes), "misses": len(found.misses), "worst": number(found.worst.nmse), "first": first and first.name}


def number(x: float) -> float | None:
    """Return a number for JSON, which has no infinity."""
    return x if isfinite(x) else None


def _node(node) -> dict:
    value = node.value
    return {
        "name": value.name, "occurrence": value.occurrence, "layer": node.layer, "op": value.op, "kernel": value.kernel, "ne": value.ne,
        "inputs": [{"name": name, "ne": shape} for name, shape in value.inputs], "line": value.line,
        "nmse": number(node.nmse), "why": node.why, "ubatch": node.ubatch,
        "quantised": dict(zip(("name", "type"), value.quantised)) or None,
    }  # fmt: skip


class Sweep:
    """The table of a sweep, printed row by row: a column for whatever is varied, the worst node, and the first difference."""

    columns = {
        "flash_attn": ("flash", 5), "n_ubatch": ("ubatch", 6), "ggml": ("ggml", 11), "delta_net": ("delta net", 14), "graph": ("graph", 5),
    }  # fmt: skip

    def __init__(self, axes: tuple[str, ...]):
        self._shown = {name: x for name, x in self.columns.items() if name.removeprefix("n_") in axes}
        self.rows: list[dict] = []

    @property
    def head(self) -> str:
        return "  ".join([*(f"{title:{width}}" for title, width in self._shown.values()), "nodes     worst  first difference"])

    def row(self, run, found) -> str:
        """Keep a row and return its text."""
        self.rows.append({name: getattr(run, name) for name in self.columns} | summary(found))
        cells = [f"{getattr(run, name):{width}}" for name, (_, width) in self._shown.items()]
        return "  ".join([*cells, f"{len(found.nodes):5}  {found.worst.nmse:8.1e}  {self.rows[-1]['first'] or '-'}"])
