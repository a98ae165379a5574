"""Metadata → frozen hyperparameters (level 3).

`Metadata` reads one key at a time by type; `HParams` carries upstream's field names and cannot exist inconsistent.
Follows llama.cpp's `load_hparams` and its context's rope set-up; knows no tensor and no architecture's own keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import GgufError, UnsupportedModelError
from .gguf_file import KeyValues

MAX_LAYERS = 512  # llama.cpp's limit; a count from a broken file must not size anything
SHARED_PREFIXES = ("general", "tokenizer", "split")
_REQUIRED = object()


class Metadata:
    """Typed reads of one model's keys; a key without a known prefix belongs to the architecture."""

    def __init__(self, values: Mapping[str, Any], arch: str):
        self.values, self.arch = values, arch

    def key(self, name: str) -> str:
        """Return the full key: `block_count` is `qwen3next.block_count`, `general.name` stays."""
        return name if name.split(".")[0] in (*SHARED_PREFIXES, self.arch) else f"{self.arch}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.values

    def require(self, name: str, kind: type) -> Any:
        """Return a value of type int (never negative), float, bool or str; GgufError when absent or of another type."""
        return self._read(name, kind, _REQUIRED)

    def optional(self, name: str, kind: type, *, default: Any) -> Any:
        """Return a value like `require`, or the default when the file has no such key."""
        return self._read(name, kind, default)

    def per_layer(self, name: str, kind: type, n_layer: int, *, default: Any = _REQUIRED) -> tuple:
        """Return one value per layer from an array of exactly n_layer, or from one value that holds for all."""
        key = self.key(name)
        if not self.is_array(name):
            return (self._read(name, kind, default),) * n_layer
        if self.length(name) != n_layer:
            raise GgufError(f"{key} has {self.length(name)} entries, expected one for each of {n_layer} blocks")
        return tuple(_typed(f"{key}[{il}]", value, kind) for il, value in enumerate(self.values[key]))

    def is_array(self, name: str) -> bool:
        """Whether the key is there and holds an array; parses it only when it is short."""
        key = self.key(name)
        if key not in self.values:
            return False
        if isinstance(self.values, KeyValues):
            return self.values.is_array(key)
        return isinstance(self.values[key], (list, tuple))

    def length(self, name: str) -> int:
        """Count an array's entries without parsing it."""
        key = self.key(name)
        return self.values.length(key) if isinstance(self.values, KeyValues) else len(self.values[key])

    def _read(self, name: str, kind: type, default: Any) -> Any:
        key = self.key(name)
        if key not in self.values:
            if default is _REQUIRED:
                raise GgufError(f"key {key} is missing, expected {kind.__name__}")
            return default
        if self.is_array(name):
            raise GgufError(f"key {key} is an array of {self.length(name)}, expected one {kind.__name__}")
        return _typed(key, self.values[key], kind)


def _typed(key: str, value: Any, kind: type) -> Any:
    # arrays of flags are written as bools or as integers, upstream reads both
    if kind is bool and type(value) is int and value in (0, 1):
        return bool(value)
    if type(value) is not kind:
        raise GgufError(f"key {key} is {value!r} of type {type(value).__name__}, expected {kind.__name__}")
    if kind is int and value < 0 or kind is float and not math.isfinite(value):
        raise GgufError(f"key {key} is {value}, expected {'a count' if kind is int else 'a finite number'}")
    return value


@dataclass(frozen=True)
class RopeParams:
    """The arguments of `rope_ext` after the position tensor, as llama.cpp hands them to ggml."""

    freq_base: float
    freq_scale: float
    n_ctx_orig: int
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float
    scaling_type: str


@dataclass(frozen=True)
class HParams:
    """Hyperparameters under upstream's names; UnsupportedModelError when they contradict each other."""

    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer_all: int
    n_layer_nextn: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int
    n_ff: int
    n_ff_exp: int
    n_ff_shexp: int
    n_expert: int
    n_expert_used: int
    f_norm_rms_eps: float
    ssm_d_conv: int
    ssm_d_inner: int
    ssm_d_state: int
    ssm_dt_rank: int
    ssm_n_group: int
    recurrent_layers: tuple[bool, ...]
    rope: RopeParams
    expert_weights_scale: float = 0.0
    f_attention_scale: float = 0.0

    @property
    def n_layer(self) -> int:
        """Blocks of the trunk; NextN blocks follow them."""
        return self.n_layer_all - self.n_layer_nextn

    def is_recr(self, il: int) -> bool:
        return self.recurrent_layers[il]

    def __post_init__(self) -> None:
        positive = ("n_vocab", "n_ctx_train", "n_embd", "n_layer", "n_head", "n_head_kv", "n_embd_head_k", "n_embd_head_v")
        for name in positive:
            _refuse(getattr(self, name) < 1, f"{name} is {getattr(self, name)}, expected at least 1")
        _refuse(self.n_head % self.n_head_kv, f"n_head {self.n_head} is not a multiple of n_head_kv {self.n_head_kv}")
        _refuse(
            self.n_rot < 2 or self.n_rot % 2 or self.n_rot > self.n_embd_head_k,
            f"rope.dimension_count is {self.n_rot}, expected an even number from 2 to the head width {self.n_embd_head_k}",
        )
        _refuse(
            self.n_expert_used > self.n_expert,
            f"expert_used_count is {self.n_expert_used}, more than expert_count {self.n_expert}",
        )
        _refuse(
            len(self.recurrent_layers) != self.n_layer_all,
            f"{len(self.recurrent_layers)} layer kinds for {self.n_layer_all} blocks",
        )
        for il in range(self.n_layer, self.n_layer_all):
            _refuse(self.recurrent_layers[il], f"block {il} is a NextN block and marked recurrent; it is always full attention")
        if any(self.recurrent_layers):
            self._check_recurrent()

    def _check_recurrent(self) -> None:
        for name in ("ssm_d_conv", "ssm_d_inner", "ssm_d_state", "ssm_dt_rank", "ssm_n_group"):
            _refuse(getattr(self, name) < 1, f"{name} is {getattr(self, name)}, expected at least 1")
        _refuse(
            self.ssm_dt_rank % self.ssm_n_group,
            f"ssm.time_step_rank (value heads) {self.ssm_dt_rank} is not a multiple of "
            f"ssm.group_count (key heads) {self.ssm_n_group}",
        )
        _refuse(
            self.ssm_d_inner != self.ssm_dt_rank * self.ssm_d_state,
            f"ssm.inner_size is {self.ssm_d_inner}, expected ssm.time_step_rank x ssm.state_size "
            f"= {self.ssm_dt_rank} x {self.ssm_d_state}",
        )


def _refuse(condition: Any, sentence: str) -> None:
    if condition:
        raise UnsupportedModelError(sentence)


def n_blocks(md: Metadata) -> tuple[int, int]:
    """Return (all blocks, NextN blocks among them)."""
    n_layer_all = md.require("block_count", int)
    n_layer_nextn = md.optional("nextn_predict_layers", int, default=0)
    _refuse(not 1 <= n_layer_all <= MAX_LAYERS, f"block_count is {n_layer_all}, expected 1 to {MAX_LAYERS}")
    _refuse(
        n_layer_nextn >= n_layer_all,
        f"nextn_predict_layers is {n_layer_nextn} of {n_layer_all} blocks, which leaves no trunk",
    )
    return n_layer_all, n_layer_nextn


def layer_kinds(md: Metadata) -> tuple[bool, ...]:
    """Say for each block whether it is recurrent.

    The array `attention.recurrent_layers` decides; else the zeros of a per-layer `attention.head_count_kv`; else
    `full_attention_interval`, 4 when absent, under which NextN blocks are never recurrent.
    """
    n_layer_all, n_layer_nextn = n_blocks(md)
    if "attention.recurrent_layers" in md:
        return md.per_layer("attention.recurrent_layers", bool, n_layer_all)
    if md.is_array("attention.head_count_kv"):
        n_head_kv = md.per_layer("attention.head_count_kv", int, n_layer_all)
        if 0 in n_head_kv:
            return tuple(n == 0 for n in n_head_kv)
    interval = md.optional("full_attention_interval", int, default=4)
    _refuse(interval < 1, f"full_attention_interval is {interval}, expected at least 1")
    return tuple(il < n_layer_all - n_layer_nextn and (il + 1) % interval != 0 for il in range(n_layer_all))


def uniform(md: Metadata, name: str, *, among: list[int] | None = None, default: Any = _REQUIRED) -> int:
    """Return the one value that a count has in all blocks, or in those of `among`."""
    values = md.per_layer(name, int, n_blocks(md)[0], default=default)
    distinct = {values[il] for il in (range(len(values)) if among is None else among)} or {max(values)}
    _refuse(len(distinct) > 1, f"{md.key(name)} differs between blocks: {sorted(distinct)}; one value is supported")
    return distinct.pop()


def vocabulary_size(md: Metadata) -> int:
    """Count the file's tokens; a file without a tokenizer says `vocab_size`."""
    if md.is_array("tokenizer.ggml.tokens"):
        return md.length("tokenizer.ggml.tokens")
    return md.require("vocab_size", int)


def load_hparams(md: Metadata) -> dict[str, Any]:
    """Read what every architecture has, as keyword arguments of `HParams` (llama_model_base::load_hparams)."""
    n_layer_all, n_layer_nextn = n_blocks(md)
    recurrent_layers = layer_kinds(md)
    attention_layers = [il for il, recurrent in enumerate(recurrent_layers) if not recurrent]
    n_embd, n_ctx_train = md.require("embedding_length", int), md.require("context_length", int)
    n_head = uniform(md, "attention.head_count", among=attention_layers)
    head_width = n_embd // n_head if n_head else 0
    n_embd_head_k = md.optional("attention.key_length", int, default=head_width)
    return dict(
        n_vocab=vocabulary_size(md),
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_layer_all=n_layer_all,
        n_layer_nextn=n_layer_nextn,
        n_head=n_head,
        n_head_kv=uniform(md, "attention.head_count_kv", among=attention_layers, default=n_head),
        n_embd_head_k=n_embd_head_k,
        n_embd_head_v=md.optional("attention.value_length", int, default=head_width),
        n_rot=md.optional("rope.dimension_count", int, default=n_embd_head_k),
        n_ff=uniform(md, "feed_forward_length", default=0),
        n_expert=md.optional("expert_count", int, default=0),
        n_expert_used=uniform(md, "expert_used_count", default=0),
        recurrent_layers=recurrent_layers,
        rope=load_rope(md, n_ctx_train),
    )


def load_rope(md: Metadata, n_ctx_train: int) -> RopeParams:
    """Compute the rope arguments as llama.cpp does, in float32: scaling none, linear or yarn.

    With yarn ggml multiplies by 1 + 0.1 ln(factor) itself, so the factor handed to it is divided by that.
    Upstream reads no `yarn_*` key for this family: the betas are 32 and 1.
    """
    scaling_type = md.optional("rope.scaling.type", str, default="linear")
    supported = ("none", "linear", "yarn")
    _refuse(scaling_type not in supported, f"rope.scaling.type is {scaling_type[:40]!r}, supported: {', '.join(supported)}")
    factor = md.optional("rope.scaling.factor", float, default=md.optional("rope.scale_linear", float, default=0.0))
    freq_base = md.optional("rope.freq_base", float, default=10000.0)
    _refuse(factor < 0 or freq_base <= 0, f"rope.scaling.factor {factor} and rope.freq_base {freq_base} must be positive")

    f32 = np.float32
    with np.errstate(all="ignore"):
        freq_scale = f32(1) if factor == 0 or scaling_type == "none" else f32(1) / f32(factor)
        attn_factor = f32(1)
        if scaling_type == "yarn":
            log_factor = np.log(f32(1) / freq_scale)
            mscale = f32(1) + f32(0.1) * log_factor
            attn_factor = (mscale if log_factor > 0 else f32(1)) * (f32(1) / mscale)
        attn_factor *= f32(md.optional("rope.scaling.attn_factor", float, default=1.0))
    _refuse(not np.isfinite([freq_scale, attn_factor]).all(), f"rope.scaling.factor {factor} scales by no finite number")
    return RopeParams(
        freq_base=freq_base,
        freq_scale=float(freq_scale),
        n_ctx_orig=md.optional("rope.scaling.original_context_length", int, default=n_ctx_train) or n_ctx_train,
        ext_factor=1.0 if scaling_type == "yarn" else 0.0,
        attn_factor=float(attn_factor),
        beta_fast=32.0,
        beta_slow=1.0,
        scaling_type=scaling_type,
    )
