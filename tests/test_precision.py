"""What rounding costs: the embedded model against transformers, quantised weights and caches against the reference.

The bounds are measured values with some room; each test also checks that the rounding is there, so that a bound cannot be met by accident.
"""

import pathlib

import numpy as np
import pytest

import qwen3next_ggml
from tests.kit import max_abs, nmse, read_arrays, read_metadata, reference_of, write_gguf

GOLDEN = pathlib.Path(__file__).parent / "golden" / "bard_hf.npz"
TOKENS = np.random.default_rng(13).integers(0, 97, 100).tolist()


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN))


@pytest.fixture(scope="module")
def bard_f32(bard, tmp_path_factory):
    """The embedded model, its weights dequantised: what the golden logits were made from."""
    path = tmp_path_factory.mktemp("bard") / "bard-f32.gguf"
    write_gguf(path, read_metadata(bard), read_arrays(bard))
    return path


def row_nmse(got, want):
    """Return the median over rows: where rounding turns a router's near-tie, one row is off by more and says little."""
    return float(np.median([nmse(g, w) for g, w in zip(got, want)]))


def all_logits(path, tokens, **options):
    with qwen3next_ggml.load(path, n_threads=1) as model, model.session(n_ctx=512, **options) as s:
        return s.decode(tokens, logits="all")


@pytest.mark.parametrize("graph", ["plain", "lean"])
@pytest.mark.parametrize("delta_net", ["fused", "chunked"])
def test_bard_f32_equals_transformers(bard_f32, golden, delta_net, graph):
    got = all_logits(bard_f32, golden["tokens"], type_k="f32", type_v="f32", flash_attn=False, graph=graph, delta_net=delta_net)
    assert max_abs(got, golden["logits"]) < 1e-3


@pytest.mark.parametrize("options, bound", [({}, 1e-2), ({"flash_attn": False}, 1e-2)], ids=["defaults", "flash attention off"])
def test_bard_f32_with_a_f16_cache(bard_f32, golden, options, bound):
    assert max_abs(all_logits(bard_f32, golden["tokens"], **options), golden["logits"]) < bound


def test_bard_q8_0_is_near_its_own_weights(bard, golden):
    got = all_logits(bard, golden["tokens"])
    assert 1e-6 < row_nmse(got, golden["logits"]) < 1e-4
    assert np.mean(got.argmax(-1) == golden["logits"].argmax(-1)) > 0.97


WEIGHTS = {"f16": 3e-6, "bf16": 3e-4, "q8_0": 2e-3, "q6_K": 5e-3, "q4_K": 6e-3}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_quantised_weights(toys, kind):
    """Against the same weights dequantised: what is left is the rounding of activations inside ggml's products."""
    path = toys.file(geometry="tiny-q", type=kind)
    got = all_logits(path, TOKENS, type_k="f32", type_v="f32", flash_attn=False)
    assert WEIGHTS[kind] / 10 < row_nmse(got, reference_of(path).decode(TOKENS)) < WEIGHTS[kind]


def test_quantised_weights_are_not_the_original_ones(toys):
    got = all_logits(toys.file(geometry="tiny-q", type="q4_K"), TOKENS)
    assert row_nmse(got, reference_of(toys.file(geometry="tiny-q")).decode(TOKENS)) > 2 * WEIGHTS["q4_K"]


CACHES = {("f16", True): 2e-9, ("f16", False): 3e-9, ("bf16", True): 2e-7, ("q8_0", True): 2e-6, ("q4_0", True): 3e-4}


@pytest.mark.parametrize("kind, flash_attn", CACHES)
def test_cache_types(toys, kind, flash_attn):
    path, bound = toys.file(geometry="tiny-q"), CACHES[kind, flash_attn]
    got = all_logits(path, TOKENS, type_k=kind, type_v=kind, flash_attn=flash_attn)
    assert bound / 20 < row_nmse(got, reference_of(path).decode(TOKENS)) < bound


def test_long_decode_does_not_drift(toys):
    """512 steps, one token each: the recurrent state keeps the accuracy that short prompts have."""
    path = toys.t0
    tokens = np.random.default_rng(17).integers(0, 97, 512).tolist()
    reference = reference_of(path)
    want = reference.decode(tokens)
    options = dict(n_ctx=1024, type_k="f32", type_v="f32", flash_attn=False)
    with qwen3next_ggml.load(path, n_threads=1) as model, model.session(**options) as s:
        got = np.concatenate([s.decode([token]) for token in tokens])
        assert s.n_builds == 2
        for il in range(3):
            assert max(max_abs(s.state(il)[name], x) for name, x in reference.state(il).items()) < 1e-5
    assert max_abs(got, want) < 1e-4
