"""Memory for the nodes of a graph: on one device by the graph allocator, on several by the scheduler, which also computes (level 1).

Both place a cached graph again as often as wanted, which ggml itself does not.
"""

from __future__ import annotations

from ..errors import BackendError
from ._native import ffi, lib
from .backend import Backend, compute
from .cgraph import Graph
from .device import BufferType
from .owned import Owned
from .provider import failure
from .tensor import Tensor

_NULL = ffi.NULL


class GraphAllocator(Owned):
    """One compute buffer shared by all graphs of a device; it only grows.

    `generation` changes when the buffer has moved: graphs placed before that must be placed again.
    """

    __slots__ = ("_p", "buffer_type", "generation")

    def __init__(self, buffer_types: BufferType | list[BufferType]):
        types = [buffer_types] if isinstance(buffer_types, BufferType) else list(buffer_types)
        if len(types) != 1:
            raise BackendError(f"a graph allocator for {len(types)} kinds of memory: several devices need a Scheduler")
        self.buffer_type = types[0]
        self.generation = 0
        self._p = lib.ggml_gallocr_new(self.buffer_type._p)
        self._own(lib.ggml_gallocr_free, self._p)

    @property
    def size(self) -> int:
        """Bytes of the compute buffer."""
        return lib.ggml_gallocr_get_buffer_size(self._open(), 0)

    def reserve(self, graph: Graph) -> bool:
        """Make the buffer large enough for a graph without placing it. Returns whether it grew."""
        return self._grow(lib.q_gallocr_reserve, graph)

    def alloc(self, graph: Graph) -> bool:
        """Place every node and input of a graph that has no data of its own, again if it had been. Returns whether the buffer grew.

        Graphs placed before share the memory: only what is in a buffer of its own survives between them. When it grew they must be placed again.
        Raises BackendError when there is no room; the allocator is closed then.
        """
        graph.place(self)
        grew = self._grow(lib.q_gallocr_alloc, graph)
        graph.placed(self.mark())
        return grew

    def mark(self) -> tuple:
        """Return a value that changes when graphs placed so far lose their memory."""
        return self, self.generation, self.closed

    def close(self) -> None:
        """Free the compute buffer."""
        super().close()
        lib.q_new_epoch()

    def _grow(self, call: object, graph: Graph) -> bool:
        before = self.size
        if not call(self._open(), graph._p):
            reason = failure() or f"no room in {self.buffer_type.name}"
            self.close()
            raise BackendError(f"compute buffer of a graph of {graph.n_nodes} nodes: {reason}")
        grew = self.size != before
        if grew:
            self.generation += 1
            lib.q_new_epoch()
        return grew

    def _open(self) -> object:
        if self.closed:
            raise BackendError("the graph allocator is closed")
        return self._p


class Scheduler(Owned):
    """Splits graphs over several backends, the first preferred, the last the CPU; places and computes them."""

    __slots__ = ("_current", "_p", "_pins", "backends", "device", "graph_size", "name")

    def __init__(self, backends: list[Backend], graph_size: int):
        if not backends or backends[-1].device.kind != "cpu":
            raise BackendError("a scheduler needs backends, the CPU's last")
        self.backends, self.graph_size = list(backends), graph_size
        self.name = "+".join(backend.name for backend in backends)
        # which node runs where is the scheduler's own affair
        self.device = None
        self._current = 0
        self._pins: dict[Tensor, Backend] = {}
        array = ffi.new("ggml_backend *[]", [backend._open() for backend in backends])
        self._p = lib.ggml_backend_sched_new(array, _NULL, len(backends), graph_size, False, False)
        self._own(_free_scheduler, self._p, self.backends)

    def pin(self, tensor: Tensor, backend: Backend) -> None:
        """Have a node computed on a backend, in every graph placed from now on."""
        if backend not in self.backends:
            raise BackendError(f"pin {tensor!r}: {backend!r} is not one of this scheduler's")
        self._pins[tensor] = backend

    def reserve(self, graph: Graph) -> None:
        """Make the compute buffers large enough for a graph without placing it."""
        self._split(lib.q_sched_reserve, graph)
        graph.restore_sources()

    def alloc(self, graph: Graph) -> None:
        """Split and place a graph, again if it had been; graphs placed before must be placed again to run.

        Raises BackendError when it does not fit; the scheduler is closed then.
        """
        self._split(lib.q_sched_alloc, graph)
        graph.placed(self.mark())

    def mark(self) -> tuple:
        """Return a value that changes when the graph placed last loses its memory."""
        return self, self._current, self.closed

    def compute(self, graph: Graph) -> None:
        """Run the graph placed last. Raises what Backend.compute raises."""
        compute(self, graph)

    def reset(self) -> None:
        """Forget the graph placed last and all pins."""
        self._pins.clear()
        lib.ggml_backend_sched_reset(self._open())
        self._new_placement()

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

    def close(self) -> None:
        """Free the compute buffers."""
        super().close()
        lib.q_new_epoch()

    def native(self) -> tuple[object, object, object]:
        """Return what the native calls want: backend, scheduler, stop flag."""
        return self.backends[-1]._open(), self._open(), self.backends[-1]._stop

    def owns(self, tensor: Tensor) -> bool:
        """Tell whether copies to a tensor may be queued: not when several backends are at work."""
        return False

    def _split(self, call: object, graph: Graph) -> None:
        p = self._open()
        graph.restore_sources()
        graph.place(self)
        self._new_placement()
        lib.ggml_backend_sched_reset(p)
        for tensor, backend in self._pins.items():
            lib.ggml_backend_sched_set_tensor_backend(p, tensor._p, backend._open())
        if not call(p, graph._p):
            reason = failure() or "no room for its compute buffers"
            self.close()
            raise BackendError(f"placing a graph of {graph.n_nodes} nodes on {self.name}: {reason}")

    def _new_placement(self) -> None:
        self._current += 1
        lib.q_new_epoch()

    def _open(self) -> object:
        if self.closed:
            raise BackendError("the scheduler is closed")
        return self._p


def _free_scheduler(p: object, backends: list[Backend]) -> None:
    lib.ggml_backend_sched_free(p)
