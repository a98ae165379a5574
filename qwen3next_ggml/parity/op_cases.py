"""Every kind of op our graphs emit, over the shapes that break kernels, with its value in float64 (level 11).

A case builds nodes on a `Graph` and says what they should give. Arrays are in numpy order, ggml's reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..ggml import ops, types
from ..reference import kit

F32_LIMIT = 1e-7
# a product of quantised weights also rounds the activations: what ggml's own test-backend-ops allows
QUANTISED_LIMIT = 5e-4
HALF_LIMIT = 1e-6
# and over float16 values the CPU adds up in float16
ATTENTION_LIMIT = 5e-4

ROPE = SimpleNamespace(freq_base=1e7, freq_scale=1.0, n_ctx_orig=262144, ext_factor=0.0, attn_factor=1.0, beta_fast=32.0, beta_slow=1.0)
YARN = SimpleNamespace(**{**vars(ROPE), "freq_scale": 0.25, "ext_factor": 1.0})


@dataclass(frozen=True)
class Case:
    """`build(g)` returns the node of one op and a function from its value to (got, want); `limit` is the NMSE allowed."""

    op: str
    shape: str
    build: Callable
    limit: float = F32_LIMIT


def cases() -> Iterator[Case]:
    """Yield every case, op by op."""
    for family in (_gated_delta_nets, _solves, _experts, _matrices, _convolutions, _attentions, _ropes, _rows, _orders, _triangles, _norms):
        yield from family()


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def _f32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)


# gated_delta_net (C21)


def _gated_delta_nets() -> Iterator[Case]:
    for S, T, n_seqs, r, per_channel, K in product((32, 64, 128), (1, 4, 65), (1, 2), (1, 2), (False, True), (1, 4)):
        permuted = T == 4
        shape = f"S {S}, T {T}, {n_seqs} seq, {r} to 1, {'channel' if per_channel else 'scalar'} gate, K {K}{', views' * permuted}"
        yield Case("gated_delta_net", shape, lambda g, at=(S, T, n_seqs, r, per_channel, K, permuted): _delta_net(g, *at))


def _delta_net(g, S, T, n_seqs, r, per_channel, K, permuted):
    rng, H_k = _rng(S, T, n_seqs), 2
    H = r * H_k
    q, k = (_f32(kit.l2_norm(rng.normal(size=(n_seqs, T, H_k, S)), 1e-6)) for _ in range(2))
    v, beta = _f32(rng.normal(size=(n_seqs, T, H, S))), _f32(rng.uniform(size=(n_seqs, T, H, 1)))
    gate = _f32(-rng.exponential(0.3, size=(n_seqs, T, H, S if per_channel else 1)))
    state = _f32(rng.normal(size=(n_seqs, H, S, S)))
    tensors = [_strided(g, x) if permuted else g.tensor(x) for x in (q, k, v)] + [g.tensor(x) for x in (gate, beta, state)]
    out, states = _walk(q, k, v, gate, beta, state)

    def both(value):
        # slots beyond the tokens are not written
        flat, n_kept = value.reshape(-1), min(T, K)
        got = [flat[: out.size], flat[out.size : out.size + n_kept * state.size]]
        return np.concatenate(got), np.concatenate([out.ravel(), states[::-1][:n_kept].ravel()])

    return g.gated_delta_net(*tensors, K), both


def _walk(q, k, v, gate, beta, state) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs [n_seqs, T, H, S] and the states after each token [T, n_seqs, H, S, S]."""
    H, outs, states = v.shape[2], [], []
    s = state.astype(np.float64)
    for t in range(v.shape[1]):
        rows = []
        for i in range(len(v)):
            g = gate[i, t].astype(np.float64)
            heads = (kit.pair_heads(x[i, t].astype(np.float64), H, "tiled") for x in (q, k))
            out, new = kit.delta_step(s[i], *heads, v[i, t].astype(np.float64), g if g.shape[-1] > 1 else g[:, 0], beta[i, t, :, 0])
            rows.append((out, new))
        s = np.stack([new for _, new in rows])
        outs.append(np.stack([out for out, _ in rows]))
        states.append(s)
    return np.stack(outs, axis=1), np.stack(states)


def _strided(g, x):
    """Return x as a view into a longer row, as the convolution's output hands out q, k and v."""
    n_seqs, T, H, S = x.shape
    wide = np.concatenate([x, np.full_like(x, 7.0)], axis=2)
    whole = g.tensor(wide)
    return g.view_4d(whole, S, H, T, n_seqs, *whole.nb[1:], 0)


# solve_tri (C22)


def _solves() -> Iterator[Case]:
    for n, m in product((1, 2, 63, 64, 65, 128), (1, 31, 32, 33, 64, 128)):
        yield Case("solve_tri", f"n {n}, k {m}, batch 4x2", lambda g, n=n, m=m: _solve(g, n, m))


def _solve(g, n, m):
    rng = _rng(n, m)
    lower = _f32(np.tril(rng.normal(size=(2, 4, n, n)) / np.sqrt(n), -1) + 1.5 * np.eye(n))
    b = _f32(rng.normal(size=(2, 4, n, m)))
    want = np.linalg.solve(lower.astype(np.float64), b.astype(np.float64))
    return g.solve_tri(g.tensor(lower), g.tensor(b), True, True, False), _against(want)


def _against(want: np.ndarray) -> Callable:
    return lambda got: (got.reshape(-1), want.reshape(-1))


# mul_mat_id (C24) and mul_mat


def _experts() -> Iterator[Case]:
    tokens = (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 519, 2048, 8192)
    for kind, limit in (("f32", F32_LIMIT), ("f16", HALF_LIMIT), ("q8_0", QUANTISED_LIMIT), ("q4_k", QUANTISED_LIMIT), ("q6_k", QUANTISED_LIMIT)):
        # the largest batches for one quantised type: a launch limit does not depend on the type
        for T in tokens if kind == "q8_0" else tokens[:-2]:
            yield Case("mul_mat_id", f"{kind}, 512 experts, top 10, {T} tokens", lambda g, kind=kind, T=T: _expert(g, kind, T), limit)
    for n_expert, n_used in ((1, 1), (4, 4)):
        yield Case("mul_mat_id", f"f32, {n_expert} experts, top {n_used}, 33 tokens",
                   lambda g, n=n_expert, u=n_used: _expert(g, "f32", 33, n, u))  # fmt: skip


def _expert(g, kind, T, n_expert=512, n_used=10, n_in=256, n_out=8):
    rng = _rng(T, n_expert)
    w, x = _f32(rng.normal(size=(n_expert, n_out, n_in))), _f32(rng.normal(size=(T, 1, n_in)))
    ids = np.argsort(rng.random((T, n_expert)), axis=1)[:, :n_used].astype(np.int32)
    w_exact, x64 = _stored(kind, w), x[:, 0].astype(np.float64)
    want = np.stack([np.matmul(w_exact[ids[:, j]], x64[:, :, None])[..., 0] for j in range(n_used)], axis=1)
    return g.mul_mat_id(g.tensor(w, dtype=kind), g.tensor(x), g.tensor(ids, dtype="i32")), _against(want)


def _stored(kind: str, x: np.ndarray) -> np.ndarray:
    """Return what a tensor of this type holds of x, in float64."""
    if kind in ("f32", "f16"):
        return x.astype({"f32": np.float32, "f16": np.float16}[kind]).astype(np.float64)
    type_ = types.GgmlType.of(kind)
    return types.dequantize(type_, types.quantize(type_, x), x.shape[-1]).astype(np.float64)


def _matrices() -> Iterator[Case]:
    for (kind, limit), T in product((("f32", F32_LIMIT), ("f16", HALF_LIMIT), ("q8_0", QUANTISED_LIMIT), ("q4_k", QUANTISED_LIMIT)), (1, 7, 65)):
        yield Case("mul_mat", f"{kind} [256, 33], {T} tokens", lambda g, kind=kind, T=T: _matrix(g, kind, T), limit)


def _matrix(g, kind, T):
    rng = _rng(T, 33)
    w, x = _f32(rng.normal(size=(33, 256))), _f32(rng.normal(size=(T, 256)))
    return g.mul_mat(g.tensor(w, dtype=kind), g.tensor(x)), _against(x.astype(np.float64) @ _stored(kind, w).T)


# the rest of the linear-attention layer


def _convolutions() -> Iterator[Case]:
    for T, n_seqs in product((1, 4, 65, 513), (1, 3)):
        yield Case("ssm_conv", f"4 taps, 97 channels, T {T}, {n_seqs} seq", lambda g, T=T, n=n_seqs: _convolution(g, T, n))


def _convolution(g, T, n_seqs):
    rng = _rng(T, n_seqs)
    x, kernel = _f32(rng.normal(size=(n_seqs, 97, 3 + T))), _f32(rng.normal(size=(97, 4)))
    windows = sliding_window_view(x.astype(np.float64), 4, axis=-1)
    return g.ssm_conv(g.tensor(x), g.tensor(kernel)), _against(np.einsum("sctk,ck->stc", windows, kernel))


def _triangles() -> Iterator[Case]:
    for n in (1, 16, 63, 64, 65, 128):
        yield Case("cumsum", f"n {n}, batch 3x2", lambda g, n=n: _cumsum(g, n))
        for kind, name, cut in ((ops.TRI_LOWER, "below the diagonal", -1), (ops.TRI_LOWER_DIAG, "lower", 0)):
            yield Case("tri", f"n {n}, {name}, batch 3x2", lambda g, n=n, kind=kind, cut=cut: _tri(g, n, kind, cut))


def _cumsum(g, n):
    x = _f32(-_rng(n).exponential(size=(2, 3, 5, n)))
    return g.cumsum(g.tensor(x)), _against(np.cumsum(x.astype(np.float64), axis=-1))


def _tri(g, n, kind, cut):
    x = _f32(_rng(n).normal(size=(2, 3, n, n)))
    return g.tri(g.tensor(x), kind), _against(np.tril(x.astype(np.float64), cut))


def _norms() -> Iterator[Case]:
    for n, rows in ((32, 1), (192, 65), (2048, 7)):
        yield Case("rms_norm", f"n {n}, {rows} rows", lambda g, n=n, rows=rows: _norm(g, n, rows))
        yield Case("soft_max", f"n {n}, {rows} rows", lambda g, n=n, rows=rows: _soft_max(g, n, rows))


def _norm(g, n, rows):
    x = _f32(_rng(n, rows).normal(size=(rows, n)))
    return g.rms_norm(g.tensor(x), 1e-6), _against(kit.rms_norm(x.astype(np.float64), 1.0, 1e-6))


def _soft_max(g, n, rows):
    x = _f32(4 * _rng(n, rows).normal(size=(rows, n)))
    return g.soft_max(g.tensor(x)), _against(kit.softmax(x.astype(np.float64)))


# attention


def _attentions() -> Iterator[Case]:
    for D, T, n_kv, kind in product((64, 128, 256), (1, 3, 65), (256, 512), ("f16", "f32", "q8_0")):
        if kind == "f16" or (T, n_kv) == (3, 256):
            yield Case("flash_attn_ext", f"D {D}, 8 over 2 heads, {T} tokens, {n_kv} cells of {kind}",
                       lambda g, at=(D, T, n_kv, kind): _attention(g, *at), HALF_LIMIT if kind == "f32" else ATTENTION_LIMIT)  # fmt: skip


def _attention(g, D, T, n_kv, kind):
    rng, H, H_kv, n_past = _rng(D, T, n_kv), 8, 2, n_kv - 5 - T
    q = _f32(rng.normal(size=(H, T, D)))
    k, v = (_f32(rng.normal(size=(H_kv, n_kv, D))) for _ in range(2))
    seen = np.arange(n_kv)[None] <= n_past + np.arange(T)[:, None]
    mask = np.where(seen, 0, -np.inf).astype(np.float16)
    keys, values = (np.repeat(_stored(kind, x), H // H_kv, axis=0) for x in (k, v))
    scores = np.einsum("htd,hnd->htn", q.astype(np.float64), keys) / np.sqrt(D)
    want = np.einsum("htn,hnd->thd", kit.softmax(np.where(seen, scores, -np.inf)), values)
    out = g.flash_attn_ext(g.tensor(q), g.tensor(k, dtype=kind), g.tensor(v, dtype=kind), g.tensor(mask, dtype="f16"), D**-0.5, 0.0, 0.0)
    return g.flash_attn_ext_set_prec(out, ops.PREC_F32), _against(want)


def _ropes() -> Iterator[Case]:
    for (D, n_rot), far, (name, rope) in product(((256, 64), (128, 128), (32, 8)), (0, 5000), (("plain", ROPE), ("YaRN", YARN))):
        yield Case("rope", f"{n_rot} of {D}, positions {far} to {far + 64}, {name}", lambda g, at=(D, n_rot, far, rope): _rope(g, *at))


def _rope(g, D, n_rot, far, rope):
    x, pos = _f32(_rng(D, far).normal(size=(5, 3, D))), far + np.array([0, 1, 2, 33, 64], np.int32)
    want = np.stack([kit.rope_neox(row.astype(np.float64), int(p), rope, n_rot=n_rot) for row, p in zip(x, pos)])
    turned = g.rope_ext(g.tensor(x), g.tensor(pos, dtype="i32"), None, n_rot, ops.ROPE_NEOX, rope.n_ctx_orig,
                        rope.freq_base, rope.freq_scale, rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow)  # fmt: skip
    return turned, _against(want)


# rows and orders


def _rows() -> Iterator[Case]:
    for kind, n, T in product(("f32", "f16", "q8_0"), (64, 512), (1, 7, 65)):
        yield Case("set_rows", f"{T} rows of {n} into 128 of {kind}", lambda g, at=(kind, n, T): _set_rows(g, *at))
    for n, T in product((1, 64), (1, 65)):
        yield Case("get_rows", f"{T} rows of {n} from 128", lambda g, n=n, T=T: _get_rows(g, n, T))


def _set_rows(g, kind, n, T):
    rng = _rng(n, T)
    held, new = (_f32(rng.normal(size=(rows, n))) for rows in (128, T))
    at = rng.permutation(128)[:T].astype(np.int64)
    want = _stored(kind, held)
    want[at] = _stored(kind, new)
    return g.set_rows(g.tensor(held, dtype=kind), g.tensor(new), g.tensor(at, dtype="i64")), _against(want)


def _get_rows(g, n, T):
    rng = _rng(n, T)
    x, at = _f32(rng.normal(size=(128, n))), rng.integers(0, 128, T).astype(np.int32)
    return g.get_rows(g.tensor(x), g.tensor(at, dtype="i32")), _against(x[at].astype(np.float64))


def _orders() -> Iterator[Case]:
    for n, T in product((16, 97, 512), (1, 7, 65)):
        yield Case("argsort", f"{T} rows of {n}, descending", lambda g, n=n, T=T: _argsort(g, n, T))
        yield Case("top_k", f"10 of {n}, {T} rows", lambda g, n=n, T=T: _top_k(g, n, T))


def _argsort(g, n, T):
    x = _f32(_rng(n, T).normal(size=(T, n)))
    return g.argsort(g.tensor(x), ops.SORT_DESC), _against(np.argsort(-x, axis=1))


def _top_k(g, n, T):
    x = _f32(_rng(n, T).normal(size=(T, n)))
    want = np.sort(np.argsort(-x, axis=1)[:, :10])
    # in any order
    return g.top_k(g.tensor(x), 10), lambda got: (np.sort(got.reshape(T, 10)), want)
