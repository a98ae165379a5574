"""Nodes of a graph as frozen values (level 7).

Shapes are in ggml order. Nothing here is an address, so two listings of the same graph are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

KERNEL, VIEW, EMPTY = "kernel", "view", "empty"
WEIGHT, INPUT, STATE, OUTSIDE = "weight", "input", "state", "outside"


@dataclass(frozen=True, slots=True)
class Node:
    """One tensor of a graph.

    `id` is its place in the order of running, or the name of a leaf. `kind` is kernel (runs), view (moves nothing) or
    empty (no elements); of leaves weight, input or state; outside for a node of another layer that is read here.
    `barriers` is how often the CPU's threads wait for each other on its behalf; a kernel without one is fused into the next.
    `bytes_read`, `bytes_written` and `flops` are what `costs` says. `lines` are the Python lines that made it, innermost first, when they were recorded.
    """

    id: str
    name: str
    op: str
    kind: str
    type: str
    shape: tuple[int, ...]
    device: str
    layer: int | None
    scope: str
    sources: tuple[str, ...] = ()
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    barriers: int = 0
    lines: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The innermost line, such as graph/linear.py:15; empty when none was recorded."""
        return self.lines[0] if self.lines else ""


@dataclass(frozen=True)
class GraphView:
    """A graph: `nodes` in the order they run, and the `leaves` they read: weights, inputs, states."""

    title: str
    nodes: tuple[Node, ...]
    leaves: tuple[Node, ...]
    layer: int | None = field(default=None)

    @cached_property
    def by_id(self) -> dict[str, Node]:
        """Every node and leaf by its id; all sources are in here."""
        return {node.id: node for node in (*self.leaves, *self.nodes)}

    @property
    def names(self) -> list[str]:
        """Names in the order of running; llama.cpp gives some more than once."""
        return [node.name for node in self.nodes]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape in ggml order; of a repeated name the last one."""
        return {node.name: node.shape for node in self.nodes}

    @property
    def layers(self) -> list[int]:
        """The layers that have nodes here, in order."""
        return sorted({node.layer for node in self.nodes if node.layer is not None})

    def of_layer(self, il: int) -> GraphView:
        """Return layer `il` alone; what it reads of other layers becomes a leaf of kind "outside"."""
        part = self.only({node.id for node in self.nodes if node.layer == il})
        return GraphView(f"{self.title}, layer {il}", part.nodes, part.leaves, il)

    def only(self, ids: Collection[str]) -> GraphView:
        """Return these nodes alone; what they read of others becomes a leaf of kind "outside"."""
        nodes = tuple(node for node in self.nodes if node.id in ids)
        read = dict.fromkeys(source for node in nodes for source in node.sources if source not in ids)
        return GraphView(self.title, nodes, tuple(_as_leaf(self.by_id[id_]) for id_ in read))

    def stats(self) -> dict:
        """Count nodes, executed ones, kernels (a fused pair is one), barriers, bytes and FLOPs: in all, by scope and by op."""
        return totals(self.nodes) | {key: _grouped(self.nodes, key.removeprefix("by_")) for key in ("by_scope", "by_op")}

    def to_text(self) -> str:
        """Return one line per node."""
        from .text import listing

        return listing(self)

    def to_csv(self) -> str:
        """Return a row per node under a header."""
        from .text import csv_rows

        return csv_rows(self)

    def to_dot(self) -> str:
        """Return the graph in Graphviz's language, layers and scopes as clusters."""
        from .dot import dot

        return dot(self)

    def to_json(self) -> str:
        """Return the graph as Google's Model Explorer reads it."""
        from .model_explorer import document

        return document(self)

    def to_svg(self) -> str:
        """Return a drawing of the kernels, views folded into their readers; meant for one layer."""
        from .svg import drawing

        return drawing(self)

    def to_html(self) -> str:
        """Return one page that needs nothing else: a drawing to zoom, a search, and what is known of each node."""
        from .html import page

        return page(self)


def totals(nodes: Iterable[Node]) -> dict[str, int]:
    """Add up the figures of `nodes`."""
    nodes = list(nodes)
    return {
        "nodes": len(nodes),
        "executed": sum(node.kind == KERNEL for node in nodes),
        "kernels": sum(node.kind == KERNEL and node.barriers > 0 for node in nodes),
        "barriers": sum(node.barriers for node in nodes),
        "bytes_read": sum(node.bytes_read for node in nodes),
        "bytes_written": sum(node.bytes_written for node in nodes),
        "flops": sum(node.flops for node in nodes),
    }


def _grouped(nodes: Iterable[Node], key: str) -> list[dict]:
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(getattr(node, key), []).append(node)
    return [{key: name, **totals(members)} for name, members in groups.items()]


def _as_leaf(node: Node) -> Node:
    if node.kind in (WEIGHT, INPUT, STATE):
        return node
    return Node(node.id, node.name, node.op, OUTSIDE, node.type, node.shape, node.device, node.layer, node.scope)
