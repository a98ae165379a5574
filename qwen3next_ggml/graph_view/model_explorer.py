"""A graph as JSON that Google's Model Explorer opens (level 7).

Follows its published graph types: graphs → nodes with id, label, namespace, incomingEdges, attrs, outputsMetadata.
"""

from __future__ import annotations

import json

from .palette import FILL
from .records import KERNEL, OUTSIDE, WEIGHT, GraphView, Node


def document(view: GraphView) -> str:
    """Return one collection with one graph; every attribute of a node is in its `attrs`, figures as text."""
    nodes = [_node(node) for node in (*view.leaves, *view.nodes)]
    stats = view.stats()
    shown = {key: str(value) for key, value in stats.items() if not isinstance(value, list)}
    graph = {"id": view.title, "nodes": nodes, "groupNodeAttributes": {"": shown}}
    return json.dumps({"label": view.title, "graphs": [graph]}, ensure_ascii=False, separators=(",", ":"))


def _node(node: Node) -> dict:
    attributes = {"name": node.name, "op": node.op, "kind": node.kind, "type": node.type, "shape": _shape(node), "device": node.device}
    attributes |= {"scope": node.scope} | ({} if node.layer is None else {"layer": str(node.layer)})
    if node.op != "NONE" and node.kind != OUTSIDE:
        figures = ("bytes_read", "bytes_written", "flops", "barriers")
        attributes |= {key: str(getattr(node, key)) for key in figures}
    if node.lines:
        attributes["made by"] = " < ".join(node.lines)
    fill = "#ffffff" if node.op == "NONE" else FILL[node.scope] if node.kind == KERNEL else "#f2f2f2"
    return {
        "id": node.id,
        "label": node.name if node.op == "NONE" or node.kind == OUTSIDE else f"{node.op} {node.name}",
        "namespace": _namespace(node),
        "attrs": [{"key": key, "value": value} for key, value in attributes.items()],
        "incomingEdges": [
            {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(i)} for i, source in enumerate(node.sources)
        ],
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "tensor_shape", "value": f"{node.type} {_shape(node)}"}]}],
        "style": {"backgroundColor": fill},
    }


def _namespace(node: Node) -> str:
    # inputs and caches serve many layers or none; weights sit with what reads them
    if node.op == "NONE" and node.kind != WEIGHT:
        return "inputs" if node.kind == "input" else f"layer {node.layer}/{node.scope}"
    return node.scope if node.layer is None else f"layer {node.layer}/{node.scope}"


def _shape(node: Node) -> str:
    return f"[{', '.join(map(str, node.shape))}]"
