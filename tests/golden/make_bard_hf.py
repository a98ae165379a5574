#!/usr/bin/env python3
"""Write bard_hf.npz: what transformers' Qwen3NextForCausalLM says on the embedded model's own (dequantised) weights.

usage: make_bard_hf.py [MODEL.gguf] [OUT.npz]      needs torch 2.13, transformers 5.23, gguf, tokenizers; no test runs it

Keys: text, tokens [256], logits [256, n_vocab], mtp_logits [64, n_vocab]: row i of the latter is the MTP head at token i + 1 given the
final-norm hidden of token i. Everything float32 but the weights' values, which are exactly those of the file.
"""

import pathlib
import sys

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

HERE = pathlib.Path(__file__).parent
N_TOKENS, N_MTP = 256, 64
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = """<|im_start|>Hamlet
To be, or not to be, that is the question:
Whether 'tis nobler in the mind to suffer
The slings and arrows of outrageous fortune,
Or to take arms against a sea of troubles,
And by opposing end them. To die—to sleep,
No more; and by a sleep to say we end
The heart-ache, and the thousand natural shocks
That flesh is heir to: 'tis a consummation
Devoutly to be wish'd. To die, to sleep.
To sleep, perchance to dream—ay, there's the rub:
For in that sleep of death what dreams may come,
When we have shuffled off this mortal coil,
Must give us pause.<|im_end|>
<|im_start|>Horatio
 1603, “naïve” façade…  \t 12 + 30 = 42?<|im_end|>
<|im_start|>Hamlet
With this regard their currents turn awry
And lose the name of action.<|im_end|>
"""
PLAIN = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
}  # fmt: skip
CENTRED = {
    "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip


def main(path, out):
    reader = gguf.GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    weights = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    torch.manual_seed(0)
    config = config_of(meta)
    model = Qwen3NextForCausalLM(config).eval()
    model.load_state_dict(trunk_state(weights, config), strict=True)
    tokens = tokenizer_of(meta).encode(TEXT, add_special_tokens=False).ids[:N_TOKENS]
    assert len(tokens) == N_TOKENS, len(tokens)
    with torch.no_grad():
        ids = torch.tensor([tokens])
        logits = model(ids).logits[0].numpy()
        mtp = mtp_logits(model, weights, config, ids[:, : N_MTP + 1]).numpy()
    np.savez_compressed(out, text=TEXT, tokens=np.array(tokens, np.int32), logits=logits, mtp_logits=mtp)
    print(f"{out}: {N_TOKENS} tokens, {pathlib.Path(out).stat().st_size / 1e6:.2f} MB")


def config_of(meta):
    def key(name):
        return meta[f"qwen3next.{name}"]

    n_layer = key("block_count") - key("nextn_predict_layers")
    kinds = ["linear_attention" if r else "full_attention" for r in key("attention.recurrent_layers")]
    return Qwen3NextConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=n_layer,
        num_attention_heads=key("attention.head_count"),
        num_key_value_heads=key("attention.head_count_kv"),
        head_dim=key("attention.key_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=key("context_length"),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": key("rope.freq_base"),
            "partial_rotary_factor": key("rope.dimension_count") / key("attention.key_length"),
        },
        linear_conv_kernel_dim=key("ssm.conv_kernel"),
        linear_key_head_dim=key("ssm.state_size"),
        linear_value_head_dim=key("ssm.inner_size") // key("ssm.time_step_rank"),
        linear_num_key_heads=key("ssm.group_count"),
        linear_num_value_heads=key("ssm.time_step_rank"),
        moe_intermediate_size=key("expert_feed_forward_length"),
        shared_expert_intermediate_size=key("expert_shared_feed_forward_length"),
        num_experts=key("expert_count"),
        num_experts_per_tok=key("expert_used_count"),
        norm_topk_prob=True,
        tie_word_embeddings=False,
        layer_types=kinds[:n_layer],
        attn_implementation="eager",
    )


def trunk_state(weights, config):
    state = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"] - 1,
        "lm_head.weight": weights["output.weight"],
    }
    for il in range(config.num_hidden_layers):
        state |= {f"model.layers.{il}.{name}": x for name, x in block_state(weights, config, il).items()}
    return tensors(state)


def block_state(weights, config, il):
    """Map one block back to transformers' names: the inverse of llama.cpp's converter."""

    def get(name):
        return weights[f"blk.{il}.{name}"]

    names = {n.removeprefix(f"blk.{il}.").removesuffix(".weight") for n in weights if n.startswith(f"blk.{il}.")}
    state = {f"{PLAIN[n]}.weight": get(f"{n}.weight") for n in names & PLAIN.keys()}
    state |= {f"{CENTRED[n]}.weight": get(f"{n}.weight") - 1 for n in names & CENTRED.keys()}
    state["mlp.shared_expert_gate.weight"] = get("ffn_gate_inp_shexp.weight").reshape(1, -1)
    state["mlp.experts.gate_up_proj"] = np.concatenate([get("ffn_gate_exps.weight"), get("ffn_up_exps.weight")], axis=1)
    state["mlp.experts.down_proj"] = get("ffn_down_exps.weight")
    if "ssm_a" in names:
        H_k, S = config.linear_num_key_heads, config.linear_key_head_dim
        qkv, z = get("attn_qkv.weight"), get("attn_gate.weight")
        parts = [*np.split(qkv, [H_k * S, 2 * H_k * S]), z]
        per_head = [x.reshape(H_k, -1, config.hidden_size) for x in parts]
        state["linear_attn.in_proj_qkvz.weight"] = np.concatenate(per_head, axis=1).reshape(-1, config.hidden_size)
        state["linear_attn.conv1d.weight"] = get("ssm_conv1d.weight")[:, None, :]
        state["linear_attn.dt_bias"] = get("ssm_dt.bias")
        state["linear_attn.A_log"] = np.log(-get("ssm_a"))
    return state


def mtp_logits(model, weights, config, ids):
    """Run the NextN block, assembled from transformers' own modules, over tokens 1.. with the hiddens of tokens 0.. ."""
    il = config.num_hidden_layers
    config.layer_types = [*config.layer_types, "full_attention"]
    block = Qwen3NextDecoderLayer(config, il).eval()
    block.load_state_dict(tensors({n: x for n, x in block_state(weights, config, il).items()}), strict=True)

    def norm(name):
        module = Qwen3NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        module.weight.data = torch.tensor(weights[f"blk.{il}.nextn.{name}.weight"] - 1)
        return module

    hidden, tokens = model.model(ids).last_hidden_state[:, :-1], ids[:, 1:]
    both = torch.cat([norm("enorm")(model.model.embed_tokens(tokens)), norm("hnorm")(hidden)], dim=-1)
    x = both @ torch.tensor(weights[f"blk.{il}.nextn.eh_proj.weight"]).T
    n = x.shape[1]
    positions = torch.arange(n)[None]
    mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
    rotary = model.model.rotary_emb(x, positions)
    x = block(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
    return model.lm_head(norm("shared_head_norm")(x))[0]


def tokenizer_of(meta):
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    tokenizer.add_special_tokens([t for t, kind in zip(tokens, kinds) if kind == control])
    return tokenizer


def tensors(state):
    return {name: torch.tensor(np.ascontiguousarray(x)) for name, x in state.items()}


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0] if given else HERE.parents[1] / "qwen3next_ggml/data/bard.gguf", given[1] if given[1:] else HERE / "bard_hf.npz")
