"""The likeliest tokens without the rest of the row: those of the whole row, and the same text."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import stream_generate
from qwen3next_ggml.errors import NonFinite, OptionError
from qwen3next_ggml.generate import _Chooser
from qwen3next_ggml.sampler import Sampler, SamplerParams

TEXT = np.random.default_rng(3).integers(0, 97, 40).tolist()


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


@pytest.mark.parametrize("general", [False, True], ids=["short way", "general way"])
@pytest.mark.parametrize("k", [1, 2, 40, 97])
def test_they_are_those_of_the_row(model, k, general):
    with model.session(n_ctx=256, n_seq_max=2) as s, model.session(n_ctx=256) as full:
        if general:
            s.decode(TEXT, seq=1)
        s.decode(TEXT[:5]), full.decode(TEXT[:5])
        for token in TEXT[5:20]:
            ids, logits = s.decode_top(token, k)
            row = full.decode([token])[0]
            want = np.argsort(-row, kind="stable")[:k]
            assert (ids == want).all() and np.allclose(logits, row[want], atol=0 if not general else 1e-5)
        assert s.n_past() == 20 and np.allclose(s.prompt(TEXT[:20])[0], row, atol=1e-5) and s.last_evaluated == 0


def test_only_the_picked_ones_are_copied(model, monkeypatch):
    with model.session(n_ctx=256) as s:
        s.decode(TEXT[:5])
        sizes, run = [], s.graphs.executor.run
        monkeypatch.setattr(s.graphs.executor, "run", lambda built, values, outs: (sizes.append([x.size for x in outs]), run(built, values, outs))[1])
        s.decode_top(1, 40), s.decode_top(1, 1), s.decode([1])
        assert sizes == [[40, 40], [97], [97]]
        n_builds = s.n_builds
        for token in TEXT:
            s.decode_top(token, 40)
        assert s.n_builds == n_builds


def texts(model, **sampling):
    return [step.token for step in stream_generate(model, TEXT[:7], n_predict=60, **sampling)]


@pytest.mark.parametrize("sampling", [
    {"temp": 0}, {"seed": 1}, {"seed": 2, "top_k": 7, "min_p": 0.0, "top_p": 1.0}, {"seed": 3, "top_k": 500},
], ids=str)  # fmt: skip
def test_text_is_the_same(model, sampling, monkeypatch):
    asked, top = [], qwen3next_ggml.session.Session.decode_top
    monkeypatch.setattr(qwen3next_ggml.session.Session, "decode_top", lambda self, token, k, seq=0: (asked.append(k), top(self, token, k, seq=seq))[1])
    short = texts(model, **sampling)
    assert len(asked) == len(short) - 1
    monkeypatch.setattr(_Chooser, "n_enough", None)
    assert texts(model, **sampling) == short and len(asked) == len(short) - 1


def test_too_few_candidates_change_the_text(model, monkeypatch):
    """The mutation of the test above."""
    sampling = {"seed": 2, "temp": 2.0, "min_p": 0.0, "top_p": 1.0}
    want = texts(model, **sampling)
    monkeypatch.setattr(_Chooser, "n_enough", 3)
    assert texts(model, **sampling) != want


@pytest.mark.parametrize("params, n", [
    ({"temp": 0}, 1), ({}, 40), ({"top_k": 5}, 5), ({"top_k": 0}, None), ({"penalty_repeat": 1.1}, None), ({"top_n_sigma": 1.0}, None),
    ({"logit_bias": {3: 1.0}}, None), ({"samplers": "min_p;top_k"}, None), ({"samplers": "top_k;min_p"}, 40),
    ({"samplers": ""}, None), ({"temp": 0, "penalty_repeat": 1.1}, None), ({"temp": 0, "xtc_probability": 0.5}, 40),
], ids=str)  # fmt: skip
def test_when_few_are_enough(params, n):
    assert Sampler(SamplerParams(**params)).n_enough == n


@pytest.mark.parametrize("k", [0, -1, 98])
def test_outside_the_vocabulary(model, k):
    with model.session(n_ctx=256) as s:
        s.decode(TEXT[:5])
        with pytest.raises(OptionError, match=f"k is {k}, expected 1 to 97"):
            s.decode_top(1, k)
        assert s.n_past() == 5


@pytest.mark.parametrize("k", [1, 40])
def test_not_a_number_is_refused(model, k):
    with model.session(n_ctx=256) as s:
        s.decode(TEXT[:20])
        state = s.memory.recurrent.states[0, "s"].all
        state.set(np.full(state.nelements, np.nan, np.float32))
        with pytest.raises(NonFinite, match="sequence 0: .* layer 0"):
            s.decode_top(1, k)
        assert s.n_past() == 20
