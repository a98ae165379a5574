"""Backends, which compute graphs on a device (level 1). Knows no models: placed graphs in, values in their tensors out."""

from __future__ import annotations

import threading

from ..errors import Aborted, BackendError, GraphError
from ._native import ffi, lib
from .cgraph import Graph
from .device import BufferType, Device
from .owned import Owned
from .provider import failure
from .tensor import Tensor

_NULL = ffi.NULL
_ABORTED = 1
_interrupts: dict[int, BaseException] = {}


def _remember(kind: type, error: BaseException, trace: object) -> None:
    _interrupts[threading.get_ident()] = error


@ffi.def_extern(name="q_let_python_run", error=1, onerror=_remember)
def _let_python_run() -> int:
    """Enter the interpreter from inside a computation: a pending Ctrl-C raises here, is remembered, and stops the computation."""
    for _ in range(1):
        pass
    return 0


class Backend(Owned):
    """Computes graphs on one device, one at a time."""

    __slots__ = ("_p", "_stop", "device", "interruptible", "n_starts", "name", "_threads")

    def __init__(self, device: Device):
        self.device = device
        self.n_starts = 0
        self._start()
        self.name = ffi.string(lib.ggml_backend_name(self._p)).decode()

    def _start(self) -> None:
        self._p = lib.ggml_backend_dev_init(self.device._p, _NULL)
        if not self._p:
            raise BackendError(f"device {self.device.name} cannot be used: its driver refused")
        self._stop = ffi.new("struct q_stop *")
        self.interruptible = lib.q_install_stop(self._p, self._stop)
        self._threads: list = []
        self._own(_free_backend, self._p, self._stop, self.device._p, self._threads)
        self.n_starts += 1

    def __repr__(self) -> str:
        return f"Backend({self.name})"

    @property
    def buffer_type(self) -> BufferType:
        return BufferType(lib.ggml_backend_get_default_buffer_type(self._open()))

    def set_n_threads(self, n: int) -> None:
        """Use n threads, where the backend has threads of its own; they stay from one graph to the next."""
        if n < 1:
            raise BackendError(f"{n} threads, expected at least 1")
        lib.q_set_n_threads(self._open(), n)
        # OpenMP keeps its threads by itself, and ggml looks at no others then
        if "OPENMP" not in self.device.features and (threads := lib.q_keep_threads(self._p, n)):
            _drop(self.device._p, self._threads)
            self._threads.append(threads)

    def compute(self, graph: Graph) -> None:
        """Run a graph whose tensors are all placed.

        Raises GraphError when a node cannot run, Aborted when stopped, BackendError when it failed, or what a signal handler raised.
        """
        compute(self, graph)

    def renew(self) -> None:
        """Start over natively, so that the driver knows no earlier graph; a Step or Scheduler made before must be made again.

        For devices that keep bindings, between two different graphs; costs microseconds. `n_starts` counts.
        """
        self.close()
        self._start()

    def synchronize(self) -> None:
        """Wait until everything queued has run."""
        lib.ggml_backend_synchronize(self._open())

    def request_abort(self) -> None:
        """Stop the computation that is running, from another thread or a signal handler; nothing happens when none is."""
        self._stop.wanted = 1

    def close(self) -> None:
        """Free the backend. Raises BackendError while it is computing in another thread."""
        if self._stop.running:
            raise BackendError(f"backend {self.name} is computing")
        super().close()

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


def compute(runner: object, graph: Graph) -> None:
    """Check a graph and run it on a Backend or Scheduler."""
    backend, sched, stop = runner.native()
    graph.check(runner.device)
    step = ffi.new("struct q_step *", {"backend": backend, "sched": sched, "graph": graph._p, "stop": stop})
    run(step, runner.name)


def run(step: object, name: str) -> None:
    """Run a native step and turn its status into an exception."""
    status = lib.q_run(step)
    if _interrupts and (error := _interrupts.pop(threading.get_ident(), None)):
        raise error
    if status == lib.Q_LEAVING and threading.current_thread() is not threading.main_thread():
        # ends a thread that outlives the interpreter without a traceback
        raise SystemExit
    if status in (_ABORTED, lib.Q_LEAVING):
        raise Aborted(f"computing on {name} was stopped")
    if status == lib.Q_REFUSED:
        raise BackendError(f"{name}: {failure()}")
    if status == lib.Q_BAD_INDEX:
        raise GraphError(failure())
    if status != 0:
        raise BackendError(f"computing on {name} failed: {ffi.string(lib.ggml_status_to_string(status)).decode()}")


def _free_backend(p: object, stop: object, device: object, threads: list) -> None:
    lib.ggml_backend_free(p)
    _drop(device, threads)


def _drop(device: object, threads: list) -> None:
    while threads:
        lib.q_drop_threads(device, threads.pop())
