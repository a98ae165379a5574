"""A mistake in a graph is an exception that names the op, the operands and the line; the interpreter and the next graph live on."""

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError, GraphError, TensorError
from qwen3next_ggml.ggml import types
from tests.kit import run_python

ROPE = (4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)


def new(bench, *ne, type="f32"):
    return bench.context.new_tensor(types.GgmlType.of(type), *ne)


def delta(bench, q=(16, 2, 5, 1), k=(16, 2, 5, 1), v=(16, 4, 5, 1), g=(1, 4, 5, 1), beta=(1, 4, 5, 1), state=(16, 16, 4, 1), K=1):
    return bench.g.gated_delta_net(*(new(bench, *ne) for ne in (q, k, v, g, beta, state)), K)


#: what is done wrong -> (how, words the message must have)
BUILDING = {
    "inner dimensions differ": (lambda b: b.g.mul_mat(new(b, 64, 8), new(b, 63, 2)), ["mul_mat", "[64, 8]", "[63, 2]", "can_mul_mat"]),
    "transposed weights": (lambda b: b.g.mul_mat(b.g.transpose(new(b, 8, 64)), new(b, 64, 2)), ["mul_mat", "transposed"]),
    "shapes that do not repeat": (lambda b: b.g.add(new(b, 8, 4), new(b, 8, 3)), ["add", "[8, 4]", "[8, 3]"]),
    "view past the end": (lambda b: b.g.view_1d(new(b, 8), 9, 0), ["view_1d", "ends at byte 36", "32"]),
    "view with an offset past the end": (lambda b: b.g.view_2d(new(b, 8, 2), 8, 1, 32, 64), ["view_2d", "byte 96", "64"]),
    "view with strides past the end": (lambda b: b.g.view_2d(new(b, 8, 4), 8, 3, 64, 0), ["view_2d", "byte 160", "128"]),
    "view of negative size": (lambda b: b.g.view_1d(new(b, 8), -1, 0), ["view_1d", "-1"]),
    "view into a quantised block": (lambda b: b.g.view_1d(new(b, 64, type="q8_0"), 16, 0), ["view_1d", "q8_0", "32"]),
    "reshape to another count": (lambda b: b.g.reshape_2d(new(b, 8, 4), 8, 5), ["reshape_2d", "[8, 4]", "ne1=5"]),
    "reshape of a permuted tensor": (lambda b: b.g.reshape_1d(b.g.permute(new(b, 8, 4), 1, 0, 2, 3), 32), ["reshape_1d", "contiguous"]),
    "permute to the same axis": (lambda b: b.g.permute(new(b, 8, 4), 0, 0, 2, 3), ["permute", "axis0=0"]),
    "concat of different rows": (lambda b: b.g.concat(new(b, 8, 4), new(b, 9, 4), 1), ["concat", "[9, 4]"]),
    "concat on a dimension that is not": (lambda b: b.g.concat(new(b, 8, 4), new(b, 8, 4), 4), ["concat", "dim=4"]),
    "repeat to no multiple": (lambda b: b.g.repeat_4d(new(b, 8, 4), 12, 4, 1, 1), ["repeat_4d", "ne0=12"]),
    "float row numbers": (lambda b: b.g.get_rows(new(b, 8, 4), new(b, 3)), ["get_rows", "I32"]),
    "set_rows with float row numbers": (lambda b: b.g.set_rows(new(b, 8, 4), new(b, 8, 2), new(b, 2)), ["set_rows", "I64"]),
    "set_rows of other width": (lambda b: b.g.set_rows(new(b, 8, 4), new(b, 9, 2), new(b, 2, type="i64")), ["set_rows", "[9, 2]"]),
    "three-dimensional ids": (lambda b: b.g.mul_mat_id(new(b, 8, 6, 4), new(b, 8, 1, 3), new(b, 2, 3, 2, type="i32")), ["mul_mat_id", "[2, 3, 2]"]),
    "ids for another number of tokens": (lambda b: b.g.mul_mat_id(new(b, 8, 6, 4), new(b, 8, 1, 3), new(b, 2, 5, type="i32")), ["mul_mat_id", "[2, 5]"]),
    "rotating more than the head": (lambda b: b.g.rope_ext(new(b, 8, 2, 3), new(b, 3, type="i32"), None, 16, 2, *ROPE), ["rope_ext", "16", "head of 8"]),
    "rotating an odd number": (lambda b: b.g.rope_ext(new(b, 8, 2, 3), new(b, 3, type="i32"), None, 5, 2, *ROPE), ["rope_ext", "5 rotated"]),
    "a position missing": (lambda b: b.g.rope_ext(new(b, 8, 2, 3), new(b, 2, type="i32"), None, 8, 2, *ROPE), ["rope_ext", "[2]"]),
    "one-token q for five-token v": (lambda b: delta(b, q=(16, 2, 1, 1)), ["gated_delta_net", "5 tokens of v"]),
    "beta for another number of heads": (lambda b: delta(b, beta=(1, 2, 5, 1)), ["gated_delta_net", "4 heads"]),
    "heads that cannot be shared": (lambda b: delta(b, q=(16, 3, 5, 1), k=(16, 3, 5, 1)), ["gated_delta_net", "4 value heads"]),
    "state of another width": (lambda b: delta(b, state=(8, 8, 4, 1)), ["gated_delta_net", "state"]),
    "no snapshot": (lambda b: delta(b, K=0), ["gated_delta_net", "K=0"]),
    "mask shorter than the cells": (
        lambda b: b.g.flash_attn_ext(new(b, 64, 2, 4), new(b, 64, 32, 2), new(b, 64, 32, 2), new(b, 16, 2, type="f16"), 1.0, 0.0, 0.0),
        ["flash_attn_ext", "mask"],
    ),
    "k and v of different lengths": (
        lambda b: b.g.flash_attn_ext(new(b, 64, 2, 4), new(b, 64, 32, 2), new(b, 64, 16, 2), None, 1.0, 0.0, 0.0),
        ["flash_attn_ext", "same cells"],
    ),
    "more than there are": (lambda b: b.g.top_k(new(b, 8), 9), ["top_k", "k=9"]),
    "kernel longer than the columns": (lambda b: b.g.ssm_conv(new(b, 3, 5, 1), new(b, 4, 5)), ["ssm_conv", "[3, 5]"]),
    "depthwise kernel turned, rows not": (
        lambda b: b.g.conv_2d_dw_direct(b.g.permute(new(b, 1, 5, 1, 4), 2, 3, 0, 1), new(b, 1, 7, 5), 1, 1, 0, 3, 1, 1),
        ["conv_2d_dw_direct", "packed as b"],
    ),
    "depthwise rows turned, kernel not": (
        lambda b: b.g.conv_2d_dw_direct(new(b, 1, 4, 1, 5), b.g.permute(b.g.view_4d(new(b, 5, 7), 5, 1, 7, 1, 8, 20, 140, 0), 2, 0, 1, 3), 1, 1, 0, 3, 1, 1),
        ["conv_2d_dw_direct", "innermost as b has"],
    ),
    "depthwise rows with gaps": (
        lambda b: b.g.conv_2d_dw_direct(new(b, 1, 4, 1, 5), b.g.permute(b.g.view_4d(new(b, 6, 7), 5, 1, 7, 1, 8, 24, 168, 0), 2, 0, 1, 3), 1, 1, 0, 3, 1, 1),
        ["conv_2d_dw_direct", "innermost"],
    ),
    "depthwise kernel of another width": (
        lambda b: b.g.conv_2d_dw_direct(new(b, 1, 4, 1, 5), new(b, 1, 7, 6), 1, 1, 0, 3, 1, 1), ["conv_2d_dw_direct", "[1, 7, 6]"]
    ),
    "depthwise kernel longer than the rows": (
        lambda b: b.g.conv_2d_dw_direct(new(b, 1, 4, 1, 5), new(b, 1, 3, 5), 1, 1, 0, 0, 1, 1), ["conv_2d_dw_direct", "larger than"]
    ),
    "depthwise steps of nothing": (
        lambda b: b.g.conv_2d_dw_direct(new(b, 1, 4, 1, 5), new(b, 1, 7, 5), 1, 0, 0, 3, 1, 1), ["conv_2d_dw_direct", "stride1=0"]
    ),
    "triangle of no square": (lambda b: b.g.tri(new(b, 8, 4), 0), ["tri", "[8, 4]"]),
    "no such triangle": (lambda b: b.g.tri(new(b, 4, 4), 7), ["tri", "kind 7"]),
    "padding by less than nothing": (lambda b: b.g.pad(new(b, 8), -1, 0, 0, 0), ["pad", "negative"]),
    "half a block": (lambda b: b.g.cast(new(b, 40), types.Q8_0), ["cast", "40", "q8_0"]),
    "scaling around gaps": (lambda b: b.g.scale(b.g.permute(new(b, 4, 3, 2), 0, 2, 1, 3), 2), ["scale", "[4, 2, 3]", "padded"]),
    "no tensor": (lambda b: b.g.add(new(b, 8), None), ["add", "b is None"]),
    "an array for a tensor": (lambda b: b.g.add(new(b, 8), np.zeros(8)), ["add", "numpy.ndarray"]),
    "a word for a number": (lambda b: b.g.scale(new(b, 8), "half"), ["scale", "'half'"]),
    "a dimension beyond int": (lambda b: b.g.pad(new(b, 8), 1 << 40, 0, 0, 0), ["pad", "p0=1099511627776"]),
    "a shape beyond memory": (lambda b: b.g.repeat_4d(new(b, 1), 1 << 40, 1 << 40, 1, 1), ["repeat_4d", "ne0="]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BUILDING)
def test_building(bench, mistake):
    make, words = BUILDING[mistake]
    with pytest.raises(GraphError) as caught:
        make(bench)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "test_mistakes.py:" in message and "\n" not in message
    a = bench.tensor(np.arange(8, dtype=np.float32))
    assert np.array_equal(bench.run(bench.g.add(a, a)), 2 * np.arange(8))


#: what only shows when the graph runs -> (node, words)
RUNNING = {
    "rows of integers squared": (lambda b: b.g.neg(b.tensor(np.arange(4, dtype=np.int32))), ["i32", "NEG"]),
    "weights of i32": (lambda b: b.g.mul_mat(b.tensor(np.zeros((2, 8), np.float32)), b.tensor(np.zeros((2, 8), np.int32))), ["MUL_MAT"]),
    "rows apart": (lambda b: b.g.add(b.g.transpose(b.tensor(np.zeros((3, 4), np.float32))), b.tensor(np.zeros(3, np.float32))), ["ADD", "side by side"]),
    "quantised to quantised": (lambda b: b.g.cast(b.tensor(np.zeros((1, 32)), "q8_0"), types.Q4_0), ["q8_0", "q4_0"]),
    "f16 plus bf16": (lambda b: b.g.add(b.tensor(np.zeros(8), "f16"), b.tensor(np.zeros(8), "bf16")), ["ADD", "f16"]),
    "a sum along rows apart": (lambda b: b.g.sum_rows(b.g.transpose(b.tensor(np.zeros((3, 4), np.float32)))), ["SUM_ROWS", "side by side"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", RUNNING)
def test_running(bench, mistake):
    make, words = RUNNING[mistake]
    with pytest.raises(GraphError) as caught:
        bench.run(make(bench))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_a_row_number_out_of_range_is_refused_before_it_is_written(bench, bad):
    rows = bench.tensor(np.array([0, bad], np.int32), name="rows")
    node = bench.g.get_rows(bench.tensor(np.zeros((4, 8), np.float32)), rows)
    with pytest.raises(GraphError, match=rf"index {bad} of rows at 1 is outside 0 … 3"):
        bench.run(node)


def test_an_expert_out_of_range_is_refused(bench):
    ids = bench.tensor(np.array([[1, 6]], np.int32))
    node = bench.g.mul_mat_id(bench.tensor(np.zeros((6, 5, 8), np.float32)), bench.tensor(np.zeros((1, 2, 8), np.float32)), ids)
    with pytest.raises(GraphError, match="index 6 .* outside 0 … 5"):
        bench.run(node)


@pytest.mark.parametrize("write", ["set_rows", "cpy", "scale_inplace", "set_inplace", "add_inplace"])
def test_weights_are_not_written(bench, weights, write):
    g, new_rows = bench.g, bench.tensor(np.zeros((6, 8), np.float32))
    calls = {
        "set_rows": lambda w: g.set_rows(w, new_rows, bench.tensor(np.arange(6, dtype=np.int64))),
        "cpy": lambda w: g.cpy(new_rows, w),
        "scale_inplace": lambda w: g.scale_inplace(w, 0.0),
        "set_inplace": lambda w: g.set_inplace(w, new_rows, 32, 192, 192, 0),
        "add_inplace": lambda w: g.add_inplace(w, new_rows),
    }
    for target in (weights.weight, g.view_2d(weights.weight, 8, 6, 32, 0)):
        with pytest.raises(GraphError, match="weight holds weights, which are read-only"):
            calls[write](target)
    assert np.array_equal(weights.weight.get().reshape(-1), np.arange(48))


def test_a_closed_context(bench):
    other = ggml.Context(4)
    a, g = other.new_tensor(types.F32, 8), ggml.Ops(other)
    other.close()
    other.close()
    for use in (lambda: g.neg(new(bench, 8)), lambda: bench.g.neg(a), lambda: other.new_tensor(types.F32, 8), lambda: ggml.Graph(other, 8)):
        with pytest.raises(GraphError, match="closed"):
            use()
    with pytest.raises(TensorError, match="closed"):
        a.get()
    assert "closed" in repr(a)


def test_a_full_context_and_a_full_graph(bench):
    small = ggml.Context(3, graph_size=2)
    g, a = ggml.Ops(small), small.new_tensor(types.F32, 8)
    graph = ggml.Graph(small, 2)
    b = g.neg(g.neg(a))
    with pytest.raises(GraphError, match="full, it was made for 3 tensors"):
        g.neg(b)
    with pytest.raises(GraphError, match="no room for a graph of 2000"):
        ggml.Graph(small, 2000)
    graph.expand(b)
    more = bench.g.neg(bench.g.neg(bench.g.neg(new(bench, 8))))
    with pytest.raises(GraphError, match="graph for 2 nodes"):
        graph.expand(more)


def test_a_graph_without_memory_does_not_run(bench):
    graph = ggml.Graph(bench.context, 8)
    graph.expand(bench.g.neg(new(bench, 8)))
    with pytest.raises(GraphError, match="no memory"):
        bench.backend.compute(graph)


def test_weights_that_were_closed_do_not_run(bench, weights):
    graph = ggml.Graph(bench.context, 8)
    node = bench.g.mul_mat(weights.weight, new(bench, 8, 2))
    graph.expand(node)
    with ggml.GraphAllocator(bench.backend.buffer_type) as allocator:
        allocator.alloc(graph)
        bench.backend.compute(graph)
        weights.buffer.close()
        with pytest.raises(GraphError, match="weight.*was closed"):
            bench.backend.compute(graph)
    with pytest.raises(BackendError, match="placed"):
        weights.weight.get()


def test_an_assertion_outside_building_says_what_it_was():
    """What can still abort does so with ggml's own words, for whoever runs it in a child."""
    done = run_python(
        "from qwen3next_ggml import ggml\n"
        "from qwen3next_ggml.ggml._native import lib, ffi\n"
        "tensor = ggml.Context(2).new_tensor(ggml.types.F32, 1)\n"
        "lib.ggml_backend_tensor_set(tensor._p, ffi.NULL, 0, 4)\n"
    )
    assert done.returncode < 0
    assert "ggml gave up" in done.stderr and "GGML_ASSERT" in done.stderr
