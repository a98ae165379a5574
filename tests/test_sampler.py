"""The sampler against a naive float64 chain, against llama.cpp's samplers in a child process, and at its edges."""

import json
import math
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3next_ggml.errors import NonFinite, OptionError
from qwen3next_ggml.sampler import Candidates, Sampler, SamplerParams
from qwen3next_ggml.sampler.filters import penalties, temperature, top_k, top_p, typ_p, xtc
from qwen3next_ggml.sampler.twister import Twister

from .kit.process import ROOT

CHILD = """
import ctypes, json, sys
import numpy as np
from llama_cpp import llama_cpp as api

def step(name, p):
    return {
        "penalties": lambda: api.llama_sampler_init_penalties(
            p["n_vocab"], p["penalty_last_n"], p["penalty_repeat"], p["penalty_freq"], p["penalty_present"]),
        "top_n_sigma": lambda: api.llama_sampler_init_top_n_sigma(p["top_n_sigma"]),
        "top_k": lambda: api.llama_sampler_init_top_k(p["top_k"]),
        "typ_p": lambda: api.llama_sampler_init_typical(p["typ_p"], p["min_keep"]),
        "top_p": lambda: api.llama_sampler_init_top_p(p["top_p"], p["min_keep"]),
        "min_p": lambda: api.llama_sampler_init_min_p(p["min_p"], p["min_keep"]),
        "xtc": lambda: api.llama_sampler_init_xtc(p["xtc_probability"], p["xtc_threshold"], p["min_keep"], p["seed"]),
        "temperature": lambda: api.llama_sampler_init_temp_ext(p["temp"], 0.0, 1.0),
        "dist": lambda: api.llama_sampler_init_dist(p["seed"]),
    }[name]()

def run(p, rows):
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    for name in (*p["chain"], "dist"):
        if name != "dry":
            api.llama_sampler_chain_add(chain, step(name, p))
    for token in p["history"]:
        api.llama_sampler_accept(chain, token)
    answer = []
    for row in rows:
        data = (api.llama_token_data * len(row))(*((i, x, 0.0) for i, x in enumerate(row)))
        array = api.llama_token_data_array(data, len(row), -1, False)
        api.llama_sampler_apply(chain, ctypes.byref(array))
        left = [(array.data[i].id, array.data[i].p) for i in range(array.size)]
        chosen = array.data[array.selected].id
        api.llama_sampler_accept(chain, chosen)
        answer.append({"left": [pair for pair in left if pair[1] > 0], "chosen": chosen})
    api.llama_sampler_free(chain)
    return answer

jobs = json.load(sys.stdin)
print(json.dumps([run(job["params"], job["rows"]) for job in jobs]))
"""


def as_job(params, seed, rows, history):
    names = ("temp", "top_k", "top_p", "min_p", "typ_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "min_keep",
             "penalty_last_n", "penalty_repeat", "penalty_freq", "penalty_present", "chain")
    values = {name: getattr(params, name) for name in names} | {"seed": seed, "history": history, "n_vocab": rows.shape[1]}
    return {"params": values, "rows": rows.tolist()}


def run_llama_samplers(jobs):
    done = subprocess.run([sys.executable, "-c", CHILD], input=json.dumps(jobs), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def naive_chain(params, logits, history=()):
    """The whole chain but xtc on (id, logit) pairs in Python floats; returns id to probability."""
    pairs = [(i, float(x)) for i, x in enumerate(logits)]

    def softmax(pairs):
        highest = max(x for _, x in pairs)
        total = math.fsum(math.exp(x - highest) for _, x in pairs)
        return [math.exp(x - highest) / total for _, x in pairs]

    def ranked(pairs):
        return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))

    def penalise(pairs):
        seen = Counter(list(history)[-params.penalty_last_n:] if params.penalty_last_n else ())
        scale = params.penalty_repeat

        def penalised(i, x):
            return (x * scale if x <= 0 else x / scale) - seen[i] * params.penalty_freq - params.penalty_present

        return [(i, penalised(i, x) if i in seen else x) for i, x in pairs]

    def keep_sigma(pairs):
        if params.top_n_sigma <= 0 or len(pairs) == 1:
            return pairs
        finite = [x for _, x in pairs if x > -math.inf]
        mean = math.fsum(finite) / len(finite)
        sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in finite) / len(finite))
        return [pair for pair in pairs if pair[1] >= max(finite) - params.top_n_sigma * sigma]

    def keep_sum(pairs, p, exceeds):
        kept, total = [], 0.0
        for pair, probability in pairs:
            kept.append(pair)
            total += probability
            if (total > p if exceeds else total >= p) and len(kept) >= params.min_keep:
                break
        return kept

    def keep_typical(pairs):
        if params.typ_p >= 1:
            return pairs
        pairs = [pair for pair, p in zip(pairs, softmax(pairs)) if p > 0]
        surprise = [-math.log(p) for p in softmax(pairs)]
        entropy = math.fsum(p * s for p, s in zip(softmax(pairs), surprise))
        order = sorted(zip(pairs, softmax(pairs), surprise), key=lambda item: abs(item[2] - entropy))
        return keep_sum([item[:2] for item in order], params.typ_p, True)

    def keep_min_p(pairs):
        pairs = ranked(pairs)
        least = pairs[0][1] + math.log(params.min_p) if params.min_p else -math.inf
        return [pair for i, pair in enumerate(pairs) if pair[1] >= least or i < params.min_keep]

    steps = {
        "penalties": penalise, "top_n_sigma": keep_sigma, "typ_p": keep_typical, "min_p": keep_min_p,
        "top_k": lambda pairs: ranked(pairs)[:params.top_k] if params.top_k > 0 else pairs,
        "top_p": lambda pairs: keep_sum(zip(ranked(pairs), softmax(ranked(pairs))), params.top_p, False) if params.top_p < 1 else pairs,
        "temperature": lambda pairs: [(i, x / params.temp) for i, x in pairs] if params.temp else ranked(pairs)[:1],
        "xtc": lambda pairs: pairs, "dry": lambda pairs: pairs,
    }
    for name in params.chain:
        pairs = steps[name](pairs)
    return {i: p for (i, _), p in zip(pairs, softmax(pairs)) if p > 0}


SETTINGS = {
    "defaults": {},
    "temperature": {"samplers": "temperature", "temp": 1.7},
    "no top_k": {"top_k": 0},
    "top_k 1": {"top_k": 1},
    "top_k past the vocabulary": {"top_k": 10**6, "top_p": 1.0, "min_p": 0.0},
    "top_p": {"samplers": "top_p", "top_p": 0.6},
    "top_p 0": {"top_p": 0.0},
    "top_p, min_keep": {"top_p": 0.1, "min_keep": 5},
    "min_p": {"samplers": "min_p", "min_p": 0.02},
    "min_p, min_keep": {"samplers": "min_p", "min_p": 0.9, "min_keep": 7},
    "typ_p": {"samplers": "typ_p", "typ_p": 0.7},
    "typ_p after top_k": {"samplers": "top_k;typ_p;temp", "typ_p": 0.3, "min_keep": 3},
    "top_n_sigma": {"samplers": "top_n_sigma;temperature", "top_n_sigma": 1.5},
    "repeat": {"penalty_repeat": 1.3, "top_k": 0, "top_p": 1.0},
    "frequency and presence": {"penalty_freq": 0.4, "penalty_present": 0.7, "penalty_last_n": 9},
    "rewarded repetition": {"penalty_repeat": 0.7, "penalty_freq": -0.2},
    "penalties after top_k": {"samplers": "top_k;penalties;temperature", "top_k": 12, "penalty_repeat": 2.0},
    "temperature first": {"samplers": "temperature;top_k;min_p;top_p", "temp": 2.0, "min_p": 0.3},
    "greedy": {"temp": 0.0},
    "greedy after penalties": {"temp": 0.0, "penalty_repeat": 1.8},
    "greedy, typical": {"temp": 0.0, "typ_p": 0.2},
    "all of them": {"penalty_repeat": 1.2, "top_n_sigma": 3.0, "typ_p": 0.9, "top_p": 0.9, "min_p": 0.01, "temp": 1.3},
}


def random_rows(n_rows, n_vocab=300, seed=4, forbidden=True):
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((n_rows, n_vocab)) * rng.uniform(0.5, 4, (n_rows, 1))).astype(np.float32)
    if forbidden:
        rows[::3, ::17] = -np.inf
    return rows


HISTORY = [5, 9, 5, 5, 120, 9, 44, 299, 0, 5, 7, 120]


def filled(params, history=HISTORY):
    sampler = Sampler(params)
    for token in history:
        sampler.accept(token)
    return sampler


@pytest.mark.parametrize("name", SETTINGS)
def test_chain_equals_the_naive_one(name):
    params = SamplerParams(seed=1, **SETTINGS[name])
    for row in random_rows(20):
        left = filled(params).candidates(row)
        probabilities = dict(zip(left.ids.tolist(), left.probabilities().tolist()))
        expected = naive_chain(params, row, HISTORY)
        assert {i for i, p in probabilities.items() if p > 0} == set(expected)
        assert max(abs(probabilities[i] - p) for i, p in expected.items()) < 1e-6


def test_chain_and_draws_equal_llama_cpps():
    seed = 1234
    cases = {name: SamplerParams(seed=seed, **options) for name, options in SETTINGS.items()}
    sometimes = {"xtc_probability": 0.5, "xtc_threshold": 0.08}
    cases["xtc"] = SamplerParams(seed=seed, samplers="top_k;xtc;temperature", **sometimes)
    always = {"xtc_probability": 1.0, "xtc_threshold": 0.05, "min_keep": 4}
    cases["xtc, min_keep"] = SamplerParams(seed=seed, samplers="top_k;xtc", top_k=6, **always)
    # llama.cpp's typical sampler adds 0 * log 0 for a forbidden token, and what it keeps then is chance
    rows = {name: random_rows(40, seed=5, forbidden=params.typ_p == 1) for name, params in cases.items()}
    answers = run_llama_samplers([as_job(params, seed, rows[name], HISTORY) for name, params in cases.items()])
    for (name, params), answer in zip(cases.items(), answers, strict=True):
        sampler, other = filled(params), filled(params)
        for row, theirs in zip(rows[name], answer, strict=True):
            left = other.candidates(row)
            ours = dict(zip(left.ids.tolist(), left.probabilities().tolist()))
            expected = dict(theirs["left"])
            assert {i for i, p in ours.items() if p > 0} == set(expected), name
            assert max(abs(ours[i] - p) for i, p in expected.items()) < 1e-5, name
            token = sampler.sample(row)
            assert token == theirs["chosen"], name
            sampler.accept(token)
            other.accept(token)


def test_full_vocabulary_draws_equal_llama_cpps():
    rows = random_rows(3, n_vocab=20_000, seed=6)
    for options in ({}, {"top_k": 0}, {"top_k": 0, "top_p": 1.0}, {"top_k": 1000, "temp": 1.5}):
        params = SamplerParams(seed=77, **options)
        (answer,) = run_llama_samplers([as_job(params, 77, rows, [])])
        sampler = Sampler(params)
        assert [sampler.sample(row) for row in rows] == [theirs["chosen"] for theirs in answer]


def test_twister_is_the_c_one():
    # the first outputs of std::mt19937 with its default seed 5489, from the standard's own test vectors
    assert Twister(5489)._bits.random_raw(2).tolist() == [3499211612, 581869302]
    assert Twister(5489).double() == (3499211612 + 581869302 * 2**32) / 2**64


@pytest.mark.parametrize("options", [
    {}, {"temp": 1.5, "top_k": 0, "top_p": 1.0}, {"penalty_repeat": 1.5}, {"top_k": 3}, {"typ_p": 0.6},
])
def test_draws_follow_the_distribution(options):
    (row,) = random_rows(1, n_vocab=40, seed=8)
    params = SamplerParams(seed=11, **options)
    sampler = filled(params, [1, 2, 3])
    n_draws = 6000
    counts = Counter(sampler.sample(row) for _ in range(n_draws))
    expected = naive_chain(params, row, [1, 2, 3])
    assert set(counts) <= set(expected)
    likely = {i: p for i, p in expected.items() if n_draws * p >= 5}
    chi2 = sum((counts[i] - n_draws * p) ** 2 / (n_draws * p) for i, p in likely.items())
    # mean and five standard deviations of a chi-square variable
    assert chi2 < len(likely) - 1 + 5 * math.sqrt(2 * len(likely))


FLOATS = st.floats(-30, 30, width=32) | st.just(-math.inf)
LOGITS = st.lists(FLOATS, min_size=1, max_size=60).filter(lambda row: max(row) > -math.inf)


@settings(max_examples=150, deadline=None)
@given(row=LOGITS, k=st.integers(-2, 70), p=st.floats(0, 1), keep=st.integers(0, 5))
def test_filters_keep_what_is_on_top(row, k, p, keep):
    whole = Candidates.of(np.array(row, np.float32))
    ranking = sorted(range(len(row)), key=lambda i: (-whole.logits[i], i))
    kept = top_k(whole, k)
    assert kept.ids.tolist() == (ranking[:k] if k > 0 else list(range(len(row))))
    nucleus = top_p(whole, p, keep)
    assert nucleus.ids.tolist() == (ranking[:len(nucleus.ids)] if p < 1 else list(range(len(row))))
    assert len(nucleus.ids) >= min(max(keep, 1), len(row))
    for c in (kept, nucleus):
        assert (c.logits == whole.logits[c.ids]).all()
    again = penalties(kept, Counter(range(0, len(row), 2)), 1.0, 0.0, 0.5)
    assert again.ids.tolist() == kept.ids.tolist()
    assert all(new == whole.logits[i] - np.float32(0 if i % 2 else 0.5) for i, new in zip(again.ids.tolist(), again.logits))


def test_greedy_takes_the_lowest_of_equals():
    row = np.array([0.0, 3.0, 3.0, -1.0, 3.0], np.float32)
    for options in ({}, {"top_k": 2}, {"samplers": "temperature"}, {"samplers": "top_p;temperature", "top_p": 0.3}):
        assert Sampler(SamplerParams(temp=0, **options)).sample(row) == 1
    assert temperature(Candidates.of(row).by_logit(), 0).ids.tolist() == [1]
    assert filled(SamplerParams(temp=0, penalty_repeat=2.0), [1]).sample(row) == 2
    assert Sampler(SamplerParams(temp=0, logit_bias={4: 0.5})).sample(row) == 4


def test_order_of_samplers_is_honoured():
    (row,) = random_rows(1, seed=9)
    sizes = [len(Sampler(SamplerParams(samplers=order, temp=3.0, min_p=0.2)).candidates(row).ids)
             for order in ("min_p;temperature", "temperature;min_p", "min_p", "")]
    assert sizes[0] == sizes[2] < sizes[1] < sizes[3] == len(row)
    # without the step called temperature, temp 0 has no effect, as in llama.cpp
    assert len(Sampler(SamplerParams(samplers="top_k", temp=0)).candidates(row).ids) == 40
    names = ("top_k", "top_p", "top_p", "temperature", "typ_p", "top_n_sigma")
    assert SamplerParams(samplers="top-k; TopP;nucleus;temp;typ;topnsigma").chain == names


def test_greedy_shortcut_does_not_jump_over_penalties():
    row = np.array([1.0, 5.0, 4.9, 4.8], np.float32)
    options = {"samplers": "top_k;penalties;temperature", "top_k": 2, "penalty_repeat": 10.0, "temp": 0}
    assert filled(SamplerParams(**options), [1, 2]).sample(row) == 1
    assert filled(SamplerParams(**options | {"top_k": 3}), [1, 2]).sample(row) == 3


def test_penalties_look_back_as_far_as_asked():
    row = np.zeros(6, np.float32) + 1
    for last_n, penalised in ((0, set()), (2, {3, 4}), (64, {1, 2, 3, 4})):
        sampler = filled(SamplerParams(penalty_last_n=last_n, penalty_present=1.0, samplers="penalties"), [1, 2, 3, 4])
        assert {i for i, x in enumerate(sampler.candidates(row).logits) if x < 1} == penalised


def test_bias_forbids_and_the_callers_logits_stay():
    (row,) = random_rows(1, seed=1)
    before = row.copy()
    best = int(row.argmax())
    sampler = filled(SamplerParams(seed=3, logit_bias={best: -math.inf, 7: 2.0}, penalty_repeat=1.2, top_n_sigma=2.0))
    assert all(sampler.sample(row) != best for _ in range(200))
    assert row.tobytes() == before.tobytes()
    assert Sampler(SamplerParams(logit_bias={7: 2.0}, samplers="")).candidates(row).logits[7] == row[7] + np.float32(2)


def test_a_sum_must_reach_top_p_and_exceed_typ_p():
    halves = Candidates.of(np.zeros(2, np.float32))
    assert top_p(halves, 0.5).ids.tolist() == [0]
    assert typ_p(halves, 0.5).ids.tolist() == [0, 1]
    assert typ_p(halves, 0.4).ids.tolist() == [0]


def test_xtc_drops_the_top_but_one():
    whole = Candidates.of(np.log(np.array([0.05, 0.4, 0.3, 0.2, 0.05], np.float32)))
    assert xtc(whole, lambda: 0.0, 0.5, 0.15).ids.tolist() == [3, 0, 4]
    assert xtc(whole, lambda: 0.9, 0.5, 0.15) is whole
    assert xtc(whole, lambda: 0.0, 0.5, 0.35).ids.tolist() == [1, 2, 3, 0, 4]
    assert xtc(whole, lambda: 0.0, 0.5, 0.15, 4).ids.tolist() == [1, 2, 3, 0, 4]


def test_seed_is_reproducible_and_reported():
    rows = random_rows(30, seed=2)
    drawn = Sampler(SamplerParams(temp=2.0))
    text = [drawn.sample(row) for row in rows]
    again = Sampler(SamplerParams(temp=2.0, seed=drawn.seed))
    assert [again.sample(row) for row in rows] == text
    drawn.reset()
    assert [drawn.sample(row) for row in rows] == text
    other = Sampler(SamplerParams(temp=2.0, seed=drawn.seed ^ 1))
    assert [other.sample(row) for row in rows] != text
    assert Sampler(SamplerParams(seed=-1)).seed != Sampler(SamplerParams(seed=0xFFFFFFFF)).seed
    assert Sampler(SamplerParams(seed=0)).seed == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row, message", [
    ([math.nan] * 5, "5 logits: 5 NaN, 0 .inf, 0 -inf"),
    ([-math.inf] * 5, "5 logits: 0 NaN, 0 .inf, 5 -inf"),
    ([0.0, math.nan, 1.0, 2.0, -math.inf], "5 logits: 1 NaN, 0 .inf, 1 -inf"),
    ([0.0, math.inf, 1.0, 2.0, 3.0], "0 NaN, 1 .inf"),
])
@pytest.mark.parametrize("options", [{}, {"temp": 0}, {"top_k": 0}, {"samplers": ""}])
def test_logits_without_a_choice_are_an_error(row, message, options):
    with pytest.raises(NonFinite, match=message):
        Sampler(SamplerParams(**options)).sample(np.array(row, np.float32))


def test_bias_that_forbids_everything_is_an_error():
    with pytest.raises(NonFinite, match="3 -inf"):
        Sampler(SamplerParams(logit_bias=dict.fromkeys(range(3), -math.inf))).sample(np.zeros(3, np.float32))
    with pytest.raises(OptionError, match="logit_bias names token 3, the vocabulary has 3 tokens"):
        Sampler(SamplerParams(logit_bias={3: 1.0})).sample(np.zeros(3, np.float32))


@pytest.mark.parametrize("options, message", [
    ({"temp": -0.1}, "temp is -0.1, expected 0 or more"),
    ({"temp": math.nan}, "temp is nan"),
    ({"temp": math.inf}, "temp is inf"),
    ({"top_p": 1.1}, "top_p is 1.1, expected 0 to 1"),
    ({"top_p": -0.1}, "top_p is -0.1"),
    ({"min_p": 2}, "min_p is 2"),
    ({"typ_p": math.nan}, "typ_p is nan"),
    ({"xtc_probability": 3}, "xtc_probability is 3"),
    ({"penalty_last_n": -1}, "penalty_last_n is -1, expected 0 or more"),
    ({"penalty_repeat": 0}, "penalty_repeat is 0, expected a finite number above 0"),
    ({"penalty_freq": math.inf}, "penalty_freq is inf, expected a finite number"),
    ({"top_n_sigma": math.nan}, "top_n_sigma is nan"),
    ({"seed": 2**32}, f"seed is {2**32}"),
    ({"logit_bias": {4: math.nan}}, "logit_bias of token 4 is nan"),
    ({"samplers": "top_k;mirostat"}, "sampler 'mirostat' is not built, built are penalties, dry, top_n_sigma, top_k"),
])
def test_bad_values_are_refused_in_one_line(options, message):
    with pytest.raises(OptionError, match=message) as caught:
        SamplerParams(**options)
    assert isinstance(caught.value, ValueError) and "\n" not in str(caught.value)


def test_large_vocabulary_costs_about_a_millisecond():
    (row,) = random_rows(1, n_vocab=151_936, seed=3)
    for options, limit_ms in (({"temp": 0}, 0.7), ({}, 2.0), ({"penalty_repeat": 1.1}, 2.0)):
        sampler = filled(SamplerParams(**options))
        best = min(_seconds(lambda: sampler.sample(row)) for _ in range(50))
        assert best * 1e3 < limit_ms, options


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
