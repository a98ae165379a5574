"""Memory for the nodes of a graph: on one device by the graph allocator, on several by the scheduler, which also computes (level 1).

Both place a cached graph again as often as wanted, which ggml itself does not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from ..errors import BackendError
from ._native import ffi, lib
from .backend import Backend, compute
from .cgraph import Graph
from .device import BufferType
from .owned import Owned
from .provider import failure
from .tensor import Context, Tensor

_NULL = ffi.NULL


class Placer(Owned):
    """Gives graphs memory that it may move or free: their tensors are unplaced then, and running them is refused until they are placed again."""

    __slots__ = ("_p", "_placed")

    def _hold(self, p: object, free: object, *kept: object) -> None:
        self._p = p
        self._placed: weakref.WeakSet[Context] = weakref.WeakSet()
        self._own(_free, p, free, self._placed, *kept)

    def _unplace(self) -> None:
        """Take the memory from every graph placed so far."""
        _unbind(self._placed)

    def _open(self) -> object:
        if self.closed:
            raise BackendError(f"the {type(self).__name__} is closed")
        return self._p

    def _fail(self, graph: Graph, where: str) -> BackendError:
        """Close what may be in any state now, and compose the error."""
        reason = failure() or "there is no room for its compute buffer"
        self.close()
        return BackendError(f"placing a graph of {graph.n_nodes} nodes {where}: {reason}")


class GraphAllocator(Placer):
    """One compute buffer shared by all graphs of a device; it only grows."""

    __slots__ = ("buffer_type",)

    def __init__(self, buffer_types: BufferType | list[BufferType]):
        types = [buffer_types] if isinstance(buffer_types, BufferType) else list(buffer_types)
        if len(types) != 1:
            raise BackendError(f"a graph allocator for {len(types)} kinds of memory: several devices need a Scheduler")
        self.buffer_type = types[0]
        self._hold(lib.ggml_gallocr_new(self.buffer_type._p), lib.ggml_gallocr_free)

    @property
    def size(self) -> int:
        """Bytes of the compute buffer."""
        return lib.ggml_gallocr_get_buffer_size(self._open(), 0)

    def reserve(self, graph: Graph) -> bool:
        """Make the buffer large enough for a graph without placing it. Returns whether it grew, which unplaces all graphs."""
        before = self.size
        if not lib.q_gallocr_reserve(self._open(), graph._p):
            raise self._fail(graph, f"in {self.buffer_type.name}")
        grew = self.size != before
        if grew:
            self._unplace()
        return grew

    def alloc(self, graph: Graph) -> bool:
        """Place every node and input of a graph that has no data of its own, again if it had been. Returns whether the buffer grew.

        Graphs share the memory: only what is in a buffer of its own survives from one to the next. When it grew, all others must be placed again.
        Raises BackendError when there is no room; the allocator is closed then.
        """
        lib.q_unbind(graph.context._p)
        grew = self.reserve(graph)
        if not lib.q_gallocr_alloc(self._open(), graph._p):
            raise self._fail(graph, f"in {self.buffer_type.name}")
        self._placed.add(graph.context)
        return grew


class Scheduler(Placer):
    """Splits graphs over several backends, the first preferred, the last the CPU; places and computes one at a time."""

    __slots__ = ("_pins", "backends", "device", "graph_size", "name")

    def __init__(self, backends: list[Backend], graph_size: int):
        if not backends or backends[-1].device.kind != "cpu":
            raise BackendError("a scheduler needs backends, the CPU's last")
        self.backends, self.graph_size = list(backends), graph_size
        self.name = "+".join(backend.name for backend in backends)
        # which node runs where is the scheduler's own affair
        self.device = None
        self._pins: dict[Tensor, Backend] = {}
        array = ffi.new("ggml_backend *[]", [backend._open() for backend in backends])
        sched = lib.ggml_backend_sched_new(array, _NULL, len(backends), graph_size, False, False)
        self._hold(sched, lib.ggml_backend_sched_free, self.backends)

    def pin(self, tensor: Tensor, backend: Backend) -> None:
        """Have a node computed on a backend, in every graph placed from now on."""
        if backend not in self.backends:
            raise BackendError(f"pin {tensor!r}: {backend!r} is not one of this scheduler's")
        self._pins[tensor] = backend

    def reserve(self, graph: Graph) -> None:
        """Make the compute buffers large enough for a graph without placing it; all graphs are unplaced."""
        self._split(lib.q_sched_reserve, graph)
        graph.restore_sources()

    def alloc(self, graph: Graph) -> None:
        """Split and place a graph, again if it had been; the one placed before is unplaced.

        Raises BackendError when it does not fit; the scheduler is closed then.
        """
        self._split(lib.q_sched_alloc, graph)
        self._placed.add(graph.context)

    def compute(self, graph: Graph) -> None:
        """Run the graph placed last. Raises what Backend.compute raises."""
        compute(self, graph)

    def reset(self) -> None:
        """Unplace the graph placed last and forget all pins."""
        self._pins.clear()
        self._unplace()
        lib.ggml_backend_sched_reset(self._open())

    @property
    def n_splits(self) -> int:
        """Pieces the last graph was cut into."""
        return lib.ggml_backend_sched_get_n_splits(self._open())

    def size(self, backend: Backend) -> int:
        """Bytes of the compute buffer of one backend."""
        return lib.ggml_backend_sched_get_buffer_size(self._open(), backend._open())

    def request_abort(self) -> None:
        """Stop the computation that is running."""
        for backend in self.backends:
            backend.request_abort()

    def native(self) -> tuple[object, object, object]:
        """Return what the native calls want: backend, scheduler, stop flag."""
        opened = [backend._open() for backend in self.backends]
        return opened[-1], self._open(), self.backends[-1]._stop

    def owns(self, tensor: Tensor) -> bool:
        """Tell whether copies to a tensor may be queued: not when several backends are at work."""
        return False

    def _split(self, call: object, graph: Graph) -> None:
        p = self._open()
        self._unplace()
        graph.restore_sources()
        lib.q_unbind(graph.context._p)
        lib.ggml_backend_sched_reset(p)
        for tensor, backend in self._pins.items():
            lib.ggml_backend_sched_set_tensor_backend(p, tensor._p, backend._open())
        if not call(p, graph._p):
            raise self._fail(graph, f"on {self.name}")


def _unbind(contexts: Iterable[Context]) -> None:
    for context in list(contexts):
        lib.q_unbind(context._p)


def _free(p: object, free: object, placed: Iterable[Context], *kept: object) -> None:
    _unbind(placed)
    free(p)
