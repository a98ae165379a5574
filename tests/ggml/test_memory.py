"""Buffers, the compute buffer of graphs, writes nobody reads, and the one-call step."""

import gc
import resource

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError, GraphError, TensorError
from qwen3next_ggml.ggml import types


@pytest.fixture
def cpu():
    return ggml.device("CPU")


def test_placing_in_a_buffer(cpu):
    context = ggml.Context(4)
    a, b, c = (context.new_tensor(types.F32, 8) for _ in range(3))
    with cpu.buffer_type().alloc(128) as buffer:
        buffer.clear(0)
        buffer.place(a, 0)
        buffer.place(b, 96)
        a.set(np.arange(8, dtype=np.float32))
        assert np.array_equal(a.get(), np.arange(8)) and b.data - a.data == 96 and a.data == buffer.base
        for tensor, offset, words in ((c, 100, "100 to 132 of a buffer of 128"), (c, -4, "-4"), (c, 34, "not aligned"), (a, 32, "has data already")):
            with pytest.raises(BackendError, match=words):
                buffer.place(tensor, offset)
        assert c.data == 0
    assert a.data == 0, "a closed buffer takes its data along"
    with pytest.raises(BackendError, match="buffer is closed"):
        buffer.clear(0)
    buffer.close()


def test_mapped_memory_is_not_copied(cpu):
    memory = np.zeros(4096 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + 32].view(np.float32)[:] = np.arange(8)
    tensor = ggml.Context(1).new_tensor(types.F32, 8)
    with cpu.buffer_from_host(memory.ctypes.data + start, 4096, keep=memory) as buffer:
        buffer.place(tensor, 0)
        memory[start : start + 4].view(np.float32)[0] = 7
        assert np.array_equal(tensor.get(), [7, 1, 2, 3, 4, 5, 6, 7])
        assert buffer.base == memory.ctypes.data + start
    with pytest.raises(BackendError, match="aligned to 32"):
        cpu.buffer_from_host(memory.ctypes.data + start + 8, 64)
    with pytest.raises(BackendError, match="0 bytes"):
        cpu.buffer_from_host(memory.ctypes.data + start, 0)


def test_memory_that_is_not_there(cpu):
    context = ggml.Context(2)
    context.new_tensor(types.F32, 1 << 50)
    with pytest.raises(BackendError, match="cannot allocate 4294967296.0 MiB in CPU"):
        ggml.alloc_tensors(context, cpu.buffer_type())


def test_devices_and_kinds_of_memory(cpu):
    assert (cpu.kind, cpu.name) == ("cpu", "CPU") and cpu in ggml.devices()
    assert cpu.description and cpu.memory()[1] > 2**28 and cpu.library.startswith(ggml.provider().folder)
    assert cpu.buffer_type().alignment >= 16 and cpu.buffer_type().is_host and cpu.supports_buffer_type(cpu.buffer_type())
    with pytest.raises(BackendError, match="no device CUDA0; ggml provider .* has: CPU"):
        ggml.device("CUDA0")


def test_repacked_weights_take_what_their_code_takes(cpu):
    packed = {kind.name: kind for kind in cpu.extra_buffer_types()}
    plain = cpu.buffer_type()
    for op, ne in (("mul_mat", (256, 64)), ("mul_mat_id", (256, 64, 8)), ("get_rows", (256, 64))):
        assert plain.supports(cpu, types.Q4_K, ne, op)
    assert not plain.supports(cpu, types.F32, (256, 64), "mul_mat") or plain.supports(cpu, types.F16, (256, 64), "mul_mat")
    if "AVX2" in cpu.features and "REPACK" in cpu.features:
        repack = packed["CPU_REPACK"]
        assert repack.supports(cpu, types.Q4_K, (256, 64), "mul_mat") and repack.supports(cpu, types.Q4_K, (256, 64, 8), "mul_mat_id", n_used=2)
        assert not repack.supports(cpu, types.F32, (256, 64), "mul_mat"), "floats are not repacked"
        assert not repack.supports(cpu, types.Q4_K, (256, 63), "mul_mat"), "rows come in eights"
        assert not repack.supports(cpu, types.Q4_K, (256, 64), "get_rows"), "rows cannot be read back"
    with pytest.raises(BackendError, match="conv"):
        plain.supports(cpu, types.F32, (4, 4), "conv")


# writes nobody reads


def state_graph(bench, order):
    """Two copies into halves of a buffer that has memory of its own, then its sum; `order` says which nodes are expanded."""
    context = ggml.Context(2)
    store = context.new_tensor(types.F32, 8, name="store")
    buffer = ggml.alloc_tensors(context, bench.backend.buffer_type)
    buffer.clear(0)
    g = bench.g
    first, second = bench.tensor(np.full(4, 1.0)), bench.tensor(np.full(4, 2.0))
    writes = [g.cpy(first, g.view_1d(store, 4, 0)), g.cpy(second, g.view_1d(store, 4, 16))]
    total = g.sum(store)
    nodes = {"write": writes, "read": [total]}
    result = bench.run(total, writes=[node for name in order for node in nodes[name]])
    seen = store.get()
    buffer.close()
    return result[0], seen


def test_an_expanded_write_is_kept_and_ordered(bench):
    total, store = state_graph(bench, ["write"])
    assert np.array_equal(store, [1] * 4 + [2] * 4) and total == 12


def test_a_write_that_is_not_expanded_does_not_happen(bench):
    total, store = state_graph(bench, [])
    assert not store.any() and total == 0


def test_a_read_before_the_write_sees_the_old_state(bench):
    total, store = state_graph(bench, ["read", "write"])
    assert total == 0 and store.sum() == 12


# the compute buffer


def chain(backend, n, width):
    """A graph of n negations of an input."""
    context = ggml.Context(n + 2, graph_size=n + 2)
    g = ggml.Ops(context)
    x = g.set_input(context.new_tensor(types.F32, width))
    y = x
    for _ in range(n):
        y = g.scale(y, 2.0)
    graph = ggml.Graph(context, n + 2)
    graph.expand(g.set_output(y))
    return graph, x, y


def test_one_buffer_serves_many_graphs(bench):
    backend = bench.backend
    with ggml.GraphAllocator([backend.buffer_type]) as allocator:
        small, large = chain(backend, 3, 16), chain(backend, 5, 4096)
        assert allocator.reserve(large[0]) and allocator.size >= 4096 * 4
        assert not allocator.alloc(small[0]) and not allocator.alloc(large[0]), "reserved once, nothing grows"
        for graph, x, y in (small, large, small):
            x.set(np.ones(x.ne[0], np.float32))
            backend.compute(graph)
            assert (y.get() == 2.0**graph.n_nodes).all()


def test_a_graph_whose_memory_has_moved_is_refused_until_it_is_placed_again(bench):
    backend = bench.backend
    allocator = ggml.GraphAllocator(backend.buffer_type)
    graph, x, y = chain(backend, 3, 16)
    assert allocator.alloc(graph)
    step, out = ggml.Step(backend, graph, [x], [y]), np.empty(16, np.float32)
    ones = np.ones(16, np.float32)
    step.run([ones], [out])
    large = chain(backend, 3, 1 << 16)[0]
    assert allocator.alloc(large)
    for use in (lambda: backend.compute(graph), lambda: step.run([ones], [out])):
        with pytest.raises(GraphError, match="has moved"):
            use()
    assert not allocator.alloc(graph)
    step.run([ones], [out])
    assert (out == 8).all()
    allocator.close()
    with pytest.raises(GraphError, match="no memory"):
        step.run([ones], [out])
    with pytest.raises(BackendError, match="GraphAllocator is closed"):
        allocator.alloc(graph)


def test_two_graphs_of_one_context_take_turns(bench):
    """They share tensors, so placing one takes the memory from the other."""
    context = ggml.Context(8, graph_size=16)
    g = ggml.Ops(context)
    x = g.set_input(context.new_tensor(types.F32, 4))
    double = g.set_output(g.scale(x, 2.0))
    fourfold = g.set_output(g.scale(double, 2.0))
    graphs = ggml.Graph(context, 8), ggml.Graph(context, 8)
    graphs[0].expand(double)
    graphs[1].expand(fourfold)
    with ggml.GraphAllocator(bench.backend.buffer_type) as allocator:
        for graph, result, factor in ((graphs[0], double, 2), (graphs[1], fourfold, 4), (graphs[0], double, 2)):
            allocator.alloc(graph)
            x.set(np.ones(4, np.float32))
            bench.backend.compute(graph)
            assert (result.get() == factor).all()
        with pytest.raises(GraphError, match="no memory"):
            bench.backend.compute(graphs[1])


def test_memory_of_its_own_survives_a_placement(bench):
    context = ggml.Context(8, graph_size=8)
    g, store = ggml.Ops(context), context.new_tensor(types.F32, 4)
    with bench.device.buffer_type().alloc(64) as buffer:
        buffer.place(store, 0)
        store.set(np.full(4, 3, np.float32))
        graph = ggml.Graph(context, 8)
        half = g.set_output(g.scale(g.view_1d(store, 2, 8), 0.5))
        graph.expand(half)
        with ggml.GraphAllocator(bench.backend.buffer_type) as allocator:
            for _ in range(2):
                allocator.alloc(graph)
                bench.backend.compute(graph)
                assert (half.get() == 1.5).all() and (store.get() == 3).all()
        assert (store.get() == 3).all() and half.data == 0


def test_several_kinds_of_memory_want_a_scheduler(bench):
    with pytest.raises(BackendError, match="Scheduler"):
        ggml.GraphAllocator([bench.backend.buffer_type] * 2)


# the step


def test_step_fills_computes_and_fetches(bench):
    graph, x, y = chain(bench.backend, 2, 6)
    with ggml.GraphAllocator(bench.backend.buffer_type) as allocator:
        allocator.alloc(graph)
        step = ggml.Step(bench.backend, graph, [x], [y])
        given, out = np.arange(6, dtype=np.float32), np.empty(6, np.float32)
        step.run([given], [out])
        assert np.array_equal(out, 4 * given)
        given += 1
        step.run([given], [out])
        assert np.array_equal(out, 4 * given), "the same arrays with new values"
        other = np.empty(6, np.float32)
        step.run([np.zeros(6, np.float32)], [other])
        assert not other.any()


@pytest.mark.parametrize(
    "arrays, outs, words",
    [
        ([np.zeros(5, np.float32)], [np.zeros(6, np.float32)], "5,.*24 bytes"),
        ([np.zeros(6, np.float32)], [np.zeros(12, np.float32)[::2]], "float32"),
        ([], [np.zeros(6, np.float32)], "0 arrays for 1"),
        ([np.zeros(6, np.float32)], [np.frombuffer(bytes(24), np.float32)], "read-only"),
    ],
)
def test_step_checks_its_arrays(bench, arrays, outs, words):
    graph, x, y = chain(bench.backend, 2, 6)
    with ggml.GraphAllocator(bench.backend.buffer_type) as allocator:
        allocator.alloc(graph)
        with pytest.raises(TensorError, match=words):
            ggml.Step(bench.backend, graph, [x], [y]).run(arrays, outs)


def test_step_checks_indices(bench):
    g, rows = bench.g, bench.context.new_tensor(types.I64, 2, name="slots")
    cache = bench.context.new_tensor(types.F32, 4, 3)
    graph = ggml.Graph(bench.context, 8)
    graph.expand(g.set_rows(g.set_input(cache), g.set_input(bench.context.new_tensor(types.F32, 4, 2)), g.set_input(rows)))
    with ggml.GraphAllocator(bench.backend.buffer_type) as allocator:
        allocator.alloc(graph)
        step = ggml.Step(bench.backend, graph, [rows], [])
        step.run([np.array([0, 2])], [])
        with pytest.raises(GraphError, match="index 3 of slots at 1 is outside 0 … 2"):
            step.run([np.array([0, 3])], [])


def test_a_closed_backend_and_an_unplaced_step(bench, cpu):
    graph, x, y = chain(bench.backend, 2, 6)
    with pytest.raises(GraphError, match="no memory"):
        ggml.Step(bench.backend, graph, [x], [y])
    backend = cpu.init()
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.compute(graph)
    with pytest.raises(BackendError, match="0 threads"):
        bench.backend.set_n_threads(0)


def test_opening_and_closing_leaves_nothing_behind(cpu):
    def round():
        backend = cpu.init()
        graph, x, y = chain(backend, 20, 1 << 14)
        with ggml.GraphAllocator(backend.buffer_type) as allocator:
            allocator.alloc(graph)
            x.set(np.zeros(1 << 14, np.float32))
            backend.compute(graph)
        backend.close()

    for _ in range(20):
        round()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        round()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5 * 1024
