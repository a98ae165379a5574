"""Graphs of nodes in the order they run, and what has to be true before one runs (level 1)."""

from __future__ import annotations

from ..errors import BackendError, GraphError
from ._native import ffi, lib
from .provider import failure, forked
from .tensor import Context, Tensor

_NULL = ffi.NULL


class Graph:
    """A ggml_cgraph of up to `size` nodes inside a context: nodes in the order they were expanded, and every operand before its user."""

    __slots__ = ("_order", "_p", "_sources", "context")

    def __init__(self, context: Context, size: int):
        self._p = lib.q_new_graph(context._p, size)
        if not self._p:
            raise GraphError(f"new graph: {failure()}")
        self.context = context
        self._sources = None

    def expand(self, tensor: Tensor) -> Tensor:
        """Append a node and everything it needs; a write that nobody reads is kept this way. Returns the node.

        Raises GraphError when the graph is full: it must not be used then.
        """
        try:
            done = lib.q_expand(self._p, tensor._p)
        except AttributeError:
            raise GraphError(f"expand: {tensor!r}, expected a Tensor") from None
        if not done:
            raise GraphError(f"expand {tensor!r} into a graph for {self.size} nodes: {failure()}")
        return tensor

    @property
    def n_nodes(self) -> int:
        return lib.ggml_graph_n_nodes(self._p)

    @property
    def size(self) -> int:
        return lib.ggml_graph_size(self._p)

    @property
    def nodes(self) -> list[Tensor]:
        nodes = lib.ggml_graph_nodes(self._p)
        return [self.context.handle(nodes[i]) for i in range(self.n_nodes)]

    def clear(self) -> None:
        """Take all nodes out; the tensors stay."""
        lib.ggml_graph_clear(self._p)
        self._sources = None

    def check(self, device: object | None) -> None:
        """Raise the reason why this graph cannot run: no memory, a closed part, or a node the device (a Device) has no code for."""
        if forked():
            raise BackendError("ggml was opened before this process was forked and cannot compute in the child; start it with spawn")
        if self.context.closed:
            raise GraphError("the context of the graph is closed")
        node = lib.q_unsupported(self._p, device._p if device else _NULL)
        if node:
            raise GraphError(f"{self.context.handle(node)!r} cannot run: {failure()}")

    def restore_sources(self) -> None:
        """Put back nodes and operands as they were when this was first called, before a scheduler redirected them."""
        nodes, n_nodes = lib.ggml_graph_nodes(self._p), self.n_nodes
        if self._sources is None:
            self._sources = ffi.new("ggml_tensor *[]", 10 * n_nodes + 1)
            lib.q_save_sources(self._p, self._sources)
            self._order = ffi.unpack(nodes, n_nodes)
        else:
            # a backend may put the nodes of its pieces into another order: Vulkan does
            nodes[0:n_nodes] = self._order
            lib.q_restore_sources(self._p, self._sources)
