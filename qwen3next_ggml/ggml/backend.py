"""Backends, which compute graphs on a device, and the one step of a decode loop in a single native call (level 1).

Knows no models: a graph, arrays in, arrays out.
"""

from __future__ import annotations

import numpy as np

from ..errors import Aborted, BackendError, TensorError
from ._native import ffi, lib
from .device import BufferType, Device
from .owned import Owned
from .tensor import Graph, Tensor

_NULL = ffi.NULL
_ABORTED = 1
_interrupts: list[BaseException] = []


def _remember(kind: type, error: BaseException, trace: object) -> None:
    _interrupts.append(error)


@ffi.def_extern(name="q_let_python_run", error=1, onerror=_remember)
def _let_python_run() -> int:
    """Enter the interpreter from inside a computation: a pending Ctrl-C raises here, is remembered, and stops the computation."""
    for _ in range(1):
        pass
    return 0


class Backend(Owned):
    """Computes graphs on one device, one at a time."""

    __slots__ = ("_p", "_stop", "device", "interruptible", "name")

    def __init__(self, device: Device):
        self.device = device
        self._p = lib.ggml_backend_dev_init(device._p, _NULL)
        if not self._p:
            raise BackendError(f"device {device.name} cannot be used: its driver refused")
        self.name = ffi.string(lib.ggml_backend_name(self._p)).decode()
        self._stop = ffi.new("struct q_stop *")
        self.interruptible = lib.q_install_stop(self._p, self._stop)
        self._own(_free_backend, self._p, self._stop)

    def __repr__(self) -> str:
        return f"Backend({self.name})"

    @property
    def buffer_type(self) -> BufferType:
        return BufferType(lib.ggml_backend_get_default_buffer_type(self._open()))

    def set_n_threads(self, n: int) -> None:
        """Use n threads, where the backend has threads of its own."""
        if n < 1:
            raise BackendError(f"{n} threads, expected at least 1")
        lib.q_set_n_threads(self._open(), n)

    def compute(self, graph: Graph) -> None:
        """Run a graph whose tensors are all placed. Raises Aborted when stopped, BackendError when it failed, or what a signal handler raised."""
        check(lib.q_compute(self._open(), _NULL, graph._p, self._stop), f"computing on {self.name}")

    def synchronize(self) -> None:
        """Wait until everything queued has run."""
        lib.ggml_backend_synchronize(self._open())

    def request_abort(self) -> None:
        """Stop the computation that is running, from another thread or a signal handler; nothing happens when none is."""
        self._stop.wanted = 1

    def native(self) -> tuple[object, object, object]:
        """Return what the native calls want: backend, scheduler, stop flag."""
        return self._open(), _NULL, self._stop

    def owns(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the backend's own memory, where copies may be queued."""
        base = tensor._p.view_src or tensor._p
        return lib.ggml_backend_buffer_get_type(base.buffer) == lib.ggml_backend_get_default_buffer_type(self._open())

    def _open(self) -> object:
        if self.closed:
            raise BackendError(f"backend {self.name} is closed")
        return self._p


class Step:
    """A graph with the arrays that go in and come out: filling, computing and fetching are one native call without the GIL."""

    __slots__ = ("_in", "_inputs", "_last", "_out", "_outputs", "_runner", "graph", "inputs", "outputs")

    def __init__(self, backend: Backend, graph: Graph, inputs: list[Tensor], outputs: list[Tensor]):
        self.graph, self.inputs, self.outputs = graph, list(inputs), list(outputs)
        self._runner = backend
        self._inputs, self._outputs = self._copies(self.inputs), self._copies(self.outputs)
        self._in, self._out = ffi.new("void *[]", len(inputs) + 1), ffi.new("void *[]", len(outputs) + 1)
        self._last = ()

    def run(self, arrays: list[np.ndarray], outs: list[np.ndarray]) -> None:
        """Copy `arrays` into the inputs, compute, copy the outputs into `outs`, which are written in place.

        Raises TensorError when an array does not have its tensor's bytes, else what Backend.compute raises.
        """
        now = (*arrays, *outs)
        if len(now) != len(self._last) or any(a is not b for a, b in zip(now, self._last, strict=True)):
            self._point(self._in, self.inputs, arrays)
            self._point(self._out, self.outputs, outs)
            self._last = now
        backend, sched, stop = self._runner.native()
        status = lib.q_step(
            backend, sched, self.graph._p, stop, self._inputs, len(self.inputs), self._in, self._outputs, len(self.outputs), self._out
        )
        check(status, f"computing on {self._runner.name}")

    def _copies(self, tensors: list[Tensor]) -> object:
        copies = ffi.new("struct q_copy[]", len(tensors) + 1)
        for copy, tensor in zip(copies, tensors, strict=False):
            if not tensor.data:
                raise BackendError(f"step: {tensor!r} has not been placed in a buffer")
            if not tensor.is_contiguous:
                raise TensorError(f"step: the elements of {tensor!r} are not adjacent")
            copy.tensor, copy.size = tensor._p, tensor.nbytes
            setattr(copy, "async", self._runner.owns(tensor))
        return copies

    def _point(self, pointers: object, tensors: list[Tensor], arrays: list[np.ndarray]) -> None:
        if len(arrays) != len(tensors):
            raise TensorError(f"step: {len(arrays)} arrays for {len(tensors)} tensors")
        for i, (tensor, array) in enumerate(zip(tensors, arrays, strict=True)):
            if array.nbytes != tensor.nbytes or not array.flags.c_contiguous:
                raise TensorError(f"step: array of {array.dtype} {array.shape} for {tensor!r} of {tensor.nbytes} bytes")
            pointers[i] = ffi.cast("void *", array.ctypes.data)


def check(status: int, doing: str) -> None:
    """Turn a status of ggml into an exception."""
    if _interrupts:
        raise _interrupts.pop()
    if status == _ABORTED:
        raise Aborted(f"{doing} was stopped")
    if status != 0:
        raise BackendError(f"{doing} failed: {ffi.string(lib.ggml_status_to_string(status)).decode()}")


def _free_backend(p: object, stop: object) -> None:
    lib.ggml_backend_free(p)
