"""Qwen3-Next: Gated DeltaNet and gated attention, mixture of experts, optional NextN block (level 6).

Mirrors llama.cpp's src/models/qwen3next.cpp in the same order: hyperparameters, tensors, graph. Knows shapes and names,
neither files nor devices.
"""

from __future__ import annotations

import numpy as np

from ..errors import UnsupportedModelError
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
        parts=tuple(zip((qkv, gate), legacy_rows(hp))), resplit=True,
    )  # fmt: skip
    block.declare_one_of("linear attention input projections", [qkv, gate], [qkvz])
    block.declare("ssm_conv1d.weight", (hp.ssm_d_conv, conv_dim), role="conv")
    block.declare("ssm_dt.bias", (n_v_heads,), role="gate")
    block.declare("ssm_a", (n_v_heads,), role="gate")
    block.declare("ssm_ba.weight", (n_embd, 2 * n_v_heads), role="gate", op="mul_mat")
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


def _declare_nextn(block: Block, hp: HParams) -> None:
    n_embd, n_vocab = hp.n_embd, hp.n_vocab
    block.declare("nextn.eh_proj.weight", (2 * n_embd, n_embd), op="mul_mat")
    block.declare("nextn.enorm.weight", (n_embd,))
    block.declare("nextn.hnorm.weight", (n_embd,))
    block.declare("nextn.shared_head_norm.weight", (n_embd,), required=False)
    block.declare("nextn.embed_tokens.weight", (n_embd, n_vocab), op="get_rows", required=False)
    block.declare("nextn.shared_head_head.weight", (n_embd, n_vocab), op="mul_mat", required=False)
