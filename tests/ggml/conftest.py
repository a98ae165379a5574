"""One small graph at a time on the CPU: arrays in numpy order in, arrays out."""

from types import SimpleNamespace

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.ggml import types

_DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", np.dtype(np.int32): "i32", np.dtype(np.int64): "i64"}


class Bench:
    """A context with operations; tensors are made from arrays, and everything is placed and run at once."""

    def __init__(self):
        self.device = ggml.device("CPU")
        self.backend = self.device.init()
        self.backend.set_n_threads(2)
        self.context = ggml.Context(300, graph_size=256)
        self.g = ggml.Ops(self.context)
        self.given = []

    def tensor(self, array, type=None, name=None):
        """Make an input from an array in numpy order, stored as `type`; its values are set by `run`."""
        array = np.asarray(array)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        kind = types.GgmlType.of(type or _DTYPES[array.dtype])
        tensor = self.context.new_tensor(kind, *(array.shape[::-1] or (1,)), name=name)
        self.g.set_input(tensor)
        self.given.append((tensor, array if array.dtype.kind == "i" else stored(kind, array)))
        return tensor

    def run(self, *results, writes=()):
        """Compute and return the results as arrays; `writes` are nodes nobody reads, run in order before the results."""
        graph = ggml.Graph(self.context, 256)
        for node in (*writes, *results):
            graph.expand(self.g.set_output(node))
        with ggml.GraphAllocator(self.backend.buffer_type) as allocator:
            allocator.alloc(graph)
            for tensor, array in self.given:
                # an input of nothing that runs has no memory
                if tensor.data:
                    tensor.set(array)
            self.backend.compute(graph)
            found = [result.get() for result in results]
        return found[0] if len(found) == 1 else found


def stored(kind, array):
    """Return an array as the bytes or numbers a tensor of this type holds."""
    if kind.name in ("f32", "f16"):
        return np.ascontiguousarray(array, np.float32 if kind.name == "f32" else np.float16)
    return types.quantize(kind, array)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.backend.close()
    bench.context.close()


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def weights():
    """A context with a weight placed in a buffer that says so."""
    context = ggml.Context(4)
    weight = context.new_tensor(types.F32, 8, 6, name="weight")
    buffer = ggml.alloc_tensors(context, ggml.device("CPU").buffer_type())
    buffer.set_usage("weights")
    weight.set(np.arange(48, dtype=np.float32).reshape(6, 8))
    yield SimpleNamespace(context=context, weight=weight, buffer=buffer)
    buffer.close()
    context.close()
