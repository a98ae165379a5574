"""Graphs over several backends: pinned nodes, placing the same graph again, and failure."""

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError, GraphError
from qwen3next_ggml.ggml import types
from qwen3next_ggml.ggml._native import lib


@pytest.fixture
def backends():
    both = [ggml.device("CPU").init() for _ in range(2)]
    for backend in both:
        backend.set_n_threads(1)
    yield both
    for backend in both:
        backend.close()


@pytest.fixture
def scheduler(backends):
    with ggml.Scheduler(backends, 64) as scheduler:
        yield scheduler


def model(weight, width):
    """y = (w x + x) * 2 with four nodes to spread."""
    context = ggml.Context(16, graph_size=16)
    g = ggml.Ops(context)
    x = g.set_input(context.new_tensor(types.F32, 8, width, name="x"))
    product = g.mul_mat(weight, x)
    y = g.set_output(g.scale(g.add(product, g.view_2d(x, 8, width, x.nb[1], 0)), 2.0))
    graph = ggml.Graph(context, 16)
    graph.expand(y)
    return graph, x, y, product


@pytest.fixture
def weight(backends):
    context = ggml.Context(1)
    weight = context.new_tensor(types.F32, 8, 8, name="w")
    with ggml.alloc_tensors(context, backends[0].buffer_type) as buffer:
        buffer.set_usage("weights")
        weight.set(np.arange(64, dtype=np.float32).reshape(8, 8) / 64)
        yield weight


def expected(weight, x):
    return 2 * (x @ weight.get().T + x)


def test_a_graph_is_placed_again_as_often_as_wanted(scheduler, backends, weight, rng):
    """Alternating graphs of different size, each time from the operands as built."""
    graphs = [model(weight, width) for width in (1, 3, 40)]
    for graph, _, _, product in graphs:
        scheduler.pin(product, backends[0])
        scheduler.pin(graph.nodes[-1], backends[1])
    for _ in range(3):
        for graph, x, y, _ in graphs:
            sources = [node.src for node in graph.nodes]
            scheduler.alloc(graph)
            assert scheduler.n_splits >= 1
            values = rng.standard_normal((x.ne[1], 8)).astype(np.float32)
            x.set(values.reshape(x.shape[::-1]))
            scheduler.compute(graph)
            assert np.allclose(y.get().reshape(-1, 8), expected(weight, values), atol=1e-5)
            graph.restore_sources()
            assert [node.src for node in graph.nodes] == sources


def test_sources_that_a_split_redirected_come_back(weight, scheduler):
    graph, x, y, product = model(weight, 3)
    scheduler.alloc(graph)
    copy = product.context.new_tensor(types.F32, 8, 3, name="copy on another device")
    product._p.src[1] = copy._p
    assert product.src == [weight, copy]
    scheduler.alloc(graph)
    assert product.src == [weight, x]


def test_an_order_that_a_backend_changed_comes_back(weight, scheduler, rng):
    """Vulkan moves nodes within its piece of a graph; operands put back by place would then be other nodes' operands."""
    graph, x, y, _ = model(weight, 3)
    scheduler.alloc(graph)
    order, nodes = graph.nodes, lib.ggml_graph_nodes(graph._p)
    nodes[0], nodes[1] = nodes[1], nodes[0]
    assert graph.nodes != order
    scheduler.alloc(graph)
    assert graph.nodes == order
    values = rng.standard_normal((3, 8)).astype(np.float32)
    x.set(values)
    scheduler.compute(graph)
    assert np.allclose(y.get(), expected(weight, values), atol=1e-5)


def test_a_step_over_a_scheduler(scheduler, weight, rng):
    graph, x, y, _ = model(weight, 3)
    scheduler.reserve(model(weight, 64)[0])
    scheduler.alloc(graph)
    step = ggml.Step(scheduler, graph, [x], [y])
    values, out = rng.standard_normal((3, 8)).astype(np.float32), np.empty((3, 8), np.float32)
    step.run([values], [out])
    assert np.allclose(out, expected(weight, values), atol=1e-5)
    scheduler.alloc(model(weight, 5)[0])
    with pytest.raises(GraphError, match="no memory"):
        step.run([values], [out])


def test_a_graph_too_large_closes_the_scheduler_and_nothing_else(backends, weight, rng):
    scheduler = ggml.Scheduler(backends, 2)
    with pytest.raises(BackendError, match="placing a graph of 4 nodes"):
        for _ in range(200):
            scheduler.alloc(model(weight, 3)[0])
    with pytest.raises(BackendError, match="Scheduler is closed"):
        scheduler.alloc(model(weight, 3)[0])
    with ggml.Scheduler(backends, 64) as another:
        graph, x, y, _ = model(weight, 2)
        another.alloc(graph)
        values = rng.standard_normal((2, 8)).astype(np.float32)
        x.set(values)
        another.compute(graph)
        assert np.allclose(y.get(), expected(weight, values), atol=1e-5)


def test_what_a_scheduler_refuses(scheduler, backends, weight):
    stranger = ggml.device("CPU").init()
    with pytest.raises(BackendError, match="not one of this scheduler's"):
        scheduler.pin(weight, stranger)
    with pytest.raises(BackendError, match="CPU's last"):
        ggml.Scheduler([], 8)
    graph = model(weight, 2)[0]
    with pytest.raises(GraphError, match="no memory"):
        scheduler.compute(graph)
    stranger.close()
