"""The small ops between the large ones: element by element, rows, orders, triangles, norms, copies (level 11)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from ..ggml import ops
from ..reference import kit
from .op_case import HALF_LIMIT, Case, against, f32, rng_of, stored

UNARY = {"silu": kit.silu, "sigmoid": kit.sigmoid, "softplus": kit.softplus, "exp": np.exp, "neg": np.negative}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
# (row length, rows)
SHAPES = ((1, 1), (192, 7), (2048, 65))


def small_cases() -> Iterator[Case]:
    """Yield every case, op by op."""
    for family in (_elementwise, _reductions, _copies, _rows, _orders, _triangles, _norms):
        yield from family()


# element by element


def _elementwise() -> Iterator[Case]:
    for name, (n, T) in product(UNARY, SHAPES):
        yield Case(name, f"{T} rows of {n}", lambda g, name=name, n=n, T=T: _unary(g, name, n, T))
    for name, (n, T), b in product(BINARY, SHAPES[1:], ("all", "a row", "a column")):
        yield Case(name, f"{T} rows of {n} and {b}", lambda g, at=(name, n, T, b): _binary(g, *at))
    for n, T in SHAPES:
        yield Case("swiglu_split", f"{T} rows of {n}", lambda g, n=n, T=T: _swiglu(g, n, T))
        yield Case("scale", f"{T} rows of {n}", lambda g, n=n, T=T: _scale(g, n, T))
        yield Case("clamp", f"{T} rows of {n}, no upper limit", lambda g, n=n, T=T: _clamp(g, n, T))


def _unary(g, name, n, T):
    x = f32(5 * rng_of(n, T).normal(size=(T, n)))
    return getattr(g, name)(g.tensor(x)), against(UNARY[name](x.astype(np.float64)))


def _binary(g, name, n, T, which):
    rng = rng_of(n, T)
    a, b = f32(rng.normal(size=(T, n))), f32(rng.uniform(0.5, 2, size={"all": (T, n), "a row": (1, n), "a column": (T, 1)}[which]))
    return getattr(g, name)(g.tensor(a), g.tensor(b)), against(BINARY[name](a.astype(np.float64), b.astype(np.float64)))


def _swiglu(g, n, T):
    a, b = f32(3 * rng_of(n, T).normal(size=(2, T, n)))
    return g.swiglu_split(g.tensor(a), g.tensor(b)), against(kit.silu(a.astype(np.float64)) * b)


def _scale(g, n, T):
    x = f32(rng_of(n, T).normal(size=(T, n)))
    return g.scale(g.tensor(x), 0.125), against(0.125 * x)


def _clamp(g, n, T):
    x = f32(rng_of(n, T).normal(size=(T, n)))
    return g.clamp(g.tensor(x), 0.25, np.inf), against(np.maximum(x, 0.25))


# sums


def _reductions() -> Iterator[Case]:
    for n, T in SHAPES:
        yield Case("sum_rows", f"{T} rows of {n}", lambda g, n=n, T=T: _sum_rows(g, n, T))
    for n_used, T in product((1, 3, 10), (1, 7, 65)):
        yield Case("out_prod", f"{n_used} experts of 192, {T} tokens", lambda g, n_used=n_used, T=T: _weighted_sum(g, n_used, T))
    for T, kind in product((1, 7, 65), ("f32", "f16")):
        yield Case("soft_max_ext", f"8 heads, {T} tokens, 256 cells, mask of {kind}", lambda g, T=T, kind=kind: _masked(g, T, kind))


def _sum_rows(g, n, T):
    x = f32(rng_of(n, T).uniform(size=(T, n)))
    return g.sum_rows(g.tensor(x)), against(x.astype(np.float64).sum(axis=1))


def _weighted_sum(g, n_used, T):
    rng = rng_of(n_used, T)
    x, weights = f32(rng.normal(size=(T, n_used, 192))), f32(rng.uniform(size=(T, n_used, 1)))
    return g.out_prod(g.tensor(x), g.tensor(weights)), against((x.astype(np.float64) * weights).sum(axis=1))


def _masked(g, T, kind):
    scores, n_kv = f32(4 * rng_of(T).normal(size=(8, T, 256))), 256
    mask = np.where(np.arange(n_kv) <= 100 + np.arange(T)[:, None], 0, -np.inf).astype(np.float32)
    want = kit.softmax(0.2 * scores.astype(np.float64) + mask)
    return g.soft_max_ext(g.tensor(scores), g.tensor(mask, dtype=kind), 0.2, 0.0), against(want)


# copies


def _copies() -> Iterator[Case]:
    for T, n_seqs in product((1, 4, 65), (1, 3)):
        yield Case("concat", f"3 columns and {T} of 97 transposed, {n_seqs} seq", lambda g, T=T, n=n_seqs: _columns(g, T, n))
        yield Case("cpy", f"3 of {3 + T} columns of 97, {n_seqs} seq", lambda g, T=T, n=n_seqs: _window(g, T, n))
        yield Case("cont", f"[32, 6, {T}, {n_seqs}], heads before tokens", lambda g, T=T, n=n_seqs: _heads_first(g, T, n))
        yield Case("repeat", f"[32, 1, 2, {T * n_seqs}] to 3 heads each", lambda g, T=T * n_seqs: _repeated(g, T))
        yield Case("pad", f"[32, {T}, 6, {n_seqs}] to chunks of 64", lambda g, T=T, n=n_seqs: _padded(g, T, n))
    for n, c in product((16, 64), (0, 2)):
        yield Case("set", f"[32, {n}, 1, 6] into part {c} of 3", lambda g, n=n, c=c: _part(g, n, c))
        yield Case("diag", f"n {n}, of a fill", lambda g, n=n: (g.diag(g.fill(g.tensor(np.zeros(n)), 1.0)), against(np.eye(n))))
        yield Case("fill", f"n {n}, {c}", lambda g, n=n, c=c: (g.fill(g.tensor(np.ones(n)), c), against(np.full(n, float(c)))))


def _columns(g, T, n_seqs):
    rng = rng_of(T, n_seqs)
    old, new = f32(rng.normal(size=(n_seqs, 97, 3))), f32(rng.normal(size=(n_seqs, T, 97)))
    return g.concat(g.tensor(old), g.transpose(g.tensor(new)), 0), against(np.concatenate([old, new.swapaxes(1, 2)], axis=2))


def _window(g, T, n_seqs):
    x = f32(rng_of(T, n_seqs).normal(size=(n_seqs, 97, 3 + T)))
    columns, target = g.tensor(x), g.tensor(np.zeros((n_seqs, 97 * 3)))
    last = g.view_3d(columns, 3, 97, n_seqs, *columns.nb[1:3], T * columns.nb[0])
    return g.cpy(last, target), against(x[:, :, T:])


def _heads_first(g, T, n_seqs):
    x = f32(rng_of(T, n_seqs).normal(size=(n_seqs, T, 6, 32)))
    return g.cont(g.permute(g.tensor(x), 0, 2, 1, 3)), against(x.swapaxes(1, 2))


def _repeated(g, T):
    x = f32(rng_of(T).normal(size=(T, 2, 1, 32)))
    return g.repeat_4d(g.tensor(x), 32, 3, 2, T), against(x.repeat(3, axis=2))


def _padded(g, T, n_seqs):
    x = f32(rng_of(T, n_seqs).normal(size=(n_seqs, 6, T, 32)))
    return g.pad(g.tensor(x), 0, -T % 64, 0, 0), against(np.pad(x, ((0, 0), (0, 0), (0, -T % 64), (0, 0))))


def _part(g, n, c):
    rng = rng_of(n, c)
    x, part = f32(rng.normal(size=(6, 3, n, 32))), f32(rng.normal(size=(6, 1, n, 32)))
    whole, want = g.tensor(x), x.copy()
    want[:, c : c + 1] = part
    return g.set_inplace(whole, g.tensor(part), *whole.nb[1:], c * whole.nb[2]), against(want)


# rows and orders


def _rows() -> Iterator[Case]:
    for kind, n, T in product(("f32", "f16", "q8_0"), (64, 512), (1, 7, 65)):
        yield Case("set_rows", f"{T} rows of {n} into 128 of {kind}", lambda g, at=(kind, n, T): _set_rows(g, *at))
    for n, T in product((1, 64), (1, 65)):
        yield Case("get_rows", f"{T} rows of {n} from 128", lambda g, n=n, T=T: _get_rows(g, n, T))
    for kind, T in product(("f16", "q8_0", "q4_k", "q6_k"), (1, 65)):
        yield Case("get_rows", f"{T} rows of 256 from 128 of {kind}", lambda g, T=T, kind=kind: _get_rows(g, 256, T, kind), HALF_LIMIT)


def _set_rows(g, kind, n, T):
    rng = rng_of(n, T)
    held, new = (f32(rng.normal(size=(rows, n))) for rows in (128, T))
    at = rng.permutation(128)[:T].astype(np.int64)
    want = stored(kind, held)
    want[at] = stored(kind, new)
    return g.set_rows(g.tensor(held, dtype=kind), g.tensor(new), g.tensor(at, dtype="i64")), against(want)


def _get_rows(g, n, T, kind="f32"):
    rng = rng_of(n, T)
    x, at = f32(rng.normal(size=(128, n))), rng.integers(0, 128, T).astype(np.int32)
    return g.get_rows(g.tensor(x, dtype=kind), g.tensor(at, dtype="i32")), against(stored(kind, x)[at])


def _orders() -> Iterator[Case]:
    for n, T in product((16, 97, 512), (1, 7, 65)):
        yield Case("argsort", f"{T} rows of {n}, descending", lambda g, n=n, T=T: _argsort(g, n, T))
        yield Case("top_k", f"10 of {n}, {T} rows", lambda g, n=n, T=T: _top_k(g, n, T))


def _argsort(g, n, T):
    x = f32(rng_of(n, T).normal(size=(T, n)))
    return g.argsort(g.tensor(x), ops.SORT_DESC), against(np.argsort(-x, axis=1))


def _top_k(g, n, T):
    x = f32(rng_of(n, T).normal(size=(T, n)))
    want = np.sort(np.argsort(-x, axis=1)[:, :10])
    # in any order
    return g.top_k(g.tensor(x), 10), lambda got: (np.sort(got.reshape(T, 10)), want)


# triangles and norms


def _triangles() -> Iterator[Case]:
    for n in (1, 16, 63, 64, 65, 128):
        yield Case("cumsum", f"n {n}, batch 3x2", lambda g, n=n: _cumsum(g, n))
        for kind, name, cut in ((ops.TRI_LOWER, "below the diagonal", -1), (ops.TRI_LOWER_DIAG, "lower", 0)):
            yield Case("tri", f"n {n}, {name}, batch 3x2", lambda g, n=n, kind=kind, cut=cut: _tri(g, n, kind, cut))


def _cumsum(g, n):
    x = f32(-rng_of(n).exponential(size=(2, 3, 5, n)))
    return g.cumsum(g.tensor(x)), against(np.cumsum(x.astype(np.float64), axis=-1))


def _tri(g, n, kind, cut):
    x = f32(rng_of(n).normal(size=(2, 3, n, n)))
    return g.tri(g.tensor(x), kind), against(np.tril(x.astype(np.float64), cut))


def _norms() -> Iterator[Case]:
    for n, rows in ((32, 1), (192, 65), (2048, 7)):
        yield Case("rms_norm", f"n {n}, {rows} rows", lambda g, n=n, rows=rows: _norm(g, n, rows))
        yield Case("soft_max", f"n {n}, {rows} rows", lambda g, n=n, rows=rows: _soft_max(g, n, rows))


def _norm(g, n, rows):
    x = f32(rng_of(n, rows).normal(size=(rows, n)))
    return g.rms_norm(g.tensor(x), 1e-6), against(kit.rms_norm(x.astype(np.float64), 1.0, 1e-6))


def _soft_max(g, n, rows):
    x = f32(4 * rng_of(n, rows).normal(size=(rows, n)))
    return g.soft_max(g.tensor(x)), against(kit.softmax(x.astype(np.float64)))
