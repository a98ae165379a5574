"""Single operations against float64 numpy. Each case carries a formula that is nearly right and must be told apart."""

import numpy as np
import pytest

from qwen3next_ggml import ggml
from qwen3next_ggml.ggml import types
from tests.kit import nmse


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


#: name -> (operation on one tensor, formula, a formula that must not pass)
ONE = {
    "sqr": (lambda g, a: g.sqr(a), lambda x: x * x, lambda x: abs(x)),
    "sqrt": (lambda g, a: g.sqrt(g.abs(a)), lambda x: np.sqrt(abs(x)), lambda x: np.cbrt(abs(x))),
    "log": (lambda g, a: g.log(g.abs(a)), lambda x: np.log(abs(x)), lambda x: np.log1p(abs(x))),
    "exp": (lambda g, a: g.exp(a), np.exp, np.expm1),
    "neg": (lambda g, a: g.neg(a), lambda x: -x, lambda x: x),
    "step": (lambda g, a: g.step(a), lambda x: (x > 0) * 1.0, np.sign),
    "tanh": (lambda g, a: g.tanh(a), np.tanh, np.arctan),
    "relu": (lambda g, a: g.relu(a), lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, x, 0.01 * x)),
    "sigmoid": (lambda g, a: g.sigmoid(a), sigmoid, lambda x: np.clip(x / 6 + 0.5, 0, 1)),
    "softplus": (lambda g, a: g.softplus(a), lambda x: np.log1p(np.exp(x)), lambda x: np.maximum(x, 0)),
    "silu": (lambda g, a: g.silu(a), lambda x: x * sigmoid(x), lambda x: x * sigmoid(1.1 * x)),
    "scale": (lambda g, a: g.scale(a, 0.3), lambda x: 0.3 * x, lambda x: 0.301 * x),
    "scale_bias": (lambda g, a: g.scale_bias(a, 0.3, 2), lambda x: 0.3 * x + 2, lambda x: 0.3 * (x + 2)),
    "clamp": (lambda g, a: g.clamp(a, -0.5, 1), lambda x: np.clip(x, -0.5, 1), lambda x: np.clip(x, -1, 1)),
    "fill": (lambda g, a: g.fill(a, 1.5), lambda x: np.full_like(x, 1.5), lambda x: 1.51 + 0 * x),
    "rms_norm": (lambda g, a: g.rms_norm(a, 1e-3), lambda x: rms(x, 1e-3), lambda x: rms(x, 1e-2)),
    "norm": (
        lambda g, a: g.norm(a, 1e-5),
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
        lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True, ddof=1) + 1e-5),
    ),
    "l2_norm": (
        lambda g, a: g.l2_norm(a, 1.0),
        lambda x: x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1.0),
        lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1.0),
    ),
    "sum_rows": (lambda g, a: g.sum_rows(a), lambda x: x.sum(-1, keepdims=True), lambda x: x.mean(-1, keepdims=True)),
    "mean": (lambda g, a: g.mean(a), lambda x: x.mean(-1, keepdims=True), lambda x: np.median(x, -1, keepdims=True)),
    "cumsum": (lambda g, a: g.cumsum(a), lambda x: x.cumsum(-1), lambda x: x.cumsum(-1) - x),
    "soft_max": (lambda g, a: g.soft_max(a), softmax, lambda x: softmax(1.01 * x)),
    "transpose": (lambda g, a: g.cont(g.transpose(a)), lambda x: x.swapaxes(-1, -2), lambda x: x.reshape(*x.shape[:-2], -1, x.shape[-2])),
    "permute": (lambda g, a: g.cont(g.permute(a, 2, 0, 1, 3)), lambda x: x.transpose(2, 0, 1), lambda x: x.transpose(1, 2, 0).reshape(x.transpose(2, 0, 1).shape)),
    "repeat_4d": (lambda g, a: g.repeat_4d(a, 14, 5, 6, 1), lambda x: np.tile(x, (2, 1, 2)), lambda x: x.repeat(2, 0).repeat(2, 2)),
    "pad": (lambda g, a: g.pad(a, 1, 2, 0, 0), lambda x: np.pad(x, ((0, 0), (0, 2), (0, 1))), lambda x: np.pad(x, ((0, 0), (2, 0), (1, 0)))),
    "pad_ext": (lambda g, a: g.pad_ext(a, 1, 2, 0, 0, 0, 0, 0, 0), lambda x: np.pad(x, ((0, 0), (0, 0), (1, 2))), lambda x: np.pad(x, ((0, 0), (0, 0), (2, 1)))),
    "roll": (lambda g, a: g.roll(a, 2, 0, 0, 0), lambda x: np.roll(x, 2, -1), lambda x: np.roll(x, -2, -1)),
    "swiglu": (lambda g, a: g.swiglu(g.concat(a, g.neg(a), 0)), lambda x: -x * sigmoid(x) * x, lambda x: x * sigmoid(-x) * x),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_of_one(bench, rng, name):
    build, right, wrong = ONE[name]
    x = rng.standard_normal((3, 5, 7)) * 2
    got = bench.run(build(bench.g, bench.tensor(x)))
    want = right(x.astype(np.float32).astype(np.float64))
    assert nmse(got.reshape(want.shape), want) <= 1e-7
    assert nmse(got.reshape(want.shape), wrong(x).reshape(want.shape)) > 1e-6


#: name -> (operation on two tensors, formula, a formula that must not pass, shape of b)
TWO = {
    "add": (lambda g, a, b: g.add(a, b), lambda x, y: x + y, lambda x, y: x + 1.01 * y, (5, 7)),
    "sub": (lambda g, a, b: g.sub(a, b), lambda x, y: x - y, lambda x, y: y - x, (7,)),
    "mul": (lambda g, a, b: g.mul(a, b), lambda x, y: x * y, lambda x, y: x * abs(y), (3, 1, 7)),
    "div": (lambda g, a, b: g.div(a, b), lambda x, y: x / y, lambda x, y: y / x, (3, 5, 7)),
    "swiglu_split": (lambda g, a, b: g.swiglu_split(a, b), lambda x, y: x * sigmoid(x) * y, lambda x, y: y * sigmoid(y) * x, (3, 5, 7)),
    "mul_mat": (lambda g, a, b: g.mul_mat(b, a), lambda x, y: x @ y.T, lambda x, y: x @ y[::-1].T, (11, 7)),
    "out_prod": (lambda g, a, b: g.out_prod(a, b), lambda x, y: y.swapaxes(1, 2) @ x, lambda x, y: y[..., ::-1].swapaxes(1, 2) @ x, (3, 5, 4)),
    "concat": (lambda g, a, b: g.concat(a, b, 1), lambda x, y: np.concatenate([x, y], 1), lambda x, y: np.concatenate([y, x], 1), (3, 2, 7)),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO)
def test_of_two(bench, rng, name):
    build, right, wrong, shape = TWO[name]
    x, y = (rng.standard_normal(s).astype(np.float32) for s in ((3, 5, 7), shape))
    got = bench.run(build(bench.g, bench.tensor(x), bench.tensor(y)))
    x, y = x.astype(np.float64), y.astype(np.float64)
    assert nmse(got, right(x, y)) <= 1e-7
    assert nmse(got, wrong(x, y)) > 1e-6


@pytest.mark.parametrize("type, limit", [("f32", 1e-7), ("f16", 1e-6), ("bf16", 1e-4), ("q8_0", 5e-4), ("q4_0", 5e-4), ("q4_k", 5e-4), ("q6_k", 5e-4)])
def test_mul_mat_reads_every_weight_type(bench, rng, type, limit):
    """The weights themselves are exact here: only what ggml does with the other operand is measured."""
    x, w = rng.standard_normal((5, 256)).astype(np.float32), rng.standard_normal((33, 256)).astype(np.float32)
    got = bench.run(bench.g.mul_mat(bench.tensor(w, type), bench.tensor(x)))
    kind = types.GgmlType.of(type)
    read_back = types.dequantize(kind, types.quantize(kind, w), 256).astype(np.float64)
    assert nmse(got, x.astype(np.float64) @ read_back.T) <= limit
    assert nmse(got, x.astype(np.float64) @ np.roll(read_back, 1, 1).T) > 1


def test_mul_mat_id_chooses_a_matrix_for_each_row(bench, rng):
    n_tokens, n_used, n_expert = 5, 2, 6
    w, x = rng.standard_normal((n_expert, 11, 7)).astype(np.float32), rng.standard_normal((n_tokens, n_used, 7)).astype(np.float32)
    ids = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(n_tokens)]).astype(np.int32)
    got = bench.run(bench.g.mul_mat_id(bench.tensor(w), bench.tensor(x), bench.tensor(ids)))
    want = np.einsum("tuk,tunk->tun", x.astype(np.float64), w[ids].astype(np.float64))
    assert nmse(got, want) <= 1e-7
    assert nmse(got, np.einsum("tuk,tunk->tun", x, w[ids[:, ::-1]])) > 0.1


def test_add_id_and_get_rows(bench, rng):
    table, x = rng.standard_normal((6, 7)).astype(np.float32), rng.standard_normal((5, 2, 7)).astype(np.float32)
    ids = rng.integers(0, 6, (5, 2)).astype(np.int32)
    g, rows = bench.g, bench.tensor(table)
    added, taken = bench.run(g.add_id(bench.tensor(x), rows, bench.tensor(ids)), g.get_rows(rows, bench.tensor(ids.reshape(-1))))
    assert np.array_equal(added, x + table[ids])
    assert np.array_equal(taken, table[ids.reshape(-1)])


@pytest.mark.parametrize("type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("wide", [np.int32, np.int64])
def test_set_rows_writes_only_the_rows_named(bench, rng, type, wide):
    kind = types.GgmlType.of(type)
    cells, new = rng.standard_normal((9, 64)).astype(np.float32), rng.standard_normal((3, 64)).astype(np.float32)
    rows = np.array([7, 0, 4], wide)
    cache = bench.tensor(cells, type)
    write = bench.g.set_rows(cache, bench.tensor(new), bench.tensor(rows))
    got = bench.run(write)
    want = cells.copy()
    want[rows] = new
    want = types.dequantize(kind, types.quantize(kind, want), 64)
    assert np.array_equal(got, want)
    assert nmse(got, cells) > 0.1


def test_argsort_and_top_k(bench, rng):
    x = rng.permuted(np.arange(64, dtype=np.float32).reshape(4, 16), axis=1)
    a, g = bench.tensor(x), bench.g
    up, down, first, some = bench.run(g.argsort(a, ggml.SORT_ASC), g.argsort(a, ggml.SORT_DESC), g.argsort_top_k(a, 5), g.top_k(a, 5))
    assert up.dtype == np.int32 and np.array_equal(up, x.argsort(-1))
    assert np.array_equal(down, (-x).argsort(-1))
    assert np.array_equal(first, down[:, :5])
    assert np.array_equal(np.sort(some, -1), np.sort(down[:, :5], -1))


@pytest.mark.parametrize("kind, wanted", [(ggml.TRI_UPPER_DIAG, (0, np.triu)), (ggml.TRI_UPPER, (1, np.triu)), (ggml.TRI_LOWER_DIAG, (0, np.tril)), (ggml.TRI_LOWER, (-1, np.tril))])
def test_tri_keeps_its_triangle(bench, rng, kind, wanted):
    x = rng.standard_normal((2, 6, 6)).astype(np.float32)
    k, keep = wanted
    assert np.array_equal(bench.run(bench.g.tri(bench.tensor(x), kind)), keep(x, k))


def test_diag_and_arange_and_sums(bench, rng):
    x = rng.standard_normal((2, 1, 5)).astype(np.float32)
    a, g = bench.tensor(x), bench.g
    diagonal, steps, total, largest = bench.run(g.diag(a), g.arange(2, 9, 3), g.sum(a), g.argmax(g.reshape_2d(a, 5, 2)))
    assert np.array_equal(diagonal, x * np.eye(5, dtype=np.float32))
    assert np.array_equal(steps, [2, 5, 8])
    assert abs(total[0] - x.sum(dtype=np.float64)) < 1e-5
    assert np.array_equal(largest, x[:, 0].argmax(-1))


def test_soft_max_ext_masks_and_scales(bench, rng):
    x, mask = rng.standard_normal((3, 4, 8)).astype(np.float32), np.where(rng.random((4, 8)) < 0.3, -np.inf, 0.0).astype(np.float32)
    mask[:, 0] = 0
    got = bench.run(bench.g.soft_max_ext(bench.tensor(x), bench.tensor(mask), 0.7, 0.0))
    assert nmse(got, softmax(0.7 * x.astype(np.float64) + mask)) <= 1e-7
    assert nmse(got, softmax(0.7 * (x + np.where(mask < 0, -3, 0)))) > 1e-3


@pytest.mark.parametrize("n_head, n_kv_head, n_tokens", [(4, 4, 1), (8, 2, 3), (6, 3, 65)])
@pytest.mark.parametrize("type", ["f32", "f16"])
def test_flash_attn_ext(bench, rng, n_head, n_kv_head, n_tokens, type):
    d, n_kv = 64, 96
    q, k, v = (rng.standard_normal((h, n, d)) for h, n in ((n_head, n_tokens), (n_kv_head, n_kv), (n_kv_head, n_kv)))
    k, v = (x.astype(np.float16).astype(np.float64) for x in (k, v))
    mask = np.where(np.arange(n_kv) <= np.arange(n_tokens)[:, None] + 20, 0, -np.inf).astype(np.float16)
    tensors = bench.tensor(q), bench.tensor(k, type), bench.tensor(v, type), bench.tensor(mask)
    node = bench.g.flash_attn_ext(*tensors, d**-0.5, 0.0, 0.0)
    bench.g.flash_attn_ext_set_prec(node, ggml.PREC_F32)
    got = bench.run(node)
    shared = n_head // n_kv_head
    weights = softmax(np.einsum("htd,hsd->hts", q, k.repeat(shared, 0)) * d**-0.5 + mask)
    want = np.einsum("hts,hsd->thd", weights, v.repeat(shared, 0))
    # the f16 path rounds q and the weights to half precision
    assert nmse(got.reshape(want.shape), want) <= (1e-7 if type == "f32" else 1e-5)
    tiled = np.einsum("hts,hsd->thd", softmax(np.einsum("htd,hsd->hts", q, np.tile(k, (shared, 1, 1))) * d**-0.5 + mask), np.tile(v, (shared, 1, 1)))
    assert n_head == n_kv_head or nmse(got.reshape(want.shape), tiled) > 1e-2
