"""The short way of a one-token step: the general way's numbers bit for bit, whatever happened before, and nothing lost on failure."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import BackendError, NonFinite, OptionError
from qwen3next_ggml.one_token import OneToken

TEXT = np.random.default_rng(5).integers(0, 97, 600).tolist()
SETTINGS = {
    "everyday": {},
    "attention in parts": {"flash_attn": False},
    "float32 cache": {"type_k": "f32", "type_v": "f32", "flash_attn": False},
    "ring": {"n_rollback": 3},
    "checkpoints": {"checkpoint_every": 5},
    "plain": {"graph": "plain"},
    "autoregressive": {"delta_net": "autoregressive"},
}


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def short_ways(monkeypatch):
    """Count the steps that went the short way."""
    taken, keep = [], OneToken.keep
    monkeypatch.setattr(OneToken, "keep", lambda self, token, seq: (taken.append(seq), keep(self, token, seq))[1])
    return taken


def general(session, token, seq=0):
    return session.decode_batch({seq: [token]})[seq]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_equals_the_general_way(model, settings, monkeypatch):
    """Over the border of 256 cells, and with the recurrent states compared at the end."""
    taken = short_ways(monkeypatch)
    with model.session(n_ctx=512, **settings) as a, model.session(n_ctx=512, **settings) as b:
        for s in (a, b):
            s.decode(TEXT[:250])
        for token in TEXT[250:270]:
            assert np.array_equal(a.decode([token]), general(b, token))
        assert len(taken) == (16 if "checkpoint_every" in settings else 20)
        assert a.history[0].tokens == b.history[0].tokens == TEXT[:270]
        assert np.array_equal(a.history[0].logits, b.history[0].logits)
        assert a.checkpoints.of(0) == b.checkpoints.of(0)
        for il in range(3):
            assert all(np.array_equal(a.state(il)[name], b.state(il)[name]) for name in ("r", "s"))


def wander(s, step):
    """Go about in the session, one-token steps by `step`, and return the logits of each."""
    out = [s.decode(TEXT[:20])]
    out += [step(s, t, 0) for t in TEXT[20:26]]
    s.rewind(n=4)
    out += [step(s, t, 0) for t in TEXT[40:43]]
    s.fork(0, dst=1)
    out += [step(s, t, seq) for t in TEXT[50:53] for seq in (0, 1)]
    s.clear(0)
    out += [step(s, t, 1) for t in TEXT[60:63]]
    out += [s.prompt(TEXT[:9])]
    s.clear(1)
    out += [step(s, t, 0) for t in TEXT[70:73]]
    with s.capture("l_out-1") as seen:
        out += [step(s, t, 0) for t in TEXT[80:83]]
    assert len(seen["l_out-1"]) == 3
    return [*out, *(step(s, t, 0) for t in TEXT[90:93])]


def both_ways(model):
    with model.session(n_ctx=256, n_seq_max=2, n_rollback=5) as a, model.session(n_ctx=256, n_seq_max=2, n_rollback=5) as b:
        short = wander(a, lambda s, token, seq: s.decode([token], seq=seq))
        return short, wander(b, general)


def test_after_going_about(model, monkeypatch):
    taken = short_ways(monkeypatch)
    short, long = both_ways(model)
    assert all(map(np.array_equal, short, long))
    # two sequences, and the holes one leaves among the cells, take the general way
    assert len(taken) == 6 + 3 + 1


def test_a_mask_that_keeps_what_was_rewound_shows(model, monkeypatch):
    """The mutation of the test above: cells beyond the cursor stay visible."""
    prepare = OneToken.prepare

    def sloppy(self, token, seq, top=0):
        n_seen = self._n_seen
        prepare(self, token, seq, top)
        self._mask[0, :n_seen] = 0

    monkeypatch.setattr(OneToken, "prepare", sloppy)
    short, long = both_ways(model)
    assert not all(map(np.array_equal, short, long))


def test_last_logits_are_the_sessions_own(model):
    """They lie in the graph until asked for: neither another sequence, another graph nor the caller's pen reaches them."""
    with model.session(n_ctx=256, n_seq_max=2) as s:
        s.decode(TEXT[:20])
        first = s.decode([TEXT[20]])
        kept = first.copy()
        first[:] = 7
        assert np.array_equal(s.prompt(TEXT[:21]), kept) and s.last_evaluated == 0
        again = s.decode([TEXT[21]]).copy()
        s.decode(TEXT[:300:30], seq=1)
        assert np.array_equal(s.prompt(TEXT[:22]), again) and s.last_evaluated == 0
        again = s.decode([TEXT[22]]).copy()
        s.graphs.drop(lambda key: True)
        assert np.array_equal(s.prompt(TEXT[:23]), again) and s.last_evaluated == 0


def test_steps_build_and_make_nothing(model):
    """One graph for 256 steps, the same input arrays in every one of them."""
    with model.session(n_ctx=512) as s:
        s.decode(TEXT[:3])
        s.decode([5])
        arrays, n_builds = s.one_token._arrays, s.n_builds
        for token in TEXT[:200]:
            s.decode([token])
        assert s.n_builds == n_builds
        assert s.one_token._arrays is arrays


def look_and_change(s, step):
    """Decode with captures and patches that come and go, one-token steps by `step` → logits of each, what was captured."""
    out, seen = [s.decode(TEXT[:9])], {}
    out += [step(s, TEXT[9], 0)]
    with s.capture("l_out-1", "attn_norm-*") as t:
        out += [step(s, token, 0) for token in TEXT[10:14]]
        with s.patch("l_out-0", lambda g, x: g.scale(x, 0.5)):
            out += [step(s, token, 0) for token in TEXT[14:17]]
        out += [step(s, TEXT[17], 0)]
        seen |= t
    out += [step(s, token, 0) for token in TEXT[18:21]]
    with s.capture("Kcur-3#0") as t:
        out += [step(s, TEXT[21], 0)]
        seen |= t
    return [*out, s.prompt(TEXT[:22])], seen


@pytest.mark.parametrize("n_rollback", [0, 2])
def test_who_looks_or_changes_takes_the_short_way_too(model, n_rollback, monkeypatch):
    taken = short_ways(monkeypatch)
    with model.session(n_ctx=256, n_rollback=n_rollback) as a, model.session(n_ctx=256, n_rollback=n_rollback) as b:
        short, seen = look_and_change(a, lambda s, token, seq: s.decode([token], seq=seq))
        assert len(taken) == 13
        long, wanted = look_and_change(b, general)
    assert all(map(np.array_equal, short, long)) and not np.array_equal(short[7], short[5])
    assert seen.keys() == wanted.keys() == {"l_out-1", "attn_norm-0", "attn_norm-1", "attn_norm-2", "attn_norm-3", "Kcur-3"}
    assert all(np.array_equal(seen[name], wanted[name]) for name in seen) and len(seen["l_out-1"]) == 8


@pytest.mark.parametrize("ring", [0, 2])
def test_interrupted_step_moves_nothing(model, ring, monkeypatch):
    with model.session(n_ctx=256, n_rollback=ring) as s:
        s.decode(TEXT[:20])
        with monkeypatch.context() as patch:
            patch.setattr(s.graphs.executor, "run", lambda *args: (_ for _ in ()).throw(BackendError("stopped")))
            with pytest.raises(BackendError, match="stopped"):
                s.decode([1])
        assert s.n_past() == 20 and s.history[0].tokens == TEXT[:20]
        if not ring:
            s.clear()
            s.decode(TEXT[:20])
        with model.session(n_ctx=256, n_rollback=ring) as fresh:
            fresh.decode(TEXT[:20])
            assert np.array_equal(s.decode([2]), fresh.decode([2]))


def test_not_a_number_is_refused(model):
    with model.session(n_ctx=256) as s:
        s.decode(TEXT[:20])
        s.memory.recurrent.states[0, "s"].all.set(np.full(s.memory.recurrent.states[0, "s"].all.nelements, np.nan, np.float32))
        with pytest.raises(NonFinite, match="sequence 0: .* layer 0"):
            s.decode([1])
        assert s.n_past() == 20
        s.clear()
        assert np.isfinite(s.decode(TEXT[:20])).all()


@pytest.mark.parametrize("tokens, seq", [([97], 0), ([-1], 0), ([True], 0), ([1], 1), ([1], -1)])
def test_odd_input_is_left_to_the_general_way(model, tokens, seq, monkeypatch):
    taken = short_ways(monkeypatch)
    with model.session(n_ctx=256) as s:
        s.decode(TEXT[:20])
        try:
            s.decode(tokens, seq=seq)
        except (OptionError, qwen3next_ggml.errors.StateError):
            assert s.n_past() == 20
        assert not taken
