"""What is drawn of a graph: a box per kernel, views folded into whoever reads them, leaves named inside (level 7)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .layout import Placed, place
from .records import INPUT, OUTSIDE, STATE, WEIGHT, GraphView, Node

MARK = {WEIGHT: "×", INPUT: "◦", STATE: "↺", OUTSIDE: "←"}
CHAR, LINE, PAD = 5.9, 13.0, 7.0


@dataclass(frozen=True)
class Box:
    """One drawn kernel: its node and the lines of text in it, name first."""

    node: Node
    text: tuple[str, ...]

    @property
    def size(self) -> tuple[float, float]:
        # digits of a layer's number do not count, so that layers of one kind are placed alike
        longest = max(len(re.sub(r"-\d+$", "-00", line)) for line in self.text)
        return round(longest * CHAR + 2 * PAD, 1), len(self.text) * LINE + PAD


@dataclass(frozen=True)
class Drawing:
    """Boxes and where they are; edges of `placed` are pairs of places in `boxes`."""

    boxes: tuple[Box, ...]
    placed: Placed


def drawn(view: GraphView) -> Drawing:
    """Fold views away and place what is left; made for one layer."""
    kernels = [node for node in view.nodes if node.kind == "kernel"]
    index = {node.id: i for i, node in enumerate(kernels)}
    behind = _behind(view, index)
    boxes, edges = [], {}
    for i, node in enumerate(kernels):
        sources = list(dict.fromkeys(id_ for source in node.sources for id_ in behind[source]))
        edges |= {(index[source], i): None for source in sources if source in index}
        boxes.append(Box(node, _text(node, [view.by_id[s] for s in sources if s not in index])))
    return Drawing(tuple(boxes), place(tuple(box.size for box in boxes), tuple(edges)))


def _behind(view: GraphView, index: dict[str, int]) -> dict[str, tuple[str, ...]]:
    """Return, for every id, the kernels or leaves whose values it shows: itself unless it is a view."""
    behind = {leaf.id: (leaf.id,) for leaf in view.leaves}
    for node in view.nodes:
        behind[node.id] = (node.id,) if node.id in index else tuple(i for source in node.sources for i in behind[source])
    return behind


def _text(node: Node, leaves: Sequence[Node]) -> tuple[str, ...]:
    named = node.name and not re.fullmatch(r"node_\d+|\(.*\)", node.name)
    head = (node.name, f"{node.op} {_form(node)}") if named else (node.op, _form(node))
    return (*head, *(_leaf(leaf) for leaf in leaves))


def _leaf(leaf: Node) -> str:
    if leaf.kind == WEIGHT:
        return f"{MARK[WEIGHT]} {re.sub(r'^blk[.][0-9]+[.]', '', leaf.name).removesuffix('.weight')} {_form(leaf)}"
    return f"{MARK[leaf.kind]} {leaf.name}"


def _form(node: Node) -> str:
    return f"{node.type} [{', '.join(map(str, node.shape))}]"


def path(points: Sequence[tuple[float, float]]) -> str:
    """Return an SVG path through `points` whose bends start and end upright."""
    (x, y), *rest = points
    out = [f"M{x:g} {y:g}"]
    for to_x, to_y in rest:
        if to_x == x:
            out.append(f"V{to_y:g}")
        else:
            middle = (y + to_y) / 2
            out.append(f"C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}")
        x, y = to_x, to_y
    return "".join(out)
