"""C36, checkpoints: a turn evaluates its new tokens, a divergence goes back to the nearest state kept, and the session says which."""

from itertools import product

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import history
from qwen3next_ggml.errors import ContextFull, OptionError, StateError
from qwen3next_ggml.history import Checkpoints
from qwen3next_ggml.memory.recurrent import RecurrentMemory
from tests.kit import apart, count_runs, digest, halves, max_abs

TOLERANCE = 1e-4
TEXT, OTHER = np.random.default_rng(51).integers(0, 97, (2, 600)).tolist()
PATHS = list(product(("fused", "chunked", "autoregressive"), ("plain", "lean")))


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def options(delta_net="fused", graph="lean", **more):
    return dict(n_ctx=768, type_k="f32", type_v="f32", flash_attn=False, delta_net=delta_net, graph=graph) | more


@pytest.fixture(scope="module")
def fresh(model):
    """Return what a new session holds and its last logits, given all tokens at once."""

    def after(tokens, **how):
        with model.session(**options(**how)) as s:
            logits = s.decode(tokens)
            return logits, halves(s)

    return after


def off(s, logits, fresh, tokens):
    want, held = fresh(tokens)
    assert s.n_past() == len(tokens)
    return max(max_abs(logits, want), apart(halves(s), held))


def test_turns_evaluate_what_is_new(model, fresh):
    """300 tokens, 20 generated, 30 new; then a divergence at 250."""
    with model.session(**options(checkpoint_every=64)) as s:
        s.prompt(TEXT[:300])
        assert (s.last_evaluated, s.last_reuse) == (300, "nothing was held")
        chat = TEXT[:300]
        for _ in range(20):
            chat = chat + [int(s.prompt(chat).argmax())]
            s.decode(chat[-1:])
        chat = chat + OTHER[:30]
        logits = s.prompt(chat)
        assert (s.last_evaluated, s.last_reuse) == (30, "extends the 320 tokens held")
        assert off(s, logits, fresh, chat) < TOLERANCE
        parted = TEXT[:250] + OTHER[:40]
        logits = s.prompt(parted)
        assert s.last_evaluated == len(parted) - 192
        assert s.last_reuse == "parts from the 350 tokens held after 250; went back to the checkpoint at 192"
        assert off(s, logits, fresh, parted) < TOLERANCE
        assert s.checkpoints.of(0) == [64, 128, 192, 256]


def test_without_checkpoints_it_starts_over_and_says_why(model, fresh):
    with model.session(**options()) as s:
        s.prompt(TEXT[:300])
        parted = TEXT[:250] + OTHER[:40]
        logits = s.prompt(parted)
        assert s.last_evaluated == len(parted)
        assert s.last_reuse == "parts from the 300 tokens held after 250; no state from before that is kept, so it starts over"
        assert off(s, logits, fresh, parted) < TOLERANCE


def test_the_ring_comes_before_checkpoints(model, fresh):
    with model.session(**options(checkpoint_every=64, n_rollback=8)) as s:
        s.prompt(TEXT[:200])
        logits = s.prompt(TEXT[:195] + OTHER[:5])
        assert (s.last_evaluated, s.last_reuse) == (5, "rolled back from 200 to 195")
        assert off(s, logits, fresh, TEXT[:195] + OTHER[:5]) < TOLERANCE
        # what was rolled back over is not gone back to later
        logits = s.prompt(TEXT[:196])
        assert s.last_evaluated == 1
        assert off(s, logits, fresh, TEXT[:196]) < TOLERANCE


def test_a_shorter_prompt_needs_its_last_token_again(model, fresh):
    with model.session(**options(checkpoint_every=64)) as s:
        s.prompt(TEXT[:200])
        for n, evaluated in ((200, 0), (199, 7), (128, 64), (129, 1), (64, 64)):
            logits = s.prompt(TEXT[:n])
            assert s.last_evaluated == evaluated, n
            assert off(s, logits, fresh, TEXT[:n]) < TOLERANCE


def test_a_checkpoint_by_hand_keeps_the_logits(model, fresh):
    with model.session(**options(n_seq_max=2)) as s:
        s.prompt(TEXT[:50])
        s.checkpoint()
        s.decode(TEXT[50:70])
        s.fork(0, dst=1)
        s.rewind(n=20)
        assert np.array_equal(s.prompt(TEXT[:50]), fresh(TEXT[:50])[0]) and s.last_evaluated == 0
        logits = s.prompt(TEXT[:50], seq=1)
        assert (s.last_evaluated, s.last_reuse) == (0, "parts from the 70 tokens held after 50; went back to the checkpoint at 50")
        assert np.array_equal(logits, fresh(TEXT[:50])[0]) and s.n_past(1) == 50
        assert max_abs(s.decode(OTHER[:5], seq=1), fresh(TEXT[:50] + OTHER[:5])[0]) < TOLERANCE


@pytest.mark.parametrize("delta_net, graph", PATHS)
@pytest.mark.parametrize("n_ubatch, every, n_rollback", [(512, 64, 0), (64, 40, 3), (16, 5, 3), (16, 1, 0), (7, 16, 9)], ids=str)
def test_a_checkpoint_is_the_state_at_its_token(model, delta_net, graph, n_ubatch, every, n_rollback):
    """Inside ubatches, at their ends, in the ring or not: what is copied is what a session of that length holds."""
    tokens, cuts = TEXT[:150], (3, 20, 21, 90, 150)
    how = options(delta_net, graph, n_ubatch=n_ubatch, checkpoint_every=every, n_rollback=n_rollback)
    with model.session(**how) as s, model.session(**options(graph=graph)) as one_by_one:
        at = 0
        for cut in cuts:
            s.decode(tokens[at:cut], logits="none")
            at = cut
        assert s.checkpoints.of(0) == list(range(every, 151, every))
        for n in range(150):
            one_by_one.decode([tokens[n]], logits="none")
            if (n + 1) % every == 0:
                taken = s.checkpoints.get(0, n + 1).values
                assert max(max_abs(x.reshape(-1), one_by_one.state(il)[name].reshape(-1)) for (il, name), x in taken.items()) < TOLERANCE


@pytest.mark.parametrize("delta_net, runs", [("fused", [128, 128, 44]), ("chunked", [128, 128, 44]), ("autoregressive", [1] * 300)])
def test_one_sequence_is_not_cut_at_checkpoints(model, delta_net, runs):
    with model.session(**options(delta_net, n_ubatch=128, checkpoint_every=48)) as s:
        ran = count_runs(s)
        s.decode(TEXT[:300])
        assert ran == runs and s.checkpoints.of(0) == [48, 96, 144, 192, 240, 288]
        assert len(ran) == s.n_builds or delta_net == "autoregressive"


def test_several_sequences_are_checkpointed_too(model, fresh):
    with model.session(**options(n_seq_max=3, checkpoint_every=32)) as s:
        s.decode_batch({0: TEXT[:100], 2: OTHER[:70]})
        s.decode_batch({0: TEXT[100:101], 2: OTHER[70:140]})
        assert s.checkpoints.of(0) == [32, 64, 96] and s.checkpoints.of(2) == [32, 64, 96, 128]
        logits = s.prompt(OTHER[:120], seq=2)
        assert s.last_evaluated == 120 - 96 and max_abs(logits, fresh(OTHER[:120])[0]) < TOLERANCE
        logits = s.prompt(TEXT[:101])
        assert s.last_evaluated == 0 and max_abs(logits, fresh(TEXT[:101])[0]) < TOLERANCE


# by hand, and further back than the ring


def test_further_back_than_the_ring(model, fresh):
    with model.session(**options(n_rollback=2)) as s:
        s.decode(TEXT[:50])
        assert s.checkpoint()
        s.decode(TEXT[50:120])
        ran = count_runs(s)
        s.rewind(n=40)
        assert ran == [30] and apart(halves(s), fresh(TEXT[:80])[1]) < TOLERANCE
        s.rewind(n=30)
        assert ran == [30] and apart(halves(s), fresh(TEXT[:50])[1]) < TOLERANCE
        before = digest(s)
        with pytest.raises(StateError, match="cannot go back to 49.*oldest state kept is that after 50 tokens, and there is no checkpoint before"):
            s.rewind(n=1)
        assert digest(s) == before
        assert off(s, s.decode(OTHER[:9]), fresh, TEXT[:50] + OTHER[:9]) < TOLERANCE


def test_a_checkpoint_of_nothing(model, fresh):
    with model.session(**options()) as s:
        s.checkpoint()
        s.decode(TEXT[:20])
        s.rewind(n=5)
        assert off(s, s.decode(OTHER[:3]), fresh, TEXT[:15] + OTHER[:3]) < TOLERANCE


def test_checkpoints_beyond_the_end_are_forgotten(model):
    """Going back behind a checkpoint makes it one of another text."""
    with model.session(**options(checkpoint_every=32, n_rollback=4)) as s:
        s.decode(TEXT[:130])
        s.rewind(n=3)
        assert s.checkpoints.of(0) == [32, 64, 96]
        s.decode(OTHER[:2])
        s.prompt(TEXT[:40])
        assert s.checkpoints.of(0) == [32]
        s.clear()
        assert s.checkpoints.of(0) == []
        s.prompt(OTHER[:40])
        assert s.last_evaluated == 40


def test_no_room_in_the_cells_is_refused_before_anything_is_dropped(model):
    with model.session(**options(n_ctx=256, n_seq_max=2, checkpoint_every=64)) as s:
        s.decode(TEXT[:200])
        s.fork(0, dst=1)
        s.decode(TEXT[200:250])
        before = digest(s)
        # 190 would be run from 128 on, in other cells: the fork keeps those that are shared
        with pytest.raises(ContextFull, match="62 tokens are to be run; other sequences leave 56 of 256 cells"):
            s.rewind(0, n=60)
        assert digest(s) == before


# the budget


def test_the_oldest_go_first(model):
    with model.session(**options(checkpoint_every=16, checkpoint_mib=1)) as s:
        s.decode(TEXT[:10])
        size = sum(x.nbytes for x in s.memory.snapshot(0).values())
        n_fit = (1 << 20) // size
        s.decode(TEXT[10:600])
        assert s.checkpoints.of(0) == list(range(16, 601, 16))[-n_fit:] and 5 < n_fit < 30
        assert s.checkpoints.nbytes == n_fit * size <= 1 << 20
        s.prompt(TEXT[:300])
        assert s.last_evaluated == 300


def test_no_budget_no_checkpoints(model):
    with model.session(**options(checkpoint_every=16, checkpoint_mib=0)) as s:
        s.decode(TEXT[:100])
        assert s.checkpoint() is False and s.checkpoints.of(0) == [] and s.checkpoints.nbytes == 0


def test_sizes_that_mean_nothing(model):
    for name in ("checkpoint_every", "checkpoint_mib", "n_rollback"):
        with pytest.raises(OptionError, match=f"{name} must be at least 0, got -1"):
            model.session(**options(**{name: -1}))


def test_a_fork_shares_checkpoints(model, fresh):
    """They cost nothing twice, and neither pushes the other's out of the budget."""
    with model.session(**options(n_seq_max=3, checkpoint_every=16, checkpoint_mib=1)) as s:
        s.decode(TEXT[:600])
        kept = s.checkpoints.of(0)
        nbytes = s.checkpoints.nbytes
        s.fork(0, dst=2)
        assert s.checkpoints.of(0) == s.checkpoints.of(2) == kept and s.checkpoints.nbytes == nbytes
        s.rewind(2, n=9)
        assert s.checkpoints.of(2) == kept[:-1] and s.checkpoints.of(0) == kept
        s.clear(0)
        assert s.checkpoints.of(2) == kept[:-1] and s.checkpoints.nbytes < nbytes
        logits = s.prompt(TEXT[: kept[-2]] + OTHER[:20], seq=2)
        assert s.last_evaluated == 20 and max_abs(logits, fresh(TEXT[: kept[-2]] + OTHER[:20])[0]) < TOLERANCE


# what the tests above would not let pass


def wrong_count(monkeypatch):
    """The state of one token earlier is taken for that of the mark."""
    slot_after = RecurrentMemory.slot_after
    monkeypatch.setattr(
        RecurrentMemory, "slot_after", lambda self, seq, n, t, n_tokens, marks: slot_after(self, seq, n, t - (t in marks), n_tokens, marks)
    )


def one_too_many(monkeypatch):
    """As in ik_llama.cpp #1762, seen from the other side: a checkpoint behind the divergence is taken."""
    best = Checkpoints.best
    monkeypatch.setattr(Checkpoints, "best", lambda self, seq, n_past: best(self, seq, n_past + 64))


def never_matches(monkeypatch):
    monkeypatch.setattr(Checkpoints, "best", lambda self, seq, n_past: None)


def prefix_by_length(monkeypatch):
    monkeypatch.setattr("qwen3next_ggml.session.common_prefix", lambda a, b: min(len(a), len(b)))


@pytest.mark.parametrize("bug", [one_too_many, never_matches, prefix_by_length])
def test_a_bug_is_noticed(model, fresh, monkeypatch, bug):
    assert history.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    bug(monkeypatch)
    with pytest.raises((AssertionError, StopIteration, StateError)):
        test_turns_evaluate_what_is_new(model, fresh)


def test_a_checkpoint_of_the_wrong_count_is_noticed(model, monkeypatch):
    wrong_count(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test_a_checkpoint_is_the_state_at_its_token(model, "fused", "lean", 64, 40, 3)
