"""One node at a time out of a graph that is placed elsewhere (level 1)."""

from __future__ import annotations

from . import backend as backends
from . import types
from ._native import ffi, lib
from .backend import Backend
from .cgraph import Graph
from .ops import Ops
from .tensor import Context, Tensor


class Excerpt:
    """Runs a node of a graph without the nodes it needs: whoever uses it has run those before.

    Expanding a node into a graph brings in everything behind it, so the one slot of this graph is filled by hand. Nothing is
    checked again: the nodes are those of a graph that has been placed and could run.
    """

    __slots__ = ("_backend", "_context", "_graph", "_slot", "_step")

    def __init__(self, backend: Backend):
        self._backend = backend
        self._context = Context(2, graph_size=1)
        self._graph = Graph(self._context, 1)
        self._graph.expand(Ops(self._context).sqr(self._context.new_tensor(types.F32, 1)))
        self._slot = lib.ggml_graph_nodes(self._graph._p)
        native, scheduler, stop = backend.native()
        self._step = ffi.new("struct q_step *", {"backend": native, "sched": scheduler, "graph": self._graph._p, "stop": stop})

    def run(self, node: Tensor) -> None:
        """Compute `node` from what its operands hold. Raises what `Backend.compute` raises."""
        if self._backend.device.keeps_bindings:
            self._backend.renew()
            self._step.backend, _, self._step.stop = self._backend.native()
        self._slot[0] = node._p
        backends.run(self._step, self._backend.name)

    def close(self) -> None:
        """Free the slot."""
        self._context.close()
