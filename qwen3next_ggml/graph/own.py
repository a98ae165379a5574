"""A graph of one's own: ggml's ops on numpy arrays, no model needed (level 5)."""

import numpy as np

from .. import ggml
from ..errors import GraphError
from ..ggml import types


class Graph(ggml.Ops):
    """Build and compute ggml nodes on one device.

    `tensor` brings an array in, every op of ggml is a method, `compute` returns values as numpy arrays. Results stay
    usable as operands of later ops only through `tensor`.
    """

    def __init__(self, *, device: str = "CPU", n_threads: int | None = None, max_nodes: int = 4096):
        ggml.provider()
        super().__init__(ggml.Context(max_nodes, graph_size=max_nodes))
        self._max_nodes = max_nodes
        self._arrays: dict[ggml.Tensor, np.ndarray] = {}
        self._backend = ggml.device(device).init()
        if n_threads:
            self._backend.set_n_threads(n_threads)

    def tensor(self, array: np.ndarray, *, dtype: str = "f32", name: str | None = None) -> ggml.Tensor:
        """Bring `array` in as an input of type `dtype` (quantised types too); its ggml shape is the numpy one reversed."""
        array = np.ascontiguousarray(array)
        kind = types.GgmlType.of(dtype)
        x = self.context.new_tensor(kind, *(array.shape[::-1] or (1,)), name=name)
        self.set_input(x)
        if kind.is_quantized:
            array = types.quantize(kind, array.astype(np.float32))
        elif kind.name != "bf16":
            array = array.astype({"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}[kind.name])
        else:
            raise GraphError("tensor: bf16 has no numpy type; bring float32 in and cast")
        self._arrays[x] = array
        return x

    def mul_mat_id(self, as_: ggml.Tensor, b: ggml.Tensor, ids: ggml.Tensor) -> ggml.Tensor:
        """As `Ops.mul_mat_id`; raises GraphError for given ids that name an expert twice in a row or one that is not there."""
        if ids in self._arrays:
            _check_ids(self._arrays[ids], as_.ne[2])
        return super().mul_mat_id(as_, b, ids)

    def compute(self, *outputs: ggml.Tensor) -> np.ndarray | list[np.ndarray]:
        """Compute `outputs` → their values, one array or a list, axes reversed from ggml order."""
        graph = ggml.Graph(self.context, self._max_nodes)
        for x in outputs:
            self.set_output(x)
            graph.expand(x)
        if self._backend.device.keeps_bindings:
            self._backend.renew()
        with ggml.GraphAllocator([self._backend.device.buffer_type()]) as allocator:
            allocator.alloc(graph)
            for x, array in self._arrays.items():
                if x.data:
                    x.set(array)
            self._backend.compute(graph)
            values = [x.get() for x in outputs]
        return values[0] if len(values) == 1 else values

    def close(self) -> None:
        """Free the backend and every tensor of this graph."""
        self._backend.close()
        self.context.close()

    def __enter__(self) -> "Graph":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _check_ids(ids: np.ndarray, n_expert: int) -> None:
    outside = ids[(ids < 0) | (ids >= n_expert)]
    if outside.size:
        raise GraphError(f"mul_mat_id: expert {outside[0]} is outside 0 … {n_expert - 1}")
    rows = np.sort(ids.reshape(-1, ids.shape[-1]))
    # kernels of some backends count on the experts of a token being different ones
    twice = np.argwhere(rows[:, 1:] == rows[:, :-1])
    if twice.size:
        row, place = twice[0]
        raise GraphError(f"mul_mat_id: token {row} has expert {rows[row, place]} more than once")
