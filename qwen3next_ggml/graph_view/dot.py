"""A graph in Graphviz's language (level 7). One layer draws well; a whole model is for other tools to cut."""

from __future__ import annotations

import json
from itertools import groupby

from .palette import FILL
from .records import KERNEL, OUTSIDE, GraphView, Node


def dot(view: GraphView) -> str:
    """Return a digraph: kernels as boxes, views rounded and grey, leaves without a frame; a cluster per layer and scope."""
    out = [f"digraph {_quoted(view.title)} {{", '  graph [fontname="sans-serif"];', '  node [shape=box, style=filled, fontname="sans-serif", fontsize=10];']
    ordered = sorted(view.nodes, key=lambda n: (n.layer is not None, n.layer or 0, n.scope))
    for (layer, scope), nodes in groupby(ordered, key=lambda n: (n.layer, n.scope)):
        label = scope if layer is None else f"{layer} {scope}"
        out.append(f"  subgraph {_quoted(f'cluster {label}')} {{ label={_quoted(label)};")
        out += [f"    {_quoted(node.id)} [{_look(node)}];" for node in nodes]
        out.append("  }")
    out += [f"  {_quoted(leaf.id)} [{_look(leaf)}];" for leaf in view.leaves]
    for node in view.nodes:
        for source in node.sources:
            out.append(f"  {_quoted(source)} -> {_quoted(node.id)};")
    return "\n".join([*out, "}"]) + "\n"


def _look(node: Node) -> str:
    leaf = node.op == "NONE" or node.kind == OUTSIDE
    what = f"{node.kind} " if leaf else f"{node.op} "
    label = f"{node.name}\n{what}{node.type} {list(node.shape)}"
    fill = "white" if leaf else FILL[node.scope] if node.kind == KERNEL else "gray92"
    style = "filled" if leaf or node.kind == KERNEL else "filled,rounded"
    tip = f", tooltip={_quoted(' < '.join(node.lines))}" if node.lines else ""
    return f'label={_quoted(label)}, fillcolor="{fill}", style="{style}"{", color=white" if leaf else ""}{tip}'


def _quoted(text: str) -> str:
    # a JSON string is a DOT string: the same escapes for quotes and line ends, and DOT takes UTF-8
    return json.dumps(text, ensure_ascii=False)
