"""Qwen3-Next: Gated DeltaNet and gated attention, mixture of experts, optional NextN block (level 6).

Mirrors llama.cpp's src/models/qwen3next.cpp in the same order: hyperparameters, tensors, graph. Knows shapes and names,
neither files nor devices.
"""

from __future__ import annotations

import numpy as np

from ..errors import UnsupportedModelError
from ..ggml import Tensor
from ..graph.attention import gated_attention
from ..graph.builder import GraphBuilder
from ..graph.conv import conv_input, conv_silu
from ..graph.delta_net import delta_net, pair_heads, pairs_by_itself
from ..graph.delta_state import delta_net_in_place, is_in_place, read_state, write_states
from ..graph.ffn import joint_ffn, moe_ffn
from ..graph.inputs import Inputs
from ..graph.joint_sum import JointSum, lay
from ..graph.linear import linear, linears
from ..graph.nextn import nextn_block
from ..graph.norm import gated_rms_norm, l2_norm, rms_norm
from ..graph.state import GraphState, KvSpec, RecurrentSpec
from ..hparams import HParams, Metadata, load_hparams, uniform
from ..tensors import Block, TensorTable, stacked

ARCH = "qwen3next"

# a toy with sizes that are ugly on purpose: no two dimensions agree by accident
TINY = {
    "general.architecture": ARCH,
    "general.name": "toy",
    f"{ARCH}.vocab_size": 97,
    f"{ARCH}.context_length": 4096,
    f"{ARCH}.embedding_length": 64,
    f"{ARCH}.block_count": 4,
    f"{ARCH}.feed_forward_length": 48,
    f"{ARCH}.attention.head_count": 8,
    f"{ARCH}.attention.head_count_kv": 4,
    f"{ARCH}.attention.key_length": 24,
    f"{ARCH}.attention.value_length": 24,
    f"{ARCH}.attention.layer_norm_rms_epsilon": 1e-6,
    f"{ARCH}.rope.dimension_count": 6,
    f"{ARCH}.rope.freq_base": 10000000.0,
    f"{ARCH}.expert_count": 10,
    f"{ARCH}.expert_used_count": 3,
    f"{ARCH}.expert_feed_forward_length": 40,
    f"{ARCH}.expert_shared_feed_forward_length": 56,
    f"{ARCH}.ssm.conv_kernel": 4,
    f"{ARCH}.ssm.state_size": 32,
    f"{ARCH}.ssm.group_count": 2,
    f"{ARCH}.ssm.time_step_rank": 6,
    f"{ARCH}.ssm.inner_size": 192,
    f"{ARCH}.full_attention_interval": 4,
}

# what else toys can look like, as changes to TINY: rows of a multiple of 256 for K-quants, and the published model
GEOMETRY = {
    "tiny": {},
    "tiny-q": {
        "embedding_length": 256, "attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 12,
        "expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 512, "feed_forward_length": 768,
        "ssm.group_count": 4, "ssm.time_step_rank": 8, "ssm.inner_size": 256,
    },
    "qwen3-next-80b": {
        "vocab_size": 151936, "context_length": 262144, "embedding_length": 2048, "block_count": 48,
        "feed_forward_length": 5120, "attention.head_count": 16, "attention.head_count_kv": 2,
        "attention.key_length": 256, "attention.value_length": 256, "rope.dimension_count": 64,
        "expert_count": 512, "expert_used_count": 10,
        "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512,
        "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.inner_size": 4096,
    },
}  # fmt: skip


def load_arch_hparams(md: Metadata) -> HParams:
    """Read the hyperparameters; UnsupportedModelError for values this graph cannot have."""
    common = load_hparams(md)
    n_expert, n_expert_used, n_ff = common["n_expert"], common["n_expert_used"], common["n_ff"]
    if not n_expert or not n_expert_used:
        raise UnsupportedModelError(f"{ARCH} with {n_expert} experts, {n_expert_used} used: at least one of each is needed")
    hp = HParams(
        **common,
        n_ff_exp=uniform(md, "expert_feed_forward_length", default=0) or n_ff // n_expert_used,
        n_ff_shexp=md.optional("expert_shared_feed_forward_length", int, default=0) or n_ff,
        f_norm_rms_eps=md.require("attention.layer_norm_rms_epsilon", float),
        ssm_d_conv=md.require("ssm.conv_kernel", int),
        ssm_d_inner=md.require("ssm.inner_size", int),
        ssm_d_state=md.require("ssm.state_size", int),
        ssm_dt_rank=md.require("ssm.time_step_rank", int),
        ssm_n_group=md.require("ssm.group_count", int),
    )
    if hp.n_ff_exp < 1 or hp.n_ff_shexp < 1:
        raise UnsupportedModelError(
            f"expert widths {hp.n_ff_exp} and {hp.n_ff_shexp} (shared): needs expert_feed_forward_length and "
            "expert_shared_feed_forward_length, or feed_forward_length"
        )
    if hp.n_embd_head_k != hp.n_embd_head_v:
        raise UnsupportedModelError(
            f"attention.key_length {hp.n_embd_head_k} and attention.value_length {hp.n_embd_head_v} differ; "
            f"{ARCH} gates them head by head"
        )
    return hp


def load_arch_tensors(table: TensorTable, hp: HParams, load_mtp: bool = True) -> None:
    """Declare every tensor of the model; with load_mtp=False the NextN block is known but left in the file."""
    table.declare("token_embd.weight", (hp.n_embd, hp.n_vocab), role="embedding", op="get_rows")
    table.declare("output_norm.weight", (hp.n_embd,), role="norm")
    table.declare("output.weight", (hp.n_embd, hp.n_vocab), role="output", op="mul_mat", required=False)
    table.tie("output.weight", "token_embd.weight")

    for il in range(hp.n_layer):
        _declare_block(table.block(il), hp)
    for il in range(hp.n_layer, hp.n_layer_all):
        block = table.block(il, role="mtp", load=load_mtp)
        _declare_block(block, hp)
        _declare_nextn(block, hp)


def _declare_block(block: Block, hp: HParams) -> None:
    block.declare("attn_norm.weight", (hp.n_embd,), role="norm")
    block.declare("post_attention_norm.weight", (hp.n_embd,), role="norm")
    if hp.is_recr(block.il):
        _declare_linear_attention(block, hp)
    else:
        _declare_attention(block, hp)
    _declare_experts(block, hp)


def _declare_attention(block: Block, hp: HParams) -> None:
    n_embd, head_dim = hp.n_embd, hp.n_embd_head_k
    n_out = {"attn_q": 2 * head_dim * hp.n_head, "attn_k": head_dim * hp.n_head_kv, "attn_v": head_dim * hp.n_head_kv}
    n_qkv = sum(n_out.values())

    block.is_kind("attention", not_with=("ssm_conv1d.weight", "ssm_a", "ssm_in.weight", "ssm_out.weight"))
    separate = [block.decl(f"{name}.weight", (n_embd, n), role="attention", op="mul_mat") for name, n in n_out.items()]
    fused = block.decl("attn_qkv.weight", (n_embd, n_qkv), role="attention", op="mul_mat", parts=stacked(separate))
    block.declare_one_of("attention projections", separate, [fused])
    block.multiply_together(*n_out)
    for name, n in (*n_out.items(), ("attn_qkv", n_qkv)):
        block.declare(f"{name}.bias", (n,), role="bias", required=False)
    block.declare("attn_output.weight", (head_dim * hp.n_head, n_embd), role="attention", op="mul_mat")
    block.declare("attn_q_norm.weight", (head_dim,), role="norm")
    block.declare("attn_k_norm.weight", (head_dim,), role="norm")


def _declare_linear_attention(block: Block, hp: HParams) -> None:
    n_embd, head_dim, n_k_heads, n_v_heads = hp.n_embd, hp.ssm_d_state, hp.ssm_n_group, hp.ssm_dt_rank
    key_dim, value_dim = head_dim * n_k_heads, head_dim * n_v_heads
    conv_dim = 2 * key_dim + value_dim

    block.is_kind("recurrent", not_with=("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight"))
    qkv = block.decl("attn_qkv.weight", (n_embd, conv_dim), role="linear attention", op="mul_mat")
    gate = block.decl("attn_gate.weight", (n_embd, value_dim), role="linear attention", op="mul_mat")
    qkvz = block.decl(
        "ssm_in.weight", (n_embd, conv_dim + value_dim), role="linear attention", op="mul_mat",
        parts=((qkv, lambda: legacy_rows(hp)[0]), (gate, lambda: legacy_rows(hp)[1])), resplit=True,
    )  # fmt: skip
    block.declare_one_of("linear attention input projections", [qkv, gate], [qkvz])
    block.declare("ssm_conv1d.weight", (hp.ssm_d_conv, conv_dim), role="conv")
    block.declare("ssm_dt.bias", (n_v_heads,), role="gate")
    block.declare("ssm_a", (n_v_heads,), role="gate")
    block.declare("ssm_ba.weight", (n_embd, 2 * n_v_heads), role="gate", op="mul_mat")
    block.multiply_together("attn_qkv", "attn_gate", "ssm_ba")
    block.declare("ssm_norm.weight", (head_dim,), role="norm")
    block.declare("ssm_out.weight", (value_dim, n_embd), role="linear attention", op="mul_mat")


def legacy_rows(hp: HParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of `ssm_in` that make `attn_qkv` and `attn_gate`.

    `ssm_in` holds, per key head, q, k, then the value and gate rows of the r value heads that share it.
    """
    head_dim, n_k_heads = hp.ssm_d_state, hp.ssm_n_group
    r = hp.ssm_dt_rank // n_k_heads
    rows = np.arange(n_k_heads * head_dim * 2 * (1 + r)).reshape(n_k_heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([head_dim, head_dim, r * head_dim]), axis=1)
    return np.concatenate([q.ravel(), k.ravel(), v.ravel()]), z.ravel()


def _declare_experts(block: Block, hp: HParams) -> None:
    n_embd, n_expert, n_ff, n_ff_shexp = hp.n_embd, hp.n_expert, hp.n_ff_exp, hp.n_ff_shexp
    block.declare("ffn_gate_inp.weight", (n_embd, n_expert), role="router", op="mul_mat")
    separate = [
        block.decl(f"{name}.weight", (n_embd, n_ff, n_expert), role="expert", op="mul_mat_id")
        for name in ("ffn_gate_exps", "ffn_up_exps")
    ]
    fused = block.decl(
        "ffn_gate_up_exps.weight", (n_embd, 2 * n_ff, n_expert), role="expert", op="mul_mat_id", parts=stacked(separate)
    )
    block.declare_one_of("expert input projections", separate, [fused])
    block.declare("ffn_down_exps.weight", (n_ff, n_embd, n_expert), role="expert", op="mul_mat_id")

    block.declare("ffn_gate_inp_shexp.weight", (n_embd,), role="gate", op="mul_mat")
    block.declare("ffn_gate_shexp.weight", (n_embd, n_ff_shexp), role="shared expert", op="mul_mat")
    block.declare("ffn_up_shexp.weight", (n_embd, n_ff_shexp), role="shared expert", op="mul_mat")
    block.declare("ffn_down_shexp.weight", (n_ff_shexp, n_embd), role="shared expert", op="mul_mat")
    for names in (("ffn_gate_inp", "ffn_gate_inp_shexp"), ("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_shexp", "ffn_up_shexp")):
        block.multiply_together(*names)
    for gate_up in (("ffn_gate_exps", "ffn_up_exps"), ("ffn_gate_up_exps",)):
        block.lie_behind(gate_up, ("ffn_gate_shexp", "ffn_up_shexp"))
    block.lie_behind(("ffn_down_exps",), ("ffn_down_shexp",))


def _declare_nextn(block: Block, hp: HParams) -> None:
    n_embd, n_vocab = hp.n_embd, hp.n_vocab
    block.declare("nextn.eh_proj.weight", (2 * n_embd, n_embd), op="mul_mat")
    block.declare("nextn.enorm.weight", (n_embd,))
    block.declare("nextn.hnorm.weight", (n_embd,))
    block.declare("nextn.shared_head_norm.weight", (n_embd,), required=False)
    block.declare("nextn.embed_tokens.weight", (n_embd, n_vocab), op="get_rows", required=False)
    block.declare("nextn.shared_head_head.weight", (n_embd, n_vocab), op="mul_mat", required=False)

def state_specs(hp: HParams, mtp: bool = False) -> list[KvSpec | RecurrentSpec]:
    """Return what must survive between two graph runs: K and V, or the conv window "r" and the delta state "s".

    With `mtp` the NextN block's K and V too.
    """
    specs: list[KvSpec | RecurrentSpec] = []
    S, H_k, H_v = hp.ssm_d_state, hp.ssm_n_group, hp.ssm_dt_rank
    for il in range(hp.n_layer + mtp):
        if hp.is_recr(il):
            specs.append(RecurrentSpec(il, "r", (hp.ssm_d_conv - 1, S * (2 * H_k + H_v))))
            specs.append(RecurrentSpec(il, "s", (S, S, H_v), n_rows=H_v, n_ahead=-(-H_v // S)))
        else:
            specs.append(KvSpec(il, hp.n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v))
    return specs


def inputs(hp: HParams) -> dict[str, int]:
    """Return what the graph wants to know of each token beyond its id: one position."""
    return {"pos_per_token": 1}


def build_arch_graph(g: GraphBuilder, hp: HParams, w, inp: Inputs, state: GraphState) -> Tensor | None:
    """Emit the trunk for one ubatch → logits [n_vocab, n_outputs], or None when no row is wanted.

    Where the sizes ask for it, h_nextn [n_embd, n_tokens] is an output too. Mirrors `llama_model_qwen3next::graph`.
    """
    n_outputs, hidden, last = inp.sizes.n_outputs, inp.sizes.hidden, hp.n_layer - 1
    prune = g.options.prune_last and not hidden
    x = g.name(g.get_rows(w.token_embd, inp.tokens), "model.embed_tokens")  # [n_embd, n_tokens]
    g.expand(x)
    for il in range(hp.n_layer):
        wb = w.blk[il]
        residual = x
        x = g.name(rms_norm(g, x, wb.attn_norm, hp.f_norm_rms_eps, il), "attn_norm", il)
        g.expand(x)
        if hp.is_recr(il):
            x = build_layer_attn_linear(g, hp, wb, inp, state, x, il)
        else:
            x = gated_attention(g, hp, wb, inp, state.kv[il], x, il)
        if il == last and n_outputs == 0 and prune:
            return None
        if il == last and prune and n_outputs < inp.sizes.n_tokens:
            x, residual = g.get_rows(x, inp.out_ids), g.get_rows(residual, inp.out_ids)

        joint = JointSum.of(g, hp, wb, x.ne[1])
        x = lay(g, joint, g.add(x, residual), "attn_residual", il)
        normed = g.name(rms_norm(g, x, wb.post_attention_norm, hp.f_norm_rms_eps, il), "attn_post_norm", il)
        if joint:
            x = joint_ffn(g, hp, wb, normed, joint, il)
        else:
            x = g.add(g.name(moe_ffn(g, hp, wb, normed, il), "ffn_out", il), x)
        x = g.name(g.name(x, "post_moe", il), "l_out", il)
        g.end_layer(x, il)

    x = g.name(rms_norm(g, x, w.output_norm, hp.f_norm_rms_eps, -1), "h_nextn")
    if hidden:
        g.output("h_nextn", x)
    if n_outputs == 0:
        g.expand(x)
        return None
    if not g.options.prune_last or hidden and n_outputs < inp.sizes.n_tokens:
        x = g.get_rows(x, inp.out_ids)
    x = g.name(x, "result_norm")
    logits = g.name(linear(g, w.output, x), "result_output")  # [n_vocab, n_outputs]
    g.expand(logits)
    return logits


def build_arch_graph_mtp(g: GraphBuilder, hp: HParams, w, inp: Inputs, state: GraphState) -> Tensor | None:
    """Emit the NextN block for one ubatch → logits [n_vocab, n_outputs], or None when only its K and V are wanted.

    Each token comes with h_nextn of the token before it; the block's own h_nextn [n_embd, n_outputs], an output too, takes
    its place one draft further. Embedding, head and norm are the trunk's where the file has no others. Mirrors
    `llama_model_qwen3next::graph_mtp`.
    """
    il, wb = hp.n_layer, w.blk[hp.n_layer]
    x = nextn_block(g, hp, wb, wb.nextn_embed_tokens or w.token_embd, inp, state.kv[il], il)
    if x is None:
        return None
    norm, head = wb.nextn_shared_head_norm or w.output_norm, wb.nextn_shared_head_head or w.output
    x = g.name(rms_norm(g, x, norm, hp.f_norm_rms_eps, -1), "h_nextn")
    g.output("h_nextn", x)
    logits = g.name(linear(g, head, x), "result_output")
    g.expand(logits)
    return logits


def build_layer_attn_linear(
    g: GraphBuilder, hp: HParams, wb, inp: Inputs, state: GraphState, x: Tensor, il: int
) -> Tensor:
    """Mix x [n_embd, n_tokens] through convolution and gated delta rule → [n_embd, n_tokens].

    Value head h uses key head h // r. Mirrors `build_layer_attn_linear`.
    """
    S, H_k, H_v, T, n_seqs = hp.ssm_d_state, hp.ssm_n_group, hp.ssm_dt_rank, inp.sizes.n_seq_tokens, inp.sizes.n_seqs
    value_dim, conv_dim = S * H_v, S * (2 * H_k + H_v)

    mixed, z, ba = linears(g, (wb.attn_qkv, wb.attn_gate, wb.ssm_ba), x)
    mixed = g.name(g.reshape_3d(mixed, conv_dim, T, n_seqs), "linear_attn_qkv_mixed", il)
    z = g.name(z, "z", il)  # [value_dim, n_tokens]
    gate, beta = _gates(g, hp, wb, inp, g.name(ba, "linear_attn_mixed_ba", il), il)

    window, delta = state.recurrent[il, "r"], state.recurrent[il, "s"]
    columns = conv_input(g, inp, window, mixed, hp.ssm_d_conv, il)
    past = None if is_in_place(g, inp, delta, value_dim) else read_state(g, inp, delta, il)
    conv = conv_silu(g, columns, wb.ssm_conv1d, il)  # [conv_dim, T, n_seqs]
    q, k, v = _heads(g, hp, conv, il)
    if past is None:
        out = delta_net_in_place(g, inp, delta, q, k, v, gate, beta)
    else:
        out, states = delta_net(g, q, k, v, gate, beta, past, il, kept=inp.sizes.kept, pairing="interleaved")
        write_states(g, inp, delta, states, il)
    out = g.name(out, "attn_output", il)

    z = g.reshape_4d(z, S, H_v, T, n_seqs)
    out = gated_rms_norm(g, out, wb.ssm_norm, z, hp.f_norm_rms_eps, il)
    out = g.name(g.reshape_3d(out, value_dim, T, n_seqs), "final_output", il)
    out = g.name(linear(g, wb.ssm_out, out), "linear_attn_out", il)
    return g.reshape_2d(out, hp.n_embd, T * n_seqs)


def _heads(g: GraphBuilder, hp: HParams, conv: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut conv [conv_dim, T, n_seqs] into q, k and v heads [S, ·, T, n_seqs], q and k of length 1 and paired with the value heads."""
    S, H_k, H_v, eps = hp.ssm_d_state, hp.ssm_n_group, hp.ssm_dt_rank, hp.f_norm_rms_eps
    conv_dim, T, n_seqs, _ = conv.ne
    size = conv.type.row_size
    nb1, nb2, nb3 = size(S), size(conv_dim), size(conv_dim * T)
    v = g.name(g.view_4d(conv, S, H_v, T, n_seqs, nb1, nb2, nb3, 2 * H_k * nb1), "v_conv", il)
    paired = not pairs_by_itself(g, T, n_seqs, S)
    if g.options.joint_qk and g.options.delta_net == "fused":
        qk = l2_norm(g, g.view_4d(conv, S, 2 * H_k, T, n_seqs, nb1, nb2, nb3, 0), S, eps)
        qk = pair_heads(g, qk, 2 * H_v, "interleaved") if paired else qk
        H = qk.ne[1] // 2
        q = g.view_4d(qk, S, H, T, n_seqs, *qk.nb[1:], 0)
        k = g.view_4d(qk, S, H, T, n_seqs, *qk.nb[1:], H * nb1)
    else:
        q = g.name(g.view_4d(conv, S, H_k, T, n_seqs, nb1, nb2, nb3, 0), "q_conv", il)
        k = g.name(g.view_4d(conv, S, H_k, T, n_seqs, nb1, nb2, nb3, H_k * nb1), "k_conv", il)
        q, k = (pair_heads(g, x, H_v, "interleaved") if paired else x for x in (l2_norm(g, q, S, eps), l2_norm(g, k, S, eps)))
    return g.name(q, "q_conv_predelta", il), g.name(k, "k_conv_predelta", il), g.name(v, "v_conv_predelta", il)


def _gates(g: GraphBuilder, hp: HParams, wb, inp: Inputs, ba: Tensor, il: int) -> tuple[Tensor, Tensor]:
    """Return log decay and step size, both [1, H_v, T, n_seqs], of ba [2·H_v, n_tokens]: per key head [r of b | r of a]."""
    H_k, H_v, T, n_seqs = hp.ssm_n_group, hp.ssm_dt_rank, inp.sizes.n_seq_tokens, inp.sizes.n_seqs
    r = H_v // H_k
    ba = g.reshape_4d(ba, 2 * r, H_k, T, n_seqs)
    nb0, nb1, nb2, nb3 = ba.nb
    b = g.name(g.view_4d(ba, r, H_k, T, n_seqs, nb1, nb2, nb3, 0), "b", il)
    a = g.name(g.view_4d(ba, r, H_k, T, n_seqs, nb1, nb2, nb3, r * nb0), "a", il)
    if g.options.fewer_conts:
        beta, a = g.sigmoid(b), g.add(a, g.reshape_2d(wb.ssm_dt_bias, r, H_k))
        a = g.reshape_3d(a, H_v, T, n_seqs)
    else:
        beta = g.sigmoid(g.cont(b))
        a = g.add(g.cont_3d(a, H_v, T, n_seqs), wb.ssm_dt_bias)
    a = g.name(g.softplus(a), "a_softplus", il)
    gate = g.name(g.mul(a, wb.ssm_a), "gate", il)  # ssm_a is −exp(A_log)
    beta = g.reshape_4d(beta, 1, H_v, T, n_seqs)
    return g.reshape_4d(gate, 1, H_v, T, n_seqs), beta
