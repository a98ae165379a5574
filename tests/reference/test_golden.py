"""The walk against transformers on the embedded model; tests/golden/make_bard_hf.py wrote the golden file."""

import dataclasses
import pathlib

import numpy as np
import pytest

from qwen3next_ggml.reference import ReferenceModel, hparams_from_metadata
from tests.kit import max_abs, read_arrays, read_metadata

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "bard_hf.npz"


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN))


@pytest.fixture(scope="module")
def bard_parts(bard):
    return hparams_from_metadata(read_metadata(bard)), read_arrays(bard)


@pytest.fixture(scope="module")
def bard_run(bard_parts, golden):
    trace = {}
    model = ReferenceModel(*bard_parts)
    return model, model.decode(golden["tokens"], trace=trace), trace


def test_trunk_equals_transformers(bard_run, golden):
    assert max_abs(bard_run[1], golden["logits"]) < 1e-4


def test_mtp_head_equals_transformers(bard_run, golden):
    model, _, trace = bard_run
    n = len(golden["mtp_logits"])
    got = model.decode_mtp(golden["tokens"][1 : n + 1], trace["h_nextn"][:n], seq="mtp")
    assert max_abs(got, golden["mtp_logits"]) < 1e-4


def _tiled(hp, weights):
    return ReferenceModel(hp, weights, head_pairing="tiled")


def _offset_norms(hp, weights):
    return ReferenceModel(hp, {n: x + 1 if n.endswith("norm.weight") and "ssm" not in n else x for n, x in weights.items()})


def _rope_over_the_head(hp, weights):
    return ReferenceModel(dataclasses.replace(hp, n_rot=hp.n_embd_head_k), weights)


def _weights_not_normalised(hp, weights):
    return ReferenceModel(dataclasses.replace(hp, expert_weights_scale=0.9), weights)


@pytest.mark.parametrize("mutate", [_tiled, _offset_norms, _rope_over_the_head, _weights_not_normalised])
def test_a_wrong_trunk_is_seen(bard_parts, golden, mutate):
    got = mutate(*bard_parts).decode(golden["tokens"][:24])
    assert max_abs(got, golden["logits"][:24]) > 100 * 1e-4


def test_a_wrong_mtp_input_is_seen(bard_run, bard_parts, golden):
    model, _, trace = bard_run
    tokens, want = golden["tokens"][1:17], golden["mtp_logits"][:16]
    before_norm = model.decode_mtp(tokens, trace["l_out-7"][:16], seq="before norm")
    assert max_abs(before_norm, want) > 100 * 1e-4
    hp, weights = bard_parts
    e, h = np.split(weights["blk.8.nextn.eh_proj.weight"], 2, axis=1)
    swapped = ReferenceModel(hp, weights | {"blk.8.nextn.eh_proj.weight": np.concatenate([h, e], axis=1)})
    assert max_abs(swapped.decode_mtp(tokens, trace["h_nextn"][:16]), want) > 100 * 1e-4
