"""Every kind of op our graphs emit, over the shapes that break kernels, with its value in float64 (level 11).

The ops with kernels of their own are here, the small ones between them in `small_op_cases`. Arrays are in numpy order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..ggml import ops
from ..reference import kit
from .float64 import Float64
from .op_case import ATTENTION_LIMIT, F32_LIMIT, HALF_LIMIT, HALF_SUM_LIMIT, QUANTISED_LIMIT, Case, against, f32, rng_of, stored
from .small_op_cases import small_cases

HALF = (HALF_LIMIT, HALF_SUM_LIMIT)
# types of weights, with the limits of a product
KINDS = (("f32", (F32_LIMIT, HALF_LIMIT)), ("f16", HALF), *((kind, (QUANTISED_LIMIT,)) for kind in ("q8_0", "q4_k", "q6_k")))
ROPE = SimpleNamespace(freq_base=1e7, freq_scale=1.0, n_ctx_orig=262144, ext_factor=0.0, attn_factor=1.0, beta_fast=32.0, beta_slow=1.0)
YARN = SimpleNamespace(**{**vars(ROPE), "freq_scale": 0.25, "ext_factor": 1.0})


def cases() -> Iterator[Case]:
    """Yield every case, op by op."""
    for family in (_gated_delta_nets, _solves, _experts, _matrices, _convolutions, _attentions, _ropes, small_cases):
        yield from family()


# gated_delta_net (C21)


def _adjacent(g, x):
    return g.tensor(x)


def _strided(g, x):
    """Return x as a view into a longer row, as the convolution's output hands out q, k and v."""
    n_seqs, T, H, S = x.shape
    wide = np.concatenate([x, np.full_like(x, 7.0)], axis=2)
    whole = g.tensor(wide)
    return g.view_4d(whole, S, H, T, n_seqs, *whole.nb[1:], 0)


def _permuted(g, x):
    """Return x from an array with a head's tokens side by side."""
    return g.permute(g.tensor(x.swapaxes(1, 2)), 0, 2, 1, 3)


LAYOUTS = {"adjacent": _adjacent, "views": _strided, "permuted": _permuted}


def _gated_delta_nets() -> Iterator[Case]:
    for S, T, n_seqs, r, gate, K, laid in product((32, 64, 128), (1, 4, 65), (1, 2), (1, 2), ("scalar", "channel"), (1, 4), LAYOUTS):
        # one token of one sequence is the same however its heads are permuted
        if laid != "permuted" or T * n_seqs > 1:
            shape = f"S {S}, T {T}, {n_seqs} seq, {r} to 1, {gate} gate, K {K}, {laid}"
            yield Case("gated_delta_net", shape, lambda g, at=(S, T, n_seqs, r, gate == "channel", K, LAYOUTS[laid]): _delta_net(g, *at))


def _delta_net(g, S, T, n_seqs, r, per_channel, K, laid):
    rng, H_k = rng_of(S, T, n_seqs), 2
    H = r * H_k
    q, k = (f32(kit.l2_norm(rng.normal(size=(n_seqs, T, H_k, S)), 1e-6)) for _ in range(2))
    v, beta = f32(rng.normal(size=(n_seqs, T, H, S))), f32(rng.uniform(size=(n_seqs, T, H, 1)))
    gate = f32(-rng.exponential(0.3, size=(n_seqs, T, H, S if per_channel else 1)))
    state = f32(rng.normal(size=(n_seqs, H, S, S)))
    tensors = [laid(g, x) for x in (q, k, v)] + [g.tensor(x) for x in (gate, beta, state)]
    want = Float64().gated_delta_net(*(x.astype(np.float64) for x in (q, k, v, gate, beta, state)), K).reshape(-1)
    # slots beyond the tokens are not written
    n = v.size + min(T, K) * state.size

    def both(value):
        return value.reshape(-1)[:n], want[:n]

    return g.gated_delta_net(*tensors, K), both


# solve_tri (C22)


def _solves() -> Iterator[Case]:
    for n, m in product((1, 2, 63, 64, 65, 128), (1, 31, 32, 33, 64, 128)):
        yield Case("solve_tri", f"n {n}, k {m}, batch 4x2", lambda g, n=n, m=m: _solve(g, n, m))
    # ggml takes no other: what comes transposed goes through a copy
    for n, m in ((64, 33), (65, 64)):
        yield Case("solve_tri", f"n {n}, k {m}, batch 4x2, right side transposed", lambda g, n=n, m=m: _solve(g, n, m, transposed=True))


def _solve(g, n, m, *, transposed=False):
    rng = rng_of(n, m)
    lower = f32(np.tril(rng.normal(size=(2, 4, n, n)) / np.sqrt(n), -1) + 1.5 * np.eye(n))
    b = f32(rng.normal(size=(2, 4, n, m)))
    want = np.linalg.solve(lower.astype(np.float64), b.astype(np.float64))
    right = g.cont(g.transpose(g.tensor(b.swapaxes(2, 3)))) if transposed else g.tensor(b)
    return g.solve_tri(g.tensor(lower), right, True, True, False), against(want)


# mul_mat_id (C24) and mul_mat


def _experts() -> Iterator[Case]:
    for (kind, limits), T in product(KINDS, (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 519, 2048, 8192)):
        yield Case("mul_mat_id", f"{kind}, 512 experts, top 10, {T} tokens", lambda g, kind=kind, T=T: _expert(g, kind, T), *limits)
    for n_expert, n_used in ((1, 1), (4, 4)):
        yield Case("mul_mat_id", f"f32, {n_expert} experts, top {n_used}, 33 tokens",
                   lambda g, n=n_expert, u=n_used: _expert(g, "f32", 33, n, u), *dict(KINDS)["f32"])  # fmt: skip


def _expert(g, kind, T, n_expert=512, n_used=10):
    rng, (w, exact) = rng_of(T, n_expert), _bank(kind, n_expert)
    x = f32(rng.normal(size=(T, 1, w.shape[2])))
    # an odd step gives every token other experts, none of them twice
    ids = (rng.integers(0, n_expert, (T, 1)) + np.arange(n_used) * (2 * rng.integers(0, n_expert, (T, 1)) + 1)) % n_expert
    x64, want = x[:, 0].astype(np.float64), np.empty((T * n_used, w.shape[1]))
    by_expert = np.argsort(ids, axis=None)
    for expert, rows in enumerate(np.split(by_expert, np.searchsorted(ids.ravel()[by_expert], np.arange(1, n_expert)))):
        want[rows] = x64[rows // n_used] @ exact[expert].T
    return g.mul_mat_id(g.tensor(w, dtype=kind), g.tensor(x), g.tensor(ids, dtype="i32")), against(want)


@lru_cache(maxsize=1)
def _bank(kind, n_expert, n_in=256, n_out=4):
    w = f32(rng_of(n_expert).normal(size=(n_expert, n_out, n_in)))
    return w, stored(kind, w)


def _matrices() -> Iterator[Case]:
    for (kind, limits), T in product(KINDS[:-1], (1, 7, 65)):
        yield Case("mul_mat", f"{kind} [256, 33], {T} tokens", lambda g, kind=kind, T=T: _matrix(g, kind, T), *limits)


def _matrix(g, kind, T):
    rng = rng_of(T, 33)
    w, x = f32(rng.normal(size=(33, 256))), f32(rng.normal(size=(T, 256)))
    return g.mul_mat(g.tensor(w, dtype=kind), g.tensor(x)), against(x.astype(np.float64) @ stored(kind, w).T)


# the rest of the linear-attention layer


def _convolutions() -> Iterator[Case]:
    for T, n_seqs in product((1, 4, 65, 513), (1, 3)):
        yield Case("ssm_conv", f"4 taps, 97 channels, T {T}, {n_seqs} seq", lambda g, T=T, n=n_seqs: _convolution(g, T, n))
    for T, n_seqs in product((3, 16, 513), (1, 3)):
        yield Case("conv_2d_dw", f"4 taps, 97 channels, T {T}, {n_seqs} seq, a row each", lambda g, T=T, n=n_seqs: _row_convolution(g, T, n))


def _convolution(g, T, n_seqs):
    rng = rng_of(T, n_seqs)
    x, kernel = f32(rng.normal(size=(n_seqs, 97, 3 + T))), f32(rng.normal(size=(97, 4)))
    windows = sliding_window_view(x.astype(np.float64), 4, axis=-1)
    return g.ssm_conv(g.tensor(x), g.tensor(kernel)), against(np.einsum("sctk,ck->stc", windows, kernel))


def _row_convolution(g, T, n_seqs):
    rng = rng_of(T, n_seqs)
    x, kernel = f32(rng.normal(size=(n_seqs, T, 1, 97))), f32(rng.normal(size=(4, 1, 97, 1)))
    rows, taps = g.tensor(x), g.tensor(kernel)
    _, _, nb2, nb3 = rows.nb
    rows = g.permute(g.view_4d(rows, 97, 1, T, n_seqs, 8, nb2, nb3, 0), 2, 0, 1, 3)  # [1, T, 97, n_seqs]
    windows = sliding_window_view(np.pad(x.astype(np.float64), ((0, 0), (3, 3), (0, 0), (0, 0))), 4, axis=1)
    want = np.einsum("stzck,kzcw->sctw", windows, kernel)
    return g.conv_2d_dw_direct(g.permute(taps, 2, 3, 0, 1), rows, 1, 1, 0, 3, 1, 1), against(want)


# attention


def _attentions() -> Iterator[Case]:
    for D, T, n_kv, kind in product((64, 128, 256), (1, 3, 65), (256, 512), ("f16", "f32", "q8_0")):
        if kind == "f16" or (T, n_kv) == (3, 256):
            yield Case("flash_attn_ext", f"D {D}, 8 over 2 heads, {T} tokens, {n_kv} cells of {kind}",
                       lambda g, at=(D, T, n_kv, kind): _attention(g, *at), *(HALF if kind == "f32" else (ATTENTION_LIMIT,)))  # fmt: skip


def _attention(g, D, T, n_kv, kind):
    rng, H, H_kv, n_past = rng_of(D, T, n_kv), 8, 2, n_kv - 5 - T
    q = f32(rng.normal(size=(H, T, D)))
    k, v = (f32(rng.normal(size=(H_kv, n_kv, D))) for _ in range(2))
    seen = np.arange(n_kv)[None] <= n_past + np.arange(T)[:, None]
    mask = np.where(seen, 0, -np.inf).astype(np.float16)
    keys, values = (np.repeat(stored(kind, x), H // H_kv, axis=0) for x in (k, v))
    scores = np.einsum("htd,hnd->htn", q.astype(np.float64), keys) / np.sqrt(D)
    want = np.einsum("htn,hnd->thd", kit.softmax(np.where(seen, scores, -np.inf)), values)
    out = g.flash_attn_ext(g.tensor(q), g.tensor(k, dtype=kind), g.tensor(v, dtype=kind), g.tensor(mask, dtype="f16"), D**-0.5, 0.0, 0.0)
    return g.flash_attn_ext_set_prec(out, ops.PREC_F32), against(want)


def _ropes() -> Iterator[Case]:
    for (D, n_rot), far, (name, rope) in product(((256, 64), (128, 128), (32, 8)), (0, 5000), (("plain", ROPE), ("YaRN", YARN))):
        yield Case("rope", f"{n_rot} of {D}, positions {far} to {far + 64}, {name}", lambda g, at=(D, n_rot, far, rope): _rope(g, *at))


def _rope(g, D, n_rot, far, rope):
    x, pos = f32(rng_of(D, far).normal(size=(5, 3, D))), far + np.array([0, 1, 2, 33, 64], np.int32)
    want = np.stack([kit.rope_neox(row.astype(np.float64), int(p), rope, n_rot=n_rot) for row, p in zip(x, pos)])
    turned = g.rope_ext(g.tensor(x), g.tensor(pos, dtype="i32"), None, n_rot, ops.ROPE_NEOX, rope.n_ctx_orig,
                        rope.freq_base, rope.freq_scale, rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow)  # fmt: skip
    return turned, against(want)
