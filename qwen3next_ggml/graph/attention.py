"""Gated grouped-query attention over a KV cache (level 5)."""

from .. import ggml
from ..ggml import ops, types
from .builder import GraphBuilder, expect_shape
from .inputs import Inputs
from .linear import linear, linears
from .norm import rms_norm
from .state import KvLayer

# more tokens than this are a prompt, which flash attention takes in tiles
FEW_TOKENS = 16


def qkv(
    g: GraphBuilder, wb, x: ggml.Tensor, n_q: int, n_k: int, n_v: int, il: int
) -> tuple[ggml.Tensor, ggml.Tensor, ggml.Tensor]:
    """Project x [n_embd, n_tokens] → q [n_q, n_tokens], k [n_k, n_tokens], v [n_v, n_tokens].

    Takes fused `attn_qkv` or separate `attn_q`, `attn_k`, `attn_v`, each with or without a bias. Mirrors llama.cpp's
    `build_qkv`.
    """
    if wb.attn_qkv is None:
        weights = ((wb.attn_q, wb.attn_q_bias), (wb.attn_k, wb.attn_k_bias), (wb.attn_v, wb.attn_v_bias))
        products = linears(g, [w for w, _ in weights], x)
        q, k, v = (y if bias is None else g.add(y, bias) for y, (_, bias) in zip(products, weights))
        return q, k, v
    n_tokens = x.ne[1]
    fused = g.name(linear(g, wb.attn_qkv, x), "wqkv", il)  # [n_q + n_k + n_v, n_tokens]
    biases = (wb.attn_q_bias, wb.attn_k_bias, wb.attn_v_bias)
    if wb.attn_qkv_bias is not None:
        fused = g.name(g.add(fused, wb.attn_qkv_bias), "wqkv_b", il)
    elif None not in biases:
        fused = g.name(g.add(fused, g.concat(g.concat(biases[0], biases[1], 0), biases[2], 0)), "wqkv_b", il)
    row, size = fused.nb[1], fused.type.row_size
    q = g.view_2d(fused, n_q, n_tokens, row, 0)
    k = g.view_2d(fused, n_k, n_tokens, row, size(n_q))
    v = g.view_2d(fused, n_v, n_tokens, row, size(n_q + n_k))
    return g.cont(q), g.cont(k), g.cont(v)


def attend(
    g: GraphBuilder, inp: Inputs, cache: KvLayer, q: ggml.Tensor, k: ggml.Tensor, v: ggml.Tensor, kq_scale: float, il: int
) -> ggml.Tensor:
    """Write k and v to the cache and attend with q over it → [D·H, n_tokens].

    q [D, H, n_tokens], k and v [D, H_kv, n_tokens]. Mirrors llama.cpp's `build_attn` and `build_attn_mha`.
    """
    for x in (q, v, k):
        g.expand(x)
    cache.write(g, inp, k, v)
    k, v = cache.read(g, inp.sizes.n_kv)
    if g.options.grouped_attn and cache.v_transposed and q.ne[2] <= FEW_TOKENS:
        out = _attend_in_groups(g, inp, q, k, v, kq_scale, il)
    else:
        out = _attend_by_head(g, inp, q, k, v, kq_scale, il, v_transposed=cache.v_transposed)
    g.expand(out)
    return g.name(out, "kqv_out", il)


def _attend_by_head(g, inp, q, k, v, kq_scale, il, *, v_transposed):
    """Attend as llama.cpp does. q [D, H, n_tokens], k [D, H_kv, n_kv], v alike or, transposed, [n_kv, H_kv, D]."""
    D, H, n_tokens, _ = q.ne
    q = g.view_4d(q, D, H, n_tokens, 1, q.nb[1], q.nb[2], q.nb[2] * n_tokens, 0)
    q = g.permute(q, 0, 2, 1, 3)  # [D, n_tokens, H, 1]
    k = g.permute(k, 0, 2, 1, 3)  # [D, n_kv, H_kv, 1]
    v = g.permute(v, 0, 2, 1, 3)  # [D, n_kv, H_kv, 1], or [n_kv, D, H_kv, 1] when transposed
    if g.options.flash_attn:
        if v_transposed:
            v = g.cont(g.transpose(v))  # [D, n_kv, H_kv, 1]
        if not g.options.kv_as_stored:
            k, v = (g.cast(x, types.F16) if x.type == types.F32 else x for x in (k, v))
        out = g.flash_attn_ext(q, k, v, inp.kq_mask, kq_scale, 0.0, 0.0)  # [D, H, n_tokens, 1]
        g.flash_attn_ext_set_prec(out, ops.PREC_F32)
        out = g.reshape_2d(out, D * H, n_tokens)
    else:
        kq = g.name(g.mul_mat(k, q), "kq", il)  # [n_kv, n_tokens, H, 1]
        g.mul_mat_set_prec(kq, ops.PREC_F32)
        kq = g.name(g.soft_max_ext(kq, inp.kq_mask, kq_scale, 0.0), "kq_soft_max", il)
        out = g.name(g.mul_mat(v, kq), "kqv", il)  # [D, n_tokens, H, 1]
        out = g.cont_2d(g.permute(out, 0, 2, 1, 3), D * H, n_tokens)
    return out


def _attend_in_groups(g, inp, q, k, v, kq_scale, il):
    """Attend head group by head group: the H / H_kv query heads of all tokens are the columns of one product with their K and V.

    q [D, H, n_tokens], k [D, H_kv, n_kv], v [n_kv, H_kv, D].
    """
    D, H, n_tokens, _ = q.ne
    H_kv, n_kv = k.ne[1], k.ne[2]
    k, v = g.permute(k, 0, 2, 1, 3), g.permute(v, 0, 2, 1, 3)  # [D, n_kv, H_kv], [n_kv, D, H_kv]
    if n_tokens > 1:
        q = g.cont(g.permute(q, 0, 2, 1, 3))  # [D, n_tokens, H]
    columns = n_tokens * H // H_kv
    kq = g.mul_mat(k, g.reshape_3d(q, D, columns, H_kv))  # [n_kv, columns, H_kv]
    g.mul_mat_set_prec(kq, ops.PREC_F32)
    kq = g.name(g.reshape_3d(kq, n_kv, n_tokens, H), "kq", il)
    kq = g.name(g.soft_max_ext(kq, inp.kq_mask, kq_scale, 0.0), "kq_soft_max", il)
    out = g.mul_mat(v, g.reshape_3d(kq, n_kv, columns, H_kv))  # [D, columns, H_kv]
    out = g.name(g.reshape_3d(out, D, n_tokens, H), "kqv", il)
    if n_tokens == 1:
        return g.reshape_2d(out, D * H, 1)
    return g.cont_2d(g.permute(out, 0, 2, 1, 3), D * H, n_tokens)


def gated_attention(g: GraphBuilder, hp, wb, inp: Inputs, cache: KvLayer, x: ggml.Tensor, il: int) -> ggml.Tensor:
    """Attend with a query projection twice as wide, per head [q | gate] → attn_output [n_embd, n_tokens].

    x [n_embd, n_tokens]. Mirrors llama.cpp's `build_layer_attn` (Qwen3-Next report, gated attention).
    """
    D, H, H_kv = hp.n_embd_head_k, hp.n_head, hp.n_head_kv
    n_tokens = inp.sizes.n_tokens
    expect_shape(x, f"attention layer {il}", hp.n_embd, n_tokens)

    q_full, k, v = qkv(g, wb, x, 2 * D * H, D * H_kv, D * H_kv, il)
    q_full = g.name(q_full, "Qcur_full", il)
    k = g.name(k, "Kcur", il)
    v = g.name(v, "Vcur", il)

    q_full = g.reshape_4d(q_full, 2 * D, H, n_tokens, 1)
    _, nb1, nb2, nb3 = q_full.nb
    q = g.name(g.view_4d(q_full, D, H, n_tokens, 1, nb1, nb2, nb3, 0), "Qcur_view", il)
    gate = g.name(g.view_4d(q_full, D, H, n_tokens, 1, nb1, nb2, nb3, nb1 // 2), "gate", il)
    k = g.reshape_3d(k, D, H_kv, n_tokens)
    v = g.reshape_3d(v, D, H_kv, n_tokens)

    q = g.name(rms_norm(g, q, wb.attn_q_norm, hp.f_norm_rms_eps, il), "Qcur_normed", il)
    k = g.name(rms_norm(g, k, wb.attn_k_norm, hp.f_norm_rms_eps, il), "Kcur_normed", il)
    q = g.name(rope(g, hp, q, inp.pos), "Qcur", il)
    k = g.name(rope(g, hp, k, inp.pos), "Kcur", il)
    v = g.name(v, "Vcur", il)

    kq_scale = hp.f_attention_scale or D**-0.5
    out = g.name(attend(g, inp, cache, q, k, v, kq_scale, il), "attn_pregate", il)  # [D·H, n_tokens]
    gate = g.reshape_2d(g.sigmoid(gate), D * H, n_tokens) if g.options.fewer_conts else g.sigmoid(g.cont_2d(gate, D * H, n_tokens))
    gate = g.name(gate, "gate_sigmoid", il)
    out = g.name(g.mul(out, gate), "attn_gated", il)
    return g.name(linear(g, wb.attn_output, out), "attn_output", il)


def rope(g: GraphBuilder, hp, x: ggml.Tensor, pos: ggml.Tensor) -> ggml.Tensor:
    """Rotate the first `n_rot` of x's D dimensions; frequencies come from n_rot, never from the head width."""
    r = hp.rope
    return g.rope_ext(
        x, pos, None, hp.n_rot, ops.ROPE_NEOX, r.n_ctx_orig, r.freq_base, r.freq_scale,
        r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow,
    )  # fmt: skip
