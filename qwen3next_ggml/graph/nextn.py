"""The NextN block: one more layer that guesses the token after next from the trunk's hidden and the next token (level 5).

Mirrors the middle of llama.cpp's `graph_mtp`, under its names.
"""

from .. import ggml
from .attention import attend, qkv, rope
from .builder import GraphBuilder, expect_shape
from .ffn import gate_logits, moe, shared_expert
from .inputs import Inputs
from .linear import linear
from .norm import rms_norm
from .state import KvLayer


def nextn_block(g: GraphBuilder, hp, wb, embedding: ggml.Tensor, inp: Inputs, cache: KvLayer, il: int) -> ggml.Tensor | None:
    """Run the block on this ubatch's tokens and hidden → [n_embd, n_outputs], or None when only K and V are wanted."""
    eps = hp.f_norm_rms_eps
    residual = nextn_input(g, hp, wb, embedding, inp, il)  # [n_embd, n_tokens]
    x = g.name(rms_norm(g, residual, wb.attn_norm, eps, il), "mtp_attn_norm", il)
    x = nextn_attention(g, hp, wb, inp, cache, x, il)
    if x is None:
        return None
    x, residual = g.get_rows(x, inp.out_ids), g.get_rows(residual, inp.out_ids)  # [n_embd, n_outputs]
    residual = g.name(g.add(x, residual), "mtp_attn_residual", il)
    x = g.name(rms_norm(g, residual, wb.post_attention_norm, eps, il), "mtp_attn_post_norm", il)
    return g.name(g.add(nextn_ffn(g, hp, wb, x, il), residual), "mtp_post_ffn", il)


def nextn_input(g: GraphBuilder, hp, wb, embedding: ggml.Tensor, inp: Inputs, il: int) -> ggml.Tensor:
    """Join each token's embedding with the final-norm hidden of the token before it → [n_embd, n_tokens]."""
    n_embd, eps = hp.n_embd, hp.f_norm_rms_eps
    e = g.name(g.get_rows(embedding, inp.tokens), "mtp_tok_embd", il)
    # the lookup belongs where the embedding lies
    g.end_layer(e, 0)
    h = g.name(rms_norm(g, inp.hidden(n_embd), wb.nextn_hnorm, eps, il), "mtp_hnorm", il)
    e = g.name(rms_norm(g, e, wb.nextn_enorm, eps, il), "mtp_enorm", il)
    both = g.name(g.concat(e, h, 0), "mtp_concat", il)  # [2·n_embd, n_tokens]
    return g.name(linear(g, wb.nextn_eh_proj, both), "mtp_eh_proj", il)


def nextn_attention(g: GraphBuilder, hp, wb, inp: Inputs, cache: KvLayer, x: ggml.Tensor, il: int) -> ggml.Tensor | None:
    """Attend with x [n_embd, n_tokens] → [n_embd, n_tokens], or store its K and V and return None when no row is wanted."""
    D, H, H_kv, eps = hp.n_embd_head_k, hp.n_head, hp.n_head_kv, hp.f_norm_rms_eps
    n_tokens = inp.sizes.n_tokens
    expect_shape(x, f"NextN attention in layer {il}", hp.n_embd, n_tokens)
    q_full, k, v = qkv(g, wb, x, 2 * D * H, D * H_kv, D * H_kv, il)
    k = rms_norm(g, g.reshape_3d(k, D, H_kv, n_tokens), wb.attn_k_norm, eps, il)
    k = g.name(rope(g, hp, g.name(k, "mtp_Kcur_normed", il), inp.pos), "mtp_Kcur", il)
    v = g.name(g.reshape_3d(v, D, H_kv, n_tokens), "mtp_Vcur", il)
    if inp.sizes.n_outputs == 0:
        cache.write(g, inp, k, v)
        return None

    q_full = g.name(q_full, "mtp_Qcur_full", il)
    size = q_full.type.row_size
    q = g.view_3d(q_full, D, H, n_tokens, size(2 * D), size(2 * D * H), 0)
    q = g.name(rms_norm(g, q, wb.attn_q_norm, eps, il), "mtp_Qcur_normed", il)
    q = g.name(rope(g, hp, q, inp.pos), "mtp_Qcur", il)
    kq_scale = hp.f_attention_scale or D**-0.5
    out = g.name(attend(g, inp, cache, q, k, v, kq_scale, il), "mtp_attn_pregate", il)  # [D·H, n_tokens]
    gate = g.view_3d(q_full, D, H, n_tokens, size(2 * D), size(2 * D * H), size(D))
    gate = g.name(g.cont_2d(gate, D * H, n_tokens), "mtp_gate", il)
    return g.name(linear(g, wb.attn_output, g.mul(out, g.sigmoid(gate))), "mtp_attn_out", il)


def nextn_ffn(g: GraphBuilder, hp, wb, x: ggml.Tensor, il: int) -> ggml.Tensor:
    """Return routed plus shared experts of x [n_embd, n_outputs]."""
    logits, open_ = gate_logits(g, wb, x)
    out = g.name(moe(g, hp, wb, x, logits, il), "mtp_ffn_moe_out", il)
    if open_ is not None:
        out = g.add(out, shared_expert(g, wb, x, open_, il, prefix="mtp_"))
    return g.name(out, "mtp_ffn_out", il)
