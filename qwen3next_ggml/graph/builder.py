"""Emit one graph: ggml's ops plus names, inputs and shape checks (level 5).

Knows shapes and nodes; knows no files, no memory and no architecture.
"""

from collections.abc import Callable

import numpy as np

from .. import ggml
from ..errors import GraphError
from ..ggml import types
from .options import GraphOptions

PLAIN_VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


def expect_shape(x: ggml.Tensor, what: str, *wanted: int) -> None:
    """Raise GraphError unless `x` has shape `wanted` in ggml order; a wanted 0 stands for any size."""
    got = x.ne
    want = (*wanted, 1, 1, 1)[:4]
    if got != want and any(w and w != n for n, w in zip(got, want)):
        raise GraphError(f"{what}: expected shape {list(want)} (0 = any), got {list(got)} of {x.name!r}")


class GraphBuilder(ggml.Ops):
    """Build one ggml graph: every op of `ggml.Ops`, plus `name`, `input` and `expand`.

    `scales` maps a weight to its per-tensor scale, `stacks` to those that lie behind it, `one_more` to itself and the matrix behind,
    `repacked` to itself in another layout; `on_name` sees every named value and may replace it.
    """

    def __init__(
        self,
        context: ggml.Context,
        graph: ggml.Graph,
        options: GraphOptions,
        *,
        scales: dict | None = None,
        stacks: dict | None = None,
        one_more: dict | None = None,
        repacked: dict | None = None,
        on_name: Callable | None = None,
    ):
        super().__init__(context)
        self.graph = graph
        self.options = options
        self.scales = scales or {}
        self.stacks = stacks or {}
        self.one_more = one_more or {}
        self.repacked = repacked or {}
        self.inputs: dict[str, ggml.Tensor] = {}
        self.constants: dict[str, np.ndarray] = {}
        self.outputs: dict[str, ggml.Tensor] = {}
        self.expand = graph.expand
        if on_name is None:
            # a seventh of the time to build a graph goes into names
            self.name = self.set_name
        self._on_name = on_name
        self._scratch: dict[str, ggml.Tensor] = {}
        self._layer_ends: list[tuple[int, int]] = []

    @property
    def is_patched(self) -> bool:
        """Say whether somebody sees values as they are named."""
        return self._on_name is not None

    def name(self, x: ggml.Tensor, name: str, il: int = -1) -> ggml.Tensor:
        """Name `x` as llama.cpp's `cb` does ("attn_norm-0"; no suffix for il < 0) and return the value to go on with."""
        self.set_name(x, name, il)
        return self._on_name(self, x, f"{name}-{il}" if il >= 0 else name)

    def input(self, name: str, dtype: ggml.GgmlType | np.ndarray, *ne: int) -> ggml.Tensor:
        """Return the input `name`, creating it with shape `ne` on first use.

        Given an array instead, the input is float32, or int32 for integers, of its shape reversed and holds it in every run of this graph.
        """
        if name not in self.inputs:
            if isinstance(dtype, np.ndarray):
                as_is, kind = (np.int32, types.I32) if dtype.dtype.kind == "i" else (np.float32, types.F32)
                self.constants[name] = np.ascontiguousarray(dtype, as_is)
                dtype, ne = kind, dtype.shape[::-1] or (1,)
            x = self.inputs[name] = self.context.new_tensor(dtype, *ne, name=name)
            self.set_input(x)
        return self.inputs[name]

    def scratch(self, name: str, *ne: int) -> ggml.Tensor:
        """Return float32 memory of the graph's own that nodes are laid into, one tensor for a name; nothing fills it."""
        if name not in self._scratch:
            self._scratch[name] = self.set_input(self.context.new_tensor(types.F32, *ne, name=name))
        return self._scratch[name]

    def output(self, name: str, x: ggml.Tensor) -> None:
        """Emit `x` and note that it is read beside the logits."""
        self.expand(x)
        self.outputs[name] = x

    def end_layer(self, x: ggml.Tensor, il: int) -> None:
        """Emit layer `il`'s result and note that all nodes since the last layer belong to it."""
        self.expand(x)
        self._layer_ends.append((self.graph.n_nodes, il))

    def node_layers(self) -> dict[ggml.Tensor, int]:
        """Return the layer every node belongs to; what precedes or follows the layers goes with its neighbour."""
        nodes = self.graph.nodes
        layers, start = {}, 0
        for end, il in self._layer_ends:
            layers.update((x, il) for x in nodes[start:end])
            start = end
        layers.update((x, il) for x in nodes[start:])
        return layers


def capture(
    g: GraphBuilder, graph: ggml.Graph, wanted: Callable[[str], bool]
) -> tuple[ggml.Graph, dict[tuple[str, int], tuple[ggml.Tensor, ggml.Tensor]]]:
    """Return a copy of `graph` in which every named node or input `wanted` keeps its value, and those nodes.

    Keys are (name, occurrence); values are (node, tensor to read). A view, or a node that a later one overwrites,
    is read through a copy placed right after it, because its own memory holds something else by the end.
    """
    nodes = graph.nodes
    overwritten = {n.view_src for n in nodes if n.view_src is not None and n.op not in PLAIN_VIEW_OPS}
    out = ggml.Graph(g.context, 2 * len(nodes) + 64)
    seen: dict[str, int] = {}
    # an input that nodes write into is room for them, no value
    inputs = {name: x for name, x in g.inputs.items() if wanted(name) and x not in overwritten}
    # a patch may leave an input without a reader, and then it gets no memory
    read = {x for node in nodes for x in node.src} if inputs else ()
    kept = {(name, 0): (x, x) for name, x in inputs.items() if x in read}
    for x, _ in kept.values():
        g.set_output(x)
    for node in nodes:
        out.expand(node)
        name = node.name
        occurrence = seen[name] = seen.get(name, -1) + 1
        if not name or not wanted(name) or node.nelements == 0:
            continue
        value = node
        if node.view_src is not None or node in overwritten:
            value = g.cont(node)
            out.expand(value)
        g.set_output(value)
        kept[name, occurrence] = (node, value)
    return out, kept
