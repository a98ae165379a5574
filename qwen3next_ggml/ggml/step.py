"""One step of a decode loop: arrays into a graph's inputs, compute, outputs into arrays, in a single native call (level 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import BackendError, TensorError
from ._native import ffi, lib
from .backend import Backend, run
from .cgraph import Graph
from .scheduler import Scheduler
from .tensor import Tensor


class Step:
    """A placed graph with the tensors to fill and to fetch. Other Python threads run while it computes."""

    __slots__ = ("_epoch", "_last", "_native", "_parts", "_runner", "graph", "inputs", "outputs")

    def __init__(self, backend: Backend | Scheduler, graph: Graph, inputs: list[Tensor], outputs: list[Tensor]):
        self._runner, self.graph = backend, graph
        self.inputs, self.outputs = list(inputs), list(outputs)
        self._check()
        native, sched, stop = backend.native()
        self._parts = self._copies(self.inputs), self._copies(self.outputs), stop
        self._native = ffi.new(
            "struct q_step *",
            {
                "backend": native, "sched": sched, "graph": graph._p, "stop": stop,
                "inputs": self._parts[0], "outputs": self._parts[1], "n_inputs": len(self.inputs), "n_outputs": len(self.outputs),
            },
        )  # fmt: skip
        self._last: tuple[np.ndarray, ...] | None = None  # the arrays the native step points at

    def run(self, arrays: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        """Copy `arrays` into the inputs, compute, copy the outputs into `outs`, which are written in place.

        The same tuple of arrays as the last time is not looked at again. Raises TensorError when an array does not have its
        tensor's bytes, GraphError for an index out of range, else what Backend.compute raises.
        """
        if arrays is not self._last:
            self._last = None
            _point(self._parts[0], self.inputs, arrays, writable=False)
            self._last = tuple(arrays)
        _point(self._parts[1], self.outputs, outs, writable=True)
        if self._epoch != lib.q_epoch():
            self._check()
        run(self._native, self._runner.name)

    @property
    def compute_ns(self) -> int:
        """Nanoseconds the last run computed, without what it copied in and out."""
        return self._native.compute_ns

    def _check(self) -> None:
        """Look at everything the native call trusts; needed again only when something was closed or moved since."""
        self._runner.native()
        self.graph.check(self._runner.device)
        self._epoch = lib.q_epoch()

    def _copies(self, tensors: list[Tensor]) -> object:
        copies = ffi.new("struct q_copy[]", len(tensors) + 1)
        for copy, tensor in zip(copies, tensors, strict=False):
            if not tensor.data:
                raise BackendError(f"step: {tensor!r} has not been placed in a buffer")
            if not tensor.is_contiguous:
                raise TensorError(f"step: the elements of {tensor!r} are not adjacent")
            copy.tensor, copy.size, copy.queued = tensor._p, tensor.nbytes, self._runner.owns(tensor)
        return copies


def _point(copies: object, tensors: list[Tensor], arrays: Sequence[np.ndarray], *, writable: bool) -> None:
    if len(arrays) != len(tensors):
        raise TensorError(f"step: {len(arrays)} arrays for {len(tensors)} tensors")
    for copy, tensor, array in zip(copies, tensors, arrays, strict=False):
        if array.nbytes != copy.size:
            raise TensorError(f"step: array of {array.dtype} {array.shape} for {tensor!r} of {copy.size} bytes")
        try:
            copy.array = ffi.from_buffer(array, require_writable=writable)
        except (BufferError, ValueError) as error:
            # not in one piece, or read-only
            raise TensorError(f"step: array of {array.dtype} {array.shape} for {tensor!r}: {error}") from None
