"""Tensors and element types: values go in and come out in numpy order, whatever view or type is looked at."""

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.errors import BackendError, GraphError, TensorError
from qwen3next_ggml.ggml import types
from tests.kit import nmse


@pytest.fixture
def placed():
    """Make tensors that have memory: `placed(type, *ne)`."""
    opened = []

    def make(type, *ne):
        context = ggml.Context(1)
        tensor = context.new_tensor(types.GgmlType.of(type), *ne)
        opened.append(ggml.alloc_tensors(context, ggml.device("CPU").buffer_type()))
        return tensor

    yield make
    for buffer in opened:
        buffer.close()


@pytest.mark.parametrize("type, dtype", [("f32", np.float32), ("f16", np.float16), ("i32", np.int32), ("i64", np.int64), ("i8", np.int8)])
def test_values_come_back(placed, rng, type, dtype):
    tensor, array = placed(type, 5, 3, 2), (rng.standard_normal((2, 3, 5)) * 9).astype(dtype)
    tensor.set(array)
    got = tensor.get()
    assert np.array_equal(got, array) and got.dtype == (np.float32 if type == "f16" else dtype)


def test_what_a_tensor_says(placed):
    tensor = placed("f16", 5, 1, 2)
    tensor.name = "äther"
    assert (tensor.name, tensor.type, tensor.op) == ("äther", types.F16, "NONE")
    assert (tensor.ne, tensor.shape, tensor.nb) == ((5, 1, 2, 1), (5, 1, 2), (2, 10, 10, 20))
    assert (tensor.nbytes, tensor.nelements, tensor.is_contiguous) == (20, 10, True)
    assert tensor.data and tensor.ptr and tensor.src == [] and tensor.view_src is None
    assert tensor.context.tensors == [tensor] and len({tensor, tensor.context.tensors[0]}) == 1
    assert "äther" in repr(tensor) and "f16 [5, 1, 2]" in repr(tensor)


@pytest.mark.parametrize(
    "view, slice",
    [
        (lambda g, a: g.view_2d(a, 3, 2, a.nb[1], a.nb[1] + 8), lambda x: x[0, 1:3, 2:5]),
        (lambda g, a: g.view_1d(a, 4, 12), lambda x: x.reshape(-1)[3:7]),
        (lambda g, a: g.permute(a, 1, 2, 0, 3), lambda x: x.transpose(1, 2, 0)),
        (lambda g, a: g.transpose(a), lambda x: x.swapaxes(1, 2)),
        (lambda g, a: g.view_3d(a, 2, 4, 2, a.nb[1], a.nb[2], 4), lambda x: x[:, :, 1:3]),
    ],
)
def test_views_have_the_right_order(placed, view, slice):
    x = np.arange(2 * 4 * 5, dtype=np.float32).reshape(2, 4, 5)
    tensor = placed("f32", 5, 4, 2)
    tensor.set(x)
    context = ggml.Context(4)
    seen = view(ggml.Ops(context), tensor)
    seen._p.buffer = tensor._p.buffer
    assert np.array_equal(seen.get(), slice(x))
    assert seen.view_src == tensor and seen.view_src.context is tensor.context


def test_rows_of_a_quantised_view(placed, rng):
    x = rng.standard_normal((6, 64)).astype(np.float32)
    tensor = placed("q8_0", 64, 6)
    tensor.set(types.quantize(types.Q8_0, x))
    context = ggml.Context(4)
    rows = ggml.Ops(context).view_2d(tensor, 32, 3, 2 * tensor.nb[1], tensor.nb[1] + types.Q8_0.type_size)
    rows._p.buffer = tensor._p.buffer
    assert np.array_equal(rows.get(), tensor.get()[1::2, 32:])
    assert nmse(tensor.get(), x) < 1e-4


@pytest.mark.parametrize(
    "array, offset, error, words",
    [
        (np.zeros(6, np.float32), 0, TensorError, "bytes 0 to 24 of 20"),
        (np.zeros(2, np.float32), 16, TensorError, "bytes 16 to 24 of 20"),
        (np.zeros(1, np.float32), -4, TensorError, "bytes -4"),
        (np.zeros(5, np.float64), 0, TensorError, "float64, expected float32"),
        (np.zeros(5, np.int32), 0, TensorError, "int32, expected float32"),
    ],
)
def test_what_does_not_fit_is_refused(placed, array, offset, error, words):
    tensor = placed("f32", 5)
    tensor.memset(1)
    before = tensor.get()
    with pytest.raises(error, match=words):
        tensor.set(array, offset)
    assert np.array_equal(tensor.get(), before)


def test_unplaced_and_part_of_the_data(placed):
    with pytest.raises(BackendError, match="not been placed"):
        ggml.Context(1).new_tensor(types.F32, 4).get()
    tensor = placed("f32", 4)
    tensor.memset(0)
    tensor.set(np.array([2.5], np.float32), 8)
    tensor.memset(0, 0, 4)
    assert np.array_equal(tensor.get(), [0, 0, 2.5, 0])


@pytest.mark.parametrize("ne", [(), (1, 2, 3, 4, 5), (-1,), (33,)])
def test_shapes_that_are_none(ne):
    with pytest.raises(GraphError, match="new_tensor"):
        ggml.Context(2).new_tensor(types.Q8_0, *ne)


def test_an_empty_tensor(placed):
    context = ggml.Context(2)
    empty = context.new_tensor(types.F32, 0, 3)
    assert ggml.alloc_tensors(context, ggml.device("CPU").buffer_type()) is None
    assert empty.get().shape == (3, 0) and empty.nbytes == 0


def test_handles_keep_what_they_point_to(placed):
    tensor = ggml.Ops(ggml.Context(3)).neg(ggml.Context(1).new_tensor(types.F32, 7, name="far"))
    assert tensor.op == "NEG" and tensor.shape == (7,)


# element types


def test_types_by_name_and_number():
    assert types.GgmlType.of("Q8_0") is types.GgmlType.of(8) is types.Q8_0
    assert (types.Q8_0.block_size, types.Q8_0.type_size, types.Q8_0.is_quantized) == (32, 34, True)
    assert (types.F32.row_size(5), types.Q4_K.row_size(512), types.BF16.is_quantized) == (20, 288, False)
    assert {t.name for t in types.known()} >= {"f32", "f16", "bf16", "i32", "q4_0", "q5_k", "q6_k", "iq4_xs", "mxfp4", "tq2_0"}


@pytest.mark.parametrize("key", ["q9_9", 4, 31, 999, -1, ""])
def test_types_that_are_none(key):
    with pytest.raises(TensorError, match="no tensor type"):
        types.GgmlType.of(key)


def test_a_row_of_half_a_block():
    with pytest.raises(TensorError, match="blocks of 32"):
        types.Q8_0.row_size(40)
    with pytest.raises(AttributeError):
        types.Q9_9


WEIGHTS = ["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"]


@pytest.mark.parametrize("name", WEIGHTS)
def test_quantising_is_gguf_pys_inverse(rng, name):
    """ggml packs, gguf-py unpacks: two readers of the same bytes."""
    import gguf

    kind, x = types.GgmlType.of(name), rng.standard_normal((3, 512)).astype(np.float32)
    raw = types.quantize(kind, x)
    assert raw.shape == (3, kind.row_size(512)) and raw.dtype == np.uint8
    ours = types.dequantize(kind, raw, 512)
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind.id))
    assert nmse(ours, theirs) < 1e-12
    assert nmse(ours, x) < 0.15
    assert nmse(types.dequantize(kind, raw[::-1], 512), x) > 1


def test_quantising_with_an_importance_matrix(rng):
    x, weights = rng.standard_normal((2, 256)).astype(np.float32), np.where(np.arange(256) < 8, 1e3, 1e-3).astype(np.float32)
    plain, weighted = (types.dequantize(types.Q4_K, types.quantize(types.Q4_K, x, w), 256) for w in (None, weights))
    assert nmse(weighted[:, :8], x[:, :8]) < nmse(plain[:, :8], x[:, :8])
    with pytest.raises(TensorError, match="importance matrix"):
        types.quantize(types.IQ2_XXS, x)
    with pytest.raises(TensorError, match="shape"):
        types.quantize(types.Q4_K, x, weights[:10])
    with pytest.raises(TensorError, match="bytes"):
        types.dequantize(types.Q8_0, np.zeros((1, 33), np.uint8), 32)


@pytest.mark.parametrize("name", ["f32", "q8_0"])
def test_a_part_is_rows_of_the_whole_and_no_node(bench, rng, name):
    """It has its memory where the whole has, and gaps where the whole has more dimensions."""
    kind, values = types.GgmlType.of(name), rng.integers(-127, 128, (2, 5, 32)).astype(np.float32)
    values[..., 0] = 127  # a scale of one for every block
    with ggml.Context(8, graph_size=8) as ctx:
        whole = ctx.new_tensor(kind, 32, 5, 2, name="whole")
        part, x = ctx.new_part(whole, 1, 3, name="part"), ctx.new_tensor(types.F32, 32, 1, 2)
        second = ctx.new_part(whole, 2, 2, name="second", matrices=range(1, 2))
        y = ggml.Ops(ctx).mul_mat(part, x)
        with ggml.alloc_tensors(ctx, bench.device.buffer_type()):
            whole.set(types.quantize(kind, values))
            x.set(np.eye(32, dtype=np.float32)[[[5], [5]]])
            graph = ggml.Graph(ctx, 8)
            graph.expand(y)
            assert [node.op for node in graph.nodes] == ["MUL_MAT"] and part.op == "NONE" and part.view_src == whole
            assert part.view_offs == whole.nb[1] and part.nb == whole.nb and not part.is_contiguous
            assert np.array_equal(part.get(), values[:, 1:4])
            assert second.ne == (32, 2, 1, 1) and np.array_equal(second.get(), values[1, 2:4])
            bench.backend.compute(graph)
            assert np.allclose(y.get().reshape(2, 3), values[:, 1:4, 5], rtol=1e-3)
        for start, n in ((-1, 2), (3, 3), (0, 0)):
            with pytest.raises(GraphError, match=r"new_part: rows -?\d to \d of"):
                ctx.new_part(whole, start, n, name="no part")
        for matrices in (range(-1, 1), range(1, 3), range(1, 1)):
            with pytest.raises(GraphError, match=r"of matrices -?\d to \d of"):
                ctx.new_part(whole, 0, 5, name="no part", matrices=matrices)
