"""Hyperparameters: types of keys, kinds of layers, rope, and every contradiction that is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3next_ggml import models
from qwen3next_ggml.errors import GgufError, UnsupportedModelError
from qwen3next_ggml.gguf_file import GgufFile
from qwen3next_ggml.hparams import Metadata
from qwen3next_ggml.models.qwen3next import ARCH, GEOMETRY, TINY, load_arch_hparams


def loaded(**changes):
    """Hyperparameters of TINY with changes; dots are written as __, None drops a key."""
    values = Metadata(TINY, ARCH)
    keys = TINY | {values.key(name.replace("__", ".")): value for name, value in changes.items()}
    return load_arch_hparams(Metadata({key: value for key, value in keys.items() if value is not None}, ARCH))


def refused(error=UnsupportedModelError, **changes):
    with pytest.raises(error) as caught:
        loaded(**changes)
    return str(caught.value)


def kinds(hp):
    return "".join("r" if recurrent else "a" for recurrent in hp.recurrent_layers)


def test_tiny():
    hp = loaded()
    assert (hp.n_vocab, hp.n_embd, hp.n_layer, hp.n_layer_all, hp.n_layer_nextn) == (97, 64, 4, 4, 0)
    assert (hp.n_head, hp.n_head_kv, hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot) == (8, 4, 24, 24, 6)
    assert (hp.n_expert, hp.n_expert_used, hp.n_ff_exp, hp.n_ff_shexp) == (10, 3, 40, 56)
    assert (hp.ssm_d_conv, hp.ssm_d_inner, hp.ssm_d_state, hp.ssm_dt_rank, hp.ssm_n_group) == (4, 192, 32, 6, 2)
    assert (hp.f_norm_rms_eps, hp.expert_weights_scale, hp.f_attention_scale) == (1e-6, 0.0, 0.0)
    assert kinds(hp) == "rrra" and hp.is_recr(0) and not hp.is_recr(3)
    with pytest.raises(AttributeError):
        hp.n_embd = 1


def test_the_file_says_the_same_as_its_metadata(bard):
    with GgufFile.open(bard) as file:
        md = Metadata(file.metadata, file.arch)
        assert load_arch_hparams(md) == load_arch_hparams(Metadata(dict(file.metadata), file.arch))
        assert load_arch_hparams(md).n_vocab == 2048
        hp = load_arch_hparams(md)
    assert (kinds(hp), hp.n_layer, hp.n_layer_nextn) == ("rrrarrraa", 8, 1)


def test_the_published_geometry():
    hp = loaded(**{key.replace(".", "__"): value for key, value in GEOMETRY["qwen3-next-80b"].items()})
    assert kinds(hp) == "rrra" * 12
    assert hp.ssm_dt_rank // hp.ssm_n_group == 2 and hp.n_head * hp.n_embd_head_k == 4096


# --- keys

MISSING = [
    "block_count", "context_length", "embedding_length", "attention.head_count", "attention.layer_norm_rms_epsilon", "vocab_size",
    "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count",
]  # fmt: skip


@pytest.mark.parametrize("key", MISSING)
def test_a_missing_key_is_named(key):
    assert f"qwen3next.{key} is missing" in refused(GgufError, **{key.replace(".", "__"): None})


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("embedding_length", "64", ["'64'", "str", "int"]),
        ("embedding_length", 64.0, ["float", "int"]),
        ("embedding_length", True, ["bool", "int"]),
        ("embedding_length", -64, ["-64", "count"]),
        ("embedding_length", [64], ["array of 1", "int"]),
        ("attention__layer_norm_rms_epsilon", 1, ["int", "float"]),
        ("attention__layer_norm_rms_epsilon", math.nan, ["nan", "finite"]),
        ("rope__freq_base", math.inf, ["inf", "finite"]),
        ("expert_used_count", [3, 3, 3], ["3 entries", "4 blocks"]),
        ("expert_used_count", [3, 3, "3", 3], ["[2]", "str"]),
        ("rope__scaling__type", 1, ["int", "str"]),
    ],
)
def test_a_wrong_type_is_named(key, value, words):
    text = refused(GgufError, **{key: value})
    assert all(word in text for word in [f"qwen3next.{key.replace('__', '.')}", *words]), text


def test_keys_are_prefixed_once():
    md = Metadata({"general.name": "n", "qwen3next.block_count": 4, "tokenizer.ggml.model": "gpt2"}, ARCH)
    assert md.require("block_count", int) == md.require("qwen3next.block_count", int) == 4
    assert (md.require("general.name", str), "tokenizer.ggml.model" in md, "name" in md) == ("n", True, False)
    assert md.optional("absent", int, default=None) is None
    assert md.per_layer("block_count", int, 3) == (4, 4, 4)


def test_tokens_count_rather_than_vocab_size():
    tokens = {"tokenizer__ggml__tokens": ["a", "b", "c"]}
    assert loaded(**tokens).n_vocab == loaded(**tokens, vocab_size=None).n_vocab == 3


# --- kinds of layers (C02, C04)


def flags(pattern):
    return [kind == "r" for kind in pattern]


def test_the_array_wins_over_the_interval():
    pattern = "rrrarrarrrra"
    assert kinds(loaded(block_count=12, attention__recurrent_layers=flags(pattern))) == pattern
    # mutation: without the array the interval gives another model, so the assertion above can fail
    assert kinds(loaded(block_count=12)) == "rrra" * 3 != pattern
    as_integers = [int(flag) for flag in flags(pattern)]
    assert kinds(loaded(block_count=12, attention__recurrent_layers=as_integers)) == pattern


def test_the_interval_defaults_to_4():
    assert kinds(loaded(block_count=9, full_attention_interval=None)) == "rrrarrrar"
    assert kinds(loaded(block_count=5, full_attention_interval=2)) == "rarar"
    assert kinds(loaded(full_attention_interval=1)) == "aaaa"
    assert "at least 1" in refused(full_attention_interval=0)


def test_a_zero_in_head_count_kv_means_recurrent():
    per_layer = dict(block_count=6, attention__head_count_kv=[0, 4, 0, 0, 4, 4])
    assert kinds(loaded(**per_layer)) == "rarraa" and loaded(**per_layer).n_head_kv == 4
    # without a zero it says nothing, and the array is stronger
    assert kinds(loaded(attention__head_count_kv=[4, 4, 4, 4])) == "rrra"
    assert kinds(loaded(attention__head_count_kv=[0, 4, 0, 4], attention__recurrent_layers=flags("rrra"))) == "rrra"
    assert "differs between blocks: [0, 4]" in refused(
        attention__head_count_kv=[0, 4, 0, 4], attention__recurrent_layers=flags("arra")
    )


def test_the_nextn_block_is_attention():
    for n_trunk, interval in [(4, 4), (5, 7), (6, 4)]:
        hp = loaded(block_count=n_trunk + 1, nextn_predict_layers=1, full_attention_interval=interval)
        assert (hp.n_layer, hp.n_layer_all, hp.is_recr(n_trunk)) == (n_trunk, n_trunk + 1, False)
        assert kinds(loaded(block_count=n_trunk, full_attention_interval=interval)) == kinds(hp)[:-1]
    # mutation: taken for a trunk layer it would be recurrent
    assert loaded(block_count=5).is_recr(4)


def test_arrays_that_are_refused():
    with_mtp = dict(block_count=5, nextn_predict_layers=1)
    assert kinds(loaded(**with_mtp, attention__recurrent_layers=flags("rrraa"))) == "rrraa"
    assert "block 4 is a NextN block" in refused(**with_mtp, attention__recurrent_layers=flags("rrrar"))
    for pattern in ("rrra", "rrraaa", ""):
        text = refused(GgufError, **with_mtp, attention__recurrent_layers=flags(pattern))
        assert f"{len(pattern)} entries" in text and "5 blocks" in text
    assert "[1]" in refused(GgufError, attention__recurrent_layers=[1, 2, 1, 0])
    assert "no trunk" in refused(block_count=1, nextn_predict_layers=1)


@pytest.mark.parametrize("n", [0, 513, 2**32 - 1])
def test_block_counts_that_no_model_has(n):
    assert "1 to 512" in refused(block_count=n)


# --- sizes that contradict each other (C06, C08, C24)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(ssm__time_step_rank=7, ssm__inner_size=224), ["7", "multiple", "2"]),
        (dict(ssm__inner_size=200), ["200", "6 x 32"]),
        (dict(ssm__group_count=0), ["ssm_n_group is 0"]),
        (dict(rope__dimension_count=5), ["5", "even", "24"]),
        (dict(rope__dimension_count=26), ["26", "24"]),
        (dict(rope__dimension_count=0), ["is 0"]),
        (dict(expert_count=0), ["0 experts"]),
        (dict(expert_count=None), ["0 experts"]),
        (dict(expert_used_count=0), ["0 used"]),
        (dict(expert_used_count=11), ["11", "10"]),
        (dict(expert_used_count=[3, 3, 2, 3]), ["[2, 3]"]),
        (dict(attention__head_count=6), ["6", "multiple", "4"]),
        (dict(attention__head_count_kv=0), ["n_head_kv is 0"]),
        (dict(attention__value_length=16), ["24", "16"]),
        (dict(expert_feed_forward_length=None, feed_forward_length=None), ["expert widths"]),
        (dict(vocab_size=0), ["n_vocab"]),
        (dict(rope__scaling__type="longrope"), ["longrope", "yarn"]),
        (dict(rope__scaling__factor=-2.0), ["-2.0"]),
    ],
)
def test_contradictions(changes, words):
    text = refused(**changes)
    assert all(word in text for word in words), text


def test_limits_that_are_allowed():
    assert loaded(expert_count=1, expert_used_count=1).n_expert == 1
    assert loaded(expert_used_count=10).n_expert_used == 10
    assert loaded(rope__dimension_count=24).n_rot == 24
    assert loaded(ssm__group_count=6).ssm_n_group == 6
    assert loaded(rope__dimension_count=None).n_rot == 24
    assert loaded(attention__head_count_kv=None).n_head_kv == 8
    assert loaded(attention__key_length=None, attention__value_length=None).n_embd_head_k == 64 // 8


def test_missing_expert_widths_come_from_feed_forward_length():
    hp = loaded(expert_feed_forward_length=None, expert_shared_feed_forward_length=None, feed_forward_length=50)
    assert (hp.n_ff_exp, hp.n_ff_shexp) == (50 // 3, 50)


def test_replacing_a_field_is_checked_too():
    assert replace(loaded(), n_rot=8).n_rot == 8
    with pytest.raises(UnsupportedModelError):
        replace(loaded(), n_rot=7)


# --- rope (upstream: llama_context's constructor)


def rope(**changes):
    return loaded(**{f"rope__{key}": value for key, value in changes.items()}).rope


def test_rope_without_scaling():
    r = rope()
    assert (r.freq_base, r.freq_scale, r.n_ctx_orig, r.ext_factor, r.attn_factor) == (10000000.0, 1.0, 4096, 0.0, 1.0)
    assert (r.beta_fast, r.beta_slow, r.scaling_type) == (32.0, 1.0, "linear")
    assert rope(freq_base=None).freq_base == 10000.0
    assert rope(scaling__type="none", scaling__factor=4.0).freq_scale == 1.0
    assert rope(scaling__factor=4.0).freq_scale == rope(scale_linear=4.0).freq_scale == 0.25
    assert rope(scaling__factor=0.0).freq_scale == 1.0


@pytest.mark.parametrize("factor", [4.0, 3.0, 40.0])
def test_yarn_leaves_the_magnitude_to_ggml(factor):
    """ggml multiplies by attn_factor x (1 + 0.1 ln factor); the model wants exactly that much once."""
    r = rope(scaling__type="yarn", scaling__factor=factor, scaling__original_context_length=1024, scaling__attn_factor=1.5)
    assert (r.ext_factor, r.n_ctx_orig) == (1.0, 1024)
    assert r.freq_scale == float(np.float32(1) / np.float32(factor))
    magnitude = r.attn_factor * (1 + 0.1 * math.log(factor))
    assert magnitude == pytest.approx(1.5 * (1 + 0.1 * math.log(factor)), rel=1e-6)
    # mutation: the factor itself, not divided, would be applied twice
    assert (1 + 0.1 * math.log(factor)) * magnitude != pytest.approx(1.5 * (1 + 0.1 * math.log(factor)), rel=1e-2)


def test_yarn_that_shrinks():
    assert rope(scaling__type="yarn", scaling__factor=0.5).attn_factor == pytest.approx(1 / (1 + 0.1 * math.log(0.5)), rel=1e-6)
    assert "no finite number" in refused(rope__scaling__type="yarn", rope__scaling__factor=1e-45)


# --- architectures (C12)


def test_architectures_are_found_by_file_name():
    assert models.supported() == [ARCH] and models.find("qwen3next").ARCH == ARCH


@pytest.mark.parametrize("arch", ["qwen35moe", "kimi-linear", "", "x" * 10240, r"\xff\xfe", "../toy", "__init__", "Qwen3next", "a\nb"])
def test_unknown_architectures_list_the_known(arch):
    with pytest.raises(UnsupportedModelError) as caught:
        models.find(arch)
    text = str(caught.value)
    assert "supported: qwen3next" in text and len(text) < 200 and "\n" not in text
    assert repr(arch[:40]) in text


@given(st.dictionaries(st.sampled_from(sorted(TINY)), st.one_of(st.integers(-1, 2**64), st.floats(), st.text(), st.lists(st.integers(0, 5)), st.none())))
def test_whatever_the_metadata(changes):
    values = {key: value for key, value in (TINY | changes).items() if value is not None}
    try:
        hp = load_arch_hparams(Metadata(values, ARCH))
    except (GgufError, UnsupportedModelError) as error:
        assert "Error" not in str(error)
    else:
        assert len(hp.recurrent_layers) == hp.n_layer_all and hp.n_rot <= hp.n_embd_head_k
