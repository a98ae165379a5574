"""ggml's ops in float64 numpy, under ggml's names: what a kernel should have given (level 11).

An array has four axes, ggml's shape reversed. Only ops of our graphs, and of those only the settings our graphs use.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from ..ggml import ops
from ..reference import kit


class NotKnown(Exception):
    """There is no float64 form of an op, or of a setting of it."""


class Float64:
    """Every method takes and gives arrays [ne3, ne2, ne1, ne0]; what a kernel leaves unwritten is NaN."""

    def __getattr__(self, name: str):
        raise NotKnown(name)

    exp, sqr, sqrt, log, neg, tanh = (staticmethod(f) for f in (np.exp, np.square, np.sqrt, np.log, np.negative, np.tanh))
    sigmoid, silu, softplus, soft_max = (staticmethod(f) for f in (kit.sigmoid, kit.silu, kit.softplus, kit.softmax))

    def add(self, a, b):
        return a + _tiled(b, a.shape)

    def sub(self, a, b):
        return a - _tiled(b, a.shape)

    def mul(self, a, b):
        return a * _tiled(b, a.shape)

    def div(self, a, b):
        return a / _tiled(b, a.shape)

    def scale(self, a, s):
        return a * s

    def clamp(self, a, low, high):
        return np.clip(a, low, high)

    def fill(self, a, c):
        return np.full_like(a, c)

    def swiglu_split(self, a, b):
        return kit.silu(a) * b

    def rms_norm(self, a, eps):
        return kit.rms_norm(a, 1.0, eps)

    def l2_norm(self, a, eps):
        return a / np.maximum(np.sqrt(np.sum(a * a, axis=-1, keepdims=True)), eps)

    def sum_rows(self, a):
        return a.sum(axis=-1, keepdims=True)

    def cumsum(self, a):
        return a.cumsum(axis=-1)

    def tri(self, a, kind):
        return np.tril(a, {ops.TRI_LOWER: -1, ops.TRI_LOWER_DIAG: 0}[kind])

    def diag(self, a):
        return a * np.eye(a.shape[-1])

    def soft_max_ext(self, a, mask, scale, max_bias):
        if max_bias:
            raise NotKnown("soft_max_ext with max_bias")
        return kit.softmax(a * scale + (0.0 if mask is None else _tiled(mask[..., : a.shape[2], :], a.shape)))

    def argsort(self, a, order):
        return np.argsort(-a if order == ops.SORT_DESC else a, axis=-1, kind="stable")

    def top_k(self, a, k):
        return self.argsort(a, ops.SORT_DESC)[..., :k]

    # products

    def mul_mat(self, a, b):
        return b @ _repeated(a, b).swapaxes(2, 3)

    def mul_mat_id(self, w, x, ids):
        chosen = ids[0, 0].astype(int)  # [T, n_used]
        x = np.broadcast_to(x[0], (*chosen.shape, x.shape[-1]))
        return np.stack([np.matmul(w[0, chosen[:, j]], x[:, j, :, None])[..., 0] for j in range(chosen.shape[1])], axis=1)[None]

    def out_prod(self, a, b):
        return b.swapaxes(2, 3) @ _repeated(a, b)

    def solve_tri(self, a, b, left, lower, unit):
        return np.linalg.solve(np.tril(a), b)

    def mul_mat_set_prec(self, a, prec):
        return a

    flash_attn_ext_set_prec = mul_mat_set_prec

    def into(self, a, owner, offset):
        return a

    # rows, shapes and copies

    def get_rows(self, a, ids):
        rows = ids[0].astype(int)  # [ne3, ne2, n]
        return a[np.arange(len(rows))[:, None, None], np.arange(rows.shape[1])[:, None], rows]

    def set_rows(self, a, b, ids):
        out = a.copy()
        rows = _tiled(ids[0], b.shape[:3]).astype(int)
        out[np.arange(len(b))[:, None, None], np.arange(b.shape[1])[:, None], rows] = b
        return out

    def set_inplace(self, a, b, nb1, nb2, nb3, offset):
        # strides of float32
        out = np.ascontiguousarray(a)
        as_strided(out.reshape(-1)[offset // 4 :], b.shape, (2 * nb3, 2 * nb2, 2 * nb1, 8))[...] = b
        return out

    def concat(self, a, b, dim):
        return np.concatenate([a, b], axis=3 - dim)

    def pad(self, a, *after):
        return np.pad(a, [(0, n) for n in after[::-1]])

    def repeat_4d(self, a, *ne):
        return _tiled(a, ne[::-1])

    def cont(self, a, *ne):
        return a.reshape((1,) * (4 - len(ne)) + ne[::-1]) if ne else a

    dup = cont_2d = cont_3d = cont_4d = cont

    def cast(self, a, type):
        return a

    def cpy(self, a, b):
        return a.reshape(b.shape)

    # fused ops

    def ssm_conv(self, x, kernel):
        return np.einsum("zsctk,zyck->zstc", sliding_window_view(x, kernel.shape[-1], axis=-1), kernel)

    def conv_2d_dw_direct(self, a, b, stride0, stride1, pad0, pad1, dilation0, dilation1):
        if {stride0, stride1, dilation0, dilation1} != {1}:
            raise NotKnown("conv_2d_dw_direct with strides or gaps")
        windows = sliding_window_view(np.pad(b, ((0, 0), (0, 0), (pad1, pad1), (pad0, pad0))), a.shape[2:], axis=(2, 3))
        return np.einsum("nchwyx,czyx->nchw", windows, a)

    def rope_ext(self, a, pos, c, n_rot, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow):
        if mode != ops.ROPE_NEOX or c is not None:
            raise NotKnown("rope_ext of that mode")
        rope = SimpleNamespace(freq_base=freq_base, freq_scale=freq_scale, n_ctx_orig=n_ctx_orig, ext_factor=ext_factor,
                               attn_factor=attn_factor, beta_fast=beta_fast, beta_slow=beta_slow)  # fmt: skip
        return np.stack([kit.rope_neox(x, int(p), rope, n_rot=n_rot) for x, p in zip(a[0], pos.ravel())])[None]

    def flash_attn_ext(self, q, k, v, mask, scale, max_bias, logit_softcap):
        if max_bias or logit_softcap:
            raise NotKnown("flash_attn_ext with max_bias or logit_softcap")
        scores = q @ _repeated(k, q).swapaxes(2, 3) * scale  # [.., H, T, n_kv]
        if mask is not None:
            scores = scores + _tiled(mask[..., : q.shape[2], :], scores.shape)
        return (kit.softmax(scores) @ _repeated(v, q)).swapaxes(1, 2)

    def gated_delta_net(self, q, k, v, g, beta, state, K):
        n_seqs, T, H, S = v.shape
        outs, states = np.empty(v.shape), np.full((K, n_seqs, H, S, S), np.nan)
        for i in range(n_seqs):
            s = state[i]
            for t in range(T):
                heads = (kit.pair_heads(x[i * len(x) // n_seqs, t], H, "tiled") for x in (q, k))
                gate = g[i, t] if g.shape[-1] > 1 else g[i, t, :, 0]
                outs[i, t], s = kit.delta_step(s, *heads, v[i, t], gate, beta[i, t, :, 0])
                if T - 1 - t < K:
                    states[T - 1 - t, i] = s
        return np.concatenate([outs.ravel(), states.ravel()]).reshape(1, 1, -1, H * S)


def _tiled(x, shape):
    """Repeat x as ggml does, whole beside whole."""
    return np.tile(x, [n // m for n, m in zip(shape, x.shape)])


def _repeated(a, b):
    """Repeat a along its first two axes to those of b, each beside itself: heads that share a key."""
    return a.repeat(b.shape[0] // a.shape[0], axis=0).repeat(b.shape[1] // a.shape[1], axis=1)
