"""A whole graph as one page (level 7).

The page holds data and a script; layers of one kind share a layout, so the size grows with the text alone.
"""

from __future__ import annotations

import json
import linecache
import os
from functools import cache
from html import escape
from importlib import resources

from .boxes import drawn, path
from .layout import Placed
from .lines import PACKAGE
from .palette import FILL
from .records import GraphView, Node

COLUMNS = 8
PANEL_GAP, PANEL_HEADER = 90.0, 40.0


def page(view: GraphView) -> str:
    """Return an HTML document that loads nothing: drawing, search, and a panel with what is known of the node clicked."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    # a name could hold "</script>"
    data = json.dumps(_data(view), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("{{title}}", escape(view.title)).replace("{{data}}", data)


class _Table:
    """Values that repeat, each sent once and named by its place."""

    def __init__(self):
        self.values: dict = {}

    def __call__(self, value) -> int:
        return self.values.setdefault(value, len(self.values))


def _data(view: GraphView) -> dict:
    """Return everything the page shows; nodes come first and leaves after them, both named by their place."""
    every = (*view.nodes, *view.leaves)
    index = {node.id: i for i, node in enumerate(every)}
    words, lines = _Table(), _Table()
    nodes = [
        [
            node.name, words(node.op), words(node.kind), words(node.type), node.shape, words(node.device), node.layer, words(node.scope),
            [index[source] for source in node.sources], node.bytes_read, node.bytes_written, node.flops, node.barriers,
            [lines(line) for line in node.lines],
        ]
        for node in every
    ]  # fmt: skip
    panels, layouts = _panels(view, index)
    stats = view.stats()
    return {
        "title": view.title, "fill": FILL, "stats": {key: value for key, value in stats.items() if key != "by_op"},
        "nodes": nodes, "n_nodes": len(view.nodes), "panels": panels, "layouts": layouts,
        "words": list(words.values), "lines": [[line, source_of(line)] for line in lines.values],
    }  # fmt: skip


def _panels(view: GraphView, index: dict[str, int]) -> tuple[list[dict], list[dict]]:
    """Return a panel per layer with its boxes, set out in rows, and the layouts that panels share."""
    parts = _parts(view)
    layouts: dict[Placed, int] = {}
    panels, x, y, row_height = [], 0.0, 0.0, 0.0
    for i, (label, part) in enumerate(parts):
        found = drawn(part)
        # what comes before the layers has a row of its own, so that layers of one kind stand below each other
        if (i - (parts[0][1].layer is None)) % COLUMNS == 0 and i:
            x, y, row_height = 0.0, y + row_height + PANEL_GAP, 0.0
        height = found.placed.height + PANEL_HEADER
        boxes = [[index[box.node.id], *box.size, list(box.text)] for box in found.boxes]
        layout = layouts.setdefault(found.placed, len(layouts))
        panels.append({"label": label, "x": x, "y": y, "w": max(found.placed.width, 200.0), "h": height, "layout": layout, "boxes": boxes})
        x += panels[-1]["w"] + PANEL_GAP
        row_height = max(row_height, height)
    shared = [
        {"corners": placed.corners, "edges": [[a, b, path(points)] for a, b, points in placed.edges]} for placed in layouts
    ]
    return panels, shared


def _parts(view: GraphView) -> list[tuple[str, GraphView]]:
    """Cut the graph into what comes before the layers, each layer, and what comes after them."""
    if view.layer is not None:
        return [(f"layer {view.layer}", view)]
    layers = view.layers
    kinds = {il: _mixer(view.nodes, il) for il in layers}
    parts = [(f"layer {il} · {kinds[il]}", view.of_layer(il)) for il in layers]
    first = next((i for i, node in enumerate(view.nodes) if node.layer is not None), len(view.nodes))
    before = {node.id for node in view.nodes[:first] if node.layer is None}
    after = {node.id for node in view.nodes if node.layer is None} - before
    return [
        *([("before the layers", view.only(before))] if before else []), *parts, *([("after the layers", view.only(after))] if after else []),
    ]  # fmt: skip


def _mixer(nodes: tuple[Node, ...], il: int) -> str:
    return next((node.scope for node in nodes if node.layer == il), "")


@cache
def source_of(line: str) -> str:
    """Return the text of a line of this package named like graph/norm.py:11; empty for files elsewhere."""
    name, _, number = line.rpartition(":")
    return linecache.getline(os.path.join(PACKAGE, name), int(number)).strip()
