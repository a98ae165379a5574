"""The walk of a toy: file layouts, sequences, refusals, names, hyperparameters."""

import math

import numpy as np
import pytest

from qwen3next_ggml.errors import OptionError, StateError, TensorError
from qwen3next_ggml.reference import ReferenceModel, hparams_from_metadata, kit
from tests.kit import max_abs

rng = np.random.default_rng
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def toy_metadata():
    values = {
        "block_count": 3, "nextn_predict_layers": 1, "full_attention_interval": 2, "embedding_length": 12, "context_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 6, "rope.dimension_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-6, "expert_used_count": 2,
        "ssm.conv_kernel": 4, "ssm.state_size": 5, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 30,
    }  # fmt: skip
    return {f"qwen3next.{key}": value for key, value in values.items()}


def toy_weights():
    n_embd, n_vocab, n_expert, n_ff, n_ff_shexp = 12, 17, 5, 7, 9
    S, H_k, H_v, S_a, H_a, H_kv = 5, 2, 6, 6, 4, 2
    ffn = {
        "ffn_gate_inp": (n_expert, n_embd), "ffn_gate_inp_shexp": (n_embd,),
        "ffn_gate_exps": (n_expert, n_ff, n_embd), "ffn_up_exps": (n_expert, n_ff, n_embd), "ffn_down_exps": (n_expert, n_embd, n_ff),
        "ffn_gate_shexp": (n_ff_shexp, n_embd), "ffn_up_shexp": (n_ff_shexp, n_embd), "ffn_down_shexp": (n_embd, n_ff_shexp),
        "attn_norm": (n_embd,), "post_attention_norm": (n_embd,),
    }  # fmt: skip
    attention = {
        "attn_q": (2 * H_a * S_a, n_embd), "attn_k": (H_kv * S_a, n_embd), "attn_v": (H_kv * S_a, n_embd),
        "attn_output": (n_embd, H_a * S_a), "attn_q_norm": (S_a,), "attn_k_norm": (S_a,),
    }  # fmt: skip
    linear = {
        "attn_qkv": ((2 * H_k + H_v) * S, n_embd), "attn_gate": (H_v * S, n_embd), "ssm_ba": (2 * H_v, n_embd),
        "ssm_conv1d": ((2 * H_k + H_v) * S, 4), "ssm_norm": (S,), "ssm_out": (n_embd, H_v * S),
    }  # fmt: skip
    nextn = {"nextn.eh_proj": (n_embd, 2 * n_embd), "nextn.enorm": (n_embd,), "nextn.hnorm": (n_embd,)}
    shapes = {"token_embd.weight": (n_vocab, n_embd), "output_norm.weight": (n_embd,)}
    for il, parts in enumerate([linear, attention, attention | nextn]):
        shapes |= {f"blk.{il}.{name}.weight": shape for name, shape in (ffn | parts).items()}
    r = rng(5)
    weights = {name: r.normal(size=s) * 0.4 + name.endswith("norm.weight") for name, s in shapes.items()}
    return weights | {"blk.0.ssm_dt.bias": r.normal(size=H_v), "blk.0.ssm_a": -r.exponential(size=H_v)}


def toy(**changes):
    weights = toy_weights() | changes
    return ReferenceModel(hparams_from_metadata(toy_metadata()), {n: x for n, x in weights.items() if x is not None})


def legacy_ssm_in(w):
    qkv, z = w["blk.0.attn_qkv.weight"], w["blk.0.attn_gate.weight"]
    q, k, v = np.split(qkv, [10, 20])
    per_head = [x.reshape(2, -1, 12) for x in (q, k, v, z)]
    packed = np.concatenate(per_head, axis=1).reshape(-1, 12)
    return {"blk.0.attn_qkv.weight": None, "blk.0.attn_gate.weight": None, "blk.0.ssm_in.weight": packed}


def fused_qkv(w):
    parts = [f"blk.1.attn_{x}.weight" for x in "qkv"]
    return dict.fromkeys(parts) | {"blk.1.attn_qkv.weight": np.concatenate([w[p] for p in parts])}


def merged_gate_up(w):
    parts = [f"blk.1.ffn_{x}_exps.weight" for x in ("gate", "up")]
    return dict.fromkeys(parts) | {"blk.1.ffn_gate_up_exps.weight": np.concatenate([w[p] for p in parts], axis=1)}


def untied_output(w):
    return {"output.weight": w["token_embd.weight"].copy()}


def scaled_tensors(w):
    scales = np.arange(1.0, 6.0)
    return {
        "blk.1.attn_output.weight": w["blk.1.attn_output.weight"] / 8, "blk.1.attn_output.scale": np.array([8.0]),
        "blk.1.ffn_down_exps.weight": w["blk.1.ffn_down_exps.weight"] / scales[:, None, None], "blk.1.ffn_down_exps.scale": scales,
    }  # fmt: skip


@pytest.mark.parametrize("layout", [legacy_ssm_in, fused_qkv, merged_gate_up, untied_output, scaled_tensors])
def test_file_layouts_give_the_same_numbers(layout):
    changes = layout(toy_weights())
    assert max_abs(toy(**changes).decode(TOKENS), toy().decode(TOKENS)) < 1e-12
    name = next(n for n, x in changes.items() if x is not None)
    assert max_abs(toy(**changes | {name: changes[name] * 1.01}).decode(TOKENS), toy().decode(TOKENS)) > 1e-6


def test_cutting_a_sequence_changes_nothing():
    whole, cut = toy(), toy()
    want = whole.decode(TOKENS)
    got = np.concatenate([cut.decode(TOKENS[:1]), cut.decode(TOKENS[1:6]), cut.decode([]), cut.decode(TOKENS[6:])])
    assert np.array_equal(got, want)
    for il in range(2):
        assert all(np.array_equal(x, whole.state(il)[n]) for n, x in cut.state(il).items())


def test_sequences_are_apart():
    model = toy()
    want = model.decode(TOKENS, seq=0)
    model.decode([7, 7], seq=1)
    model.copy(0, 2)
    assert np.array_equal(model.decode([8], seq=0), model.decode([8], seq=2))
    model.clear(1)
    assert np.array_equal(model.decode(TOKENS, seq=1), want)


def test_state_is_settable():
    model = toy()
    model.decode(TOKENS[:5])
    saved = [model.state(il) for il in range(2)]
    want = model.decode(TOKENS[5:])
    for il, state in enumerate(saved):
        model.set_state(il, state)
    assert np.array_equal(model.decode(TOKENS[5:]), want)
    assert saved[0]["r"].shape == (50, 3) and saved[0]["s"].shape == (6, 5, 5) and saved[1]["k"].shape == (5, 2, 6)


def test_refusals_leave_the_state():
    model = toy()
    model.decode(TOKENS)
    before = model.state(0)
    with pytest.raises(OptionError, match="token 17 .* vocabulary of 17"):
        model.decode([1, 17])
    with pytest.raises(StateError, match="layer 0, sequence 0"):
        model.set_state(0, {"r": before["r"], "s": before["s"][:, :4]})
    assert all(np.array_equal(x, before[n]) for n, x in model.state(0).items())
    with pytest.raises(TensorError, match="blk.1.attn_k.weight"):
        toy(**{"blk.1.attn_k.weight": None}).decode([1])


def test_trace_names_what_llama_cpp_names():
    trace, mtp = {}, {}
    model = toy()
    logits = model.decode(TOKENS, trace=trace)
    assert np.array_equal(trace["result_output"], logits)
    assert max_abs(trace["attn_residual-0"], trace["linear_attn_out-0"] + trace["model.embed_tokens"]) == 0.0
    assert max_abs(trace["l_out-1"], trace["ffn_out-1"] + trace["attn_residual-1"]) == 0.0
    assert max_abs(trace["ffn_out-1"], trace["ffn_moe_out-1"] + trace["ffn_shexp_gated-1"]) == 0.0
    assert np.array_equal(trace["new_state-0"], model.state(0)["s"])
    assert trace["gate-0"].shape == (8, 6) and trace["gate-1"].shape == (8, 24)
    model.decode_mtp(TOKENS, trace["h_nextn"], trace=mtp)
    assert np.array_equal(mtp["mtp_concat-2"], np.concatenate([mtp["mtp_enorm-2"], mtp["mtp_hnorm-2"]], axis=1))
    assert {"mtp_eh_proj-2", "mtp_attn_out-2", "mtp_ffn_out-2", "mtp_post_ffn-2", "ffn_moe_topk-2"} <= mtp.keys()


def test_layer_kinds():
    def kinds(**changes):
        metadata = toy_metadata() | {f"qwen3next.{k.replace('__', '.')}": v for k, v in changes.items()}
        return hparams_from_metadata(metadata).recurrent_layers

    assert kinds() == (True, False, False)
    assert kinds(block_count=9, full_attention_interval=4) == (True, True, True, False, True, True, True, False, False)
    assert kinds(attention__recurrent_layers=[False, True, False]) == (False, True, False)


def test_yarn_is_transformers_definition():
    n_rot, base, factor, n_ctx_orig = 64, 1e7, 4.0, 262144
    scaling = {"type": "yarn", "factor": factor, "original_context_length": n_ctx_orig}
    metadata = toy_metadata() | {"qwen3next.rope.freq_base": base} | {f"qwen3next.rope.scaling.{k}": v for k, v in scaling.items()}
    cos, sin = kit.rope_angles(1000, hparams_from_metadata(metadata).rope, n_rot=n_rot)
    pair = np.arange(n_rot // 2)
    plain = base ** (-2 * pair / n_rot)

    def dim(turns):
        return n_rot * math.log(n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(dim(32)), math.ceil(dim(1))
    stays = 1 - np.clip((pair - low) / (high - low), 0, 1)
    theta = 1000 * (plain / factor * (1 - stays) + plain * stays)
    magnitude = 0.1 * math.log(factor) + 1
    assert 0 < stays.sum() < n_rot // 2
    assert max_abs(cos, np.cos(theta) * magnitude) < 1e-12
    assert max_abs(sin, np.sin(theta) * magnitude) < 1e-12
