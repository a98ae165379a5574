"""Hyperparameters as the reference reads them, from plain metadata values (level 0); independent of the package's own reader."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rope:
    """Parameters of `ggml_rope_ext`."""

    freq_base: float
    freq_scale: float
    n_ctx_orig: int
    ext_factor: float
    attn_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class HParams:
    """What the walk reads of the hyperparameters, under upstream's names; any object with these attributes does."""

    n_layer: int
    n_layer_nextn: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_rot: int
    n_expert_used: int
    f_norm_rms_eps: float
    ssm_d_conv: int
    ssm_d_state: int
    ssm_dt_rank: int
    ssm_n_group: int
    recurrent_layers: tuple
    rope: Rope
    expert_weights_scale: float = 0.0
    f_attention_scale: float = 0.0


def hparams_from_metadata(metadata, arch="qwen3next"):
    """Read the hyperparameters from GGUF metadata (full key to plain value) the way llama.cpp does."""

    def key(name, *default):
        return metadata.get(f"{arch}.{name}", *default) if default else metadata[f"{arch}.{name}"]

    n_layer_all, n_layer_nextn = key("block_count"), key("nextn_predict_layers", 0)
    n_layer = n_layer_all - n_layer_nextn
    interval = key("full_attention_interval", 4)
    recurrent = [il < n_layer and (il + 1) % interval != 0 for il in range(n_layer_all)]
    n_embd_head = key("attention.key_length", key("embedding_length") // key("attention.head_count"))
    return HParams(
        n_layer=n_layer,
        n_layer_nextn=n_layer_nextn,
        n_head=key("attention.head_count"),
        n_head_kv=key("attention.head_count_kv", key("attention.head_count")),
        n_embd_head_k=n_embd_head,
        n_rot=key("rope.dimension_count", n_embd_head),
        n_expert_used=key("expert_used_count"),
        f_norm_rms_eps=key("attention.layer_norm_rms_epsilon"),
        ssm_d_conv=key("ssm.conv_kernel"),
        ssm_d_state=key("ssm.state_size"),
        ssm_dt_rank=key("ssm.time_step_rank"),
        ssm_n_group=key("ssm.group_count"),
        recurrent_layers=tuple(bool(x) for x in key("attention.recurrent_layers", recurrent)),
        rope=_rope_from_metadata(key),
    )


def _rope_from_metadata(key):
    kind = key("rope.scaling.type", "linear")
    factor = key("rope.scaling.factor", key("rope.scale_linear", 0.0)) or 1.0
    yarn = kind == "yarn"
    # ggml multiplies by 1 + 0.1 ln(factor) on its own; llama.cpp divides it out and puts max(1, …) in its place
    mscale = max(1.0, 1.0 + 0.1 * np.log(factor)) / (1.0 + 0.1 * np.log(factor)) if yarn else 1.0
    return Rope(
        freq_base=key("rope.freq_base", 10000.0),
        freq_scale=1.0 if kind == "none" else 1.0 / factor,
        n_ctx_orig=key("rope.scaling.original_context_length", key("context_length", 0)),
        ext_factor=1.0 if yarn else 0.0,
        attn_factor=mscale * key("rope.scaling.attn_factor", 1.0),
    )
