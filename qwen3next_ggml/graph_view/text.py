"""Listings of a graph: aligned text, CSV, and its counts (level 7)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from .records import GraphView, Node

COLUMNS = ("id", "layer", "scope", "op", "name", "type", "shape", "device", "sources", "read", "written", "FLOPs", "barriers", "made by")
NUMBERS = (0, 1, 9, 10, 11, 12)
TOTALS = ("nodes", "executed", "kernels", "barriers", "bytes_read", "bytes_written", "flops")


def _cells(view: GraphView, node: Node) -> tuple:
    sources = ", ".join(view.by_id[source].name or f"#{source}" for source in node.sources)
    layer = "" if node.layer is None else node.layer
    shape = f"[{', '.join(map(str, node.shape))}]"
    return (
        node.id, layer, node.scope, node.op, node.name, node.type, shape, node.device, sources,
        node.bytes_read, node.bytes_written, node.flops, node.barriers, node.line,
    )  # fmt: skip


def listing(view: GraphView) -> str:
    """Return the title and one aligned line per node, in the order of running."""
    rows = [COLUMNS, *(_cells(view, node) for node in view.nodes)]
    return "\n".join((view.title, *_aligned(rows, NUMBERS))) + "\n"


def csv_rows(view: GraphView) -> str:
    """Return one row per node under a header; sources are separated by commas inside their field."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_cells(view, node) for node in view.nodes)
    return out.getvalue()


def counts(view: GraphView) -> str:
    """Return the totals by scope and by op, the whole first."""
    stats = view.stats()
    blocks = [view.title]
    for key in ("scope", "op"):
        groups = sorted(stats[f"by_{key}"], key=lambda g: (-g["flops"], -g["bytes_read"], g[key]))
        rows = [(key, *(name.replace("_", " ") for name in TOTALS))]
        rows += [(g[key], *(g[name] for name in TOTALS)) for g in groups]
        rows.append(("all", *(stats[name] for name in TOTALS)))
        blocks += ["", *_aligned(rows, range(1, len(rows[0])))]
    return "\n".join(blocks) + "\n"


def _aligned(rows: Iterable[Sequence], right: Sequence[int]) -> Iterator[str]:
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        yield "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
