"""C40 and steps that stop half-way: nothing of a broken sequence reaches another one or survives its clearing, and it says what is wrong."""

from itertools import product

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import Aborted, BackendError, NonFinite, StateError
from qwen3next_ggml.ggml import Ops
from qwen3next_ggml.memory import HybridMemory
from qwen3next_ggml.memory.recurrent import RecurrentMemory
from tests.kit import apart, digest, halves, max_abs, same

TOLERANCE = 1e-4
TEXT, OTHER = np.random.default_rng(61).integers(0, 97, (2, 400)).tolist()
FORMS = list(product(("fused", "chunked"), ("plain", "lean"), (True, False)))
DIRT = {"nan": np.nan, "inf": np.inf, "0x3e": np.frombuffer(b"\x3e" * 4, np.float32)[0]}


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def options(delta_net="fused", graph="lean", flash_attn=False, **more):
    kinds = dict(delta_net=delta_net, graph=graph, flash_attn=flash_attn)
    return dict(n_ctx=512, type_k="f32", type_v="f32", n_ubatch=128) | kinds | more


def soil(session, value):
    """Fill every recurrent slot with a number, and every cell with finite garbage."""
    for state in session.memory.recurrent.states.values():
        state.all.set(np.full(state.all.nelements, value, np.float32))
    for layer in session.memory.kv.layers.values():
        for cells in (layer.k, layer.v):
            cells.memset(0x3E)


def spoil(session, seq, value=np.nan, il=1, name="s"):
    """Put one bad number into a state of a sequence."""
    memory = session.memory
    view = memory.recurrent._views[il, name][memory.recurrent.slot(seq, session.n_past(seq))]
    values = view.get()
    values[5] = value
    view.set(values)


# dirty memory


@pytest.mark.parametrize("n_rollback", [0, 3])
@pytest.mark.parametrize("delta_net, graph, flash_attn", FORMS)
def test_what_slots_held_before_does_not_show(model, delta_net, graph, flash_attn, n_rollback):
    """Before the first use of a slot, without clearing it, and between two sequences."""
    how = options(delta_net, graph, flash_attn, n_seq_max=2, n_rollback=n_rollback)
    with model.session(**how) as clean:
        want = [clean.decode(TEXT[:n], seq=seq)[0] for seq, n in ((0, 70), (0, 1), (1, 1))]
    for value in DIRT.values():
        with model.session(**how) as s:
            soil(s, value)
            for _ in range(2):
                got = [s.decode(TEXT[:n], seq=seq)[0] for seq, n in ((0, 70), (0, 1), (1, 1))]
                assert all(np.array_equal(a, b) for a, b in zip(got, want))
                s.clear(0)
                s.clear(1)
                soil(s, value)


@pytest.mark.parametrize("bug", ["nothing", "times zero"])
def test_clearing_by_less_than_zeros_is_noticed(model, monkeypatch, bug):
    """As in ik_llama.cpp #1393: NaN times zero is NaN."""
    def scale(self, seq):
        for views in self._views.values():
            view = views[self.slot(seq, 0)]
            view.set(view.get() * np.float32(0 if bug == "times zero" else 1))

    monkeypatch.setattr(RecurrentMemory, "clear", scale)
    with pytest.raises((AssertionError, NonFinite)):
        test_what_slots_held_before_does_not_show(model, "fused", "lean", False, 0)


# NaN


@pytest.mark.parametrize("delta_net, graph, flash_attn", FORMS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_number_stays_in_its_sequence(model, bad, delta_net, graph, flash_attn):
    """The sentence names sequence and layer, the others go on bit for bit, a cleared one is as new."""
    how = options(delta_net, graph, flash_attn, n_seq_max=3)
    with model.session(**how) as s, model.session(**how) as clean:
        for x in (s, clean):
            x.decode_batch({0: TEXT[:20], 1: OTHER[:30], 2: TEXT[:9]})
        spoil(s, 0, bad)
        for n in (1, 5):
            with pytest.raises(NonFinite, match="^sequence 0: .*state of layer 1$"):
                s.decode(TEXT[20 : 20 + n])
            with pytest.raises(StateError, match="sequence 0 stopped in the middle of a step.*clear it first"):
                s.decode(TEXT[20:21])
            for seq in (1, 2):
                tokens = OTHER[s.n_past(seq) : s.n_past(seq) + n]
                assert np.array_equal(s.decode(tokens, seq=seq), clean.decode(tokens, seq=seq))
            s.clear(0)
            clean.clear(0)
            assert np.array_equal(s.decode(TEXT[:70]), clean.decode(TEXT[:70]))
            spoil(s, 0, bad)


@pytest.mark.parametrize("delta_net, flash_attn", list(product(("fused", "chunked"), (True, False))))
@pytest.mark.parametrize("n", [1, 5, 60])
def test_a_bad_number_does_not_reach_others_of_its_batch(model, n, delta_net, flash_attn):
    """Masked cells take part in attention as 0·v, so what is stored in them is limited."""
    how = options(delta_net, "lean", flash_attn, n_seq_max=2)
    with model.session(**how) as s, model.session(**how) as clean:
        for x in (s, clean):
            x.decode_batch({0: TEXT[:20], 1: OTHER[:30]})
        spoil(s, 0)
        batch = {0: TEXT[20 : 20 + n], 1: OTHER[30 : 30 + n]}
        with pytest.raises(NonFinite, match="^sequence 0: .*layer 1$"):
            s.decode_batch(batch)
        want = clean.decode_batch(batch)[1]
        assert s.n_past(0) == 20 and same(halves(s, 1), halves(clean, 1))
        # its logits were computed, and are still to be had
        assert np.array_equal(s.prompt(OTHER[: 30 + n], seq=1), want) and s.last_evaluated == 0
        s.clear(0)
        clean.clear(0)
        assert np.array_equal(s.decode(TEXT[:70]), clean.decode(TEXT[:70]))


@pytest.mark.parametrize("flash_attn", [True, False])
def test_unlimited_cells_are_noticed(model, monkeypatch, flash_attn):
    monkeypatch.setattr(Ops, "clamp", lambda self, x, low, high: x)
    with pytest.raises(AssertionError):
        test_a_bad_number_does_not_reach_others_of_its_batch(model, 60, "fused", flash_attn)


@pytest.mark.parametrize("graph", ["plain", "lean"])
def test_a_bad_prompt_leaves_no_cells_behind(model, graph):
    """The NaN is in cells of ubatches whose logits nobody looked at."""
    with model.session(**options("fused", graph, n_ubatch=16)) as s, model.session(**options("fused", graph, n_ubatch=16)) as clean:
        s.decode(TEXT[:5])
        spoil(s, 0)
        with pytest.raises(NonFinite):
            s.decode(TEXT[5:200])
        s.clear()
        assert np.array_equal(s.decode(TEXT[:7]), clean.decode(TEXT[:7]))


@pytest.mark.parametrize("il, name, sentence", [(0, "r", "the state of layer 0"), (2, "s", "the state of layer 2")])
def test_the_layer_is_named(model, il, name, sentence):
    with model.session(**options()) as s:
        s.decode(TEXT[:9])
        spoil(s, 0, il=il, name=name)
        with pytest.raises(NonFinite, match=f"sequence 0: the logits are not finite; first seen in {sentence}"):
            s.decode(TEXT[9:10])


def test_a_prompt_mends_a_broken_sequence(model):
    with model.session(**options(n_seq_max=2, checkpoint_every=8)) as s, model.session(**options()) as clean:
        s.decode(TEXT[:20])
        spoil(s, 0)
        with pytest.raises(NonFinite):
            s.decode(TEXT[20:21])
        # its last logits are there, its state is not
        logits = s.prompt(TEXT[:20])
        assert s.last_evaluated == 4 and max_abs(logits, clean.decode(TEXT[:20])) < TOLERANCE
        assert apart(halves(s), halves(clean)) < TOLERANCE


# steps that stop half-way


def stopping(session, monkeypatch, error, at=0):
    """Let the session's graphs be computed, and fail from the run with index `at` on."""
    run, n_runs = session.graphs.executor.run, iter(range(10**6))

    def stopped(*args):
        run(*args)
        if next(n_runs) >= at:
            raise error

    monkeypatch.setattr(session.graphs.executor, "run", stopped)


ERRORS = [BackendError("the device is lost"), Aborted("computing was stopped"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("delta_net, graph", list(product(("fused", "chunked"), ("plain", "lean"))))
def test_without_a_ring_it_must_be_cleared(model, monkeypatch, delta_net, graph, error):
    how = options(delta_net, graph, n_seq_max=3)
    with model.session(**how) as s, model.session(**how) as clean:
        for x in (s, clean):
            x.decode_batch({0: TEXT[:20], 1: OTHER[:9]})
        with monkeypatch.context() as patch:
            stopping(s, patch, error)
            with pytest.raises(type(error)):
                s.decode(TEXT[20:21])
        assert s.n_past(0) == 20 and s.memory.kv.n_used == 29
        before = digest(s)
        refused = (
            lambda: s.decode([1]), lambda: s.decode_batch({0: [1], 1: [1]}), lambda: s.fork(0, dst=2), lambda: s.checkpoint(),
            lambda: s.rewind(n=0), lambda: s.rewind(n=1),
        )  # fmt: skip
        for call in refused:
            with pytest.raises(StateError, match="sequence 0 stopped in the middle of a step"):
                call()
            assert digest(s) == before
        assert np.array_equal(s.decode(OTHER[9:12], seq=1), clean.decode(OTHER[9:12], seq=1))
        s.clear(0)
        clean.clear(0)
        assert np.array_equal(s.decode(TEXT[:30]), clean.decode(TEXT[:30]))


@pytest.mark.parametrize("delta_net, graph", list(product(("fused", "chunked"), ("plain", "lean"))))
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 9])
def test_with_a_ring_it_survives_fewer_tokens_than_that_holds(model, monkeypatch, n, delta_net, graph):
    """A ring of 4 states: up to 3 new ones leave the present one, which is the oldest then, in place."""
    how = options(delta_net, graph, n_seq_max=2)
    with model.session(**how, n_rollback=3) as s, model.session(**how) as clean:
        s.decode(TEXT[:20])
        s.decode(OTHER[:9], seq=1)
        with monkeypatch.context() as patch:
            stopping(s, patch, Aborted("computing was stopped"))
            with pytest.raises(Aborted):
                s.decode_batch({0: TEXT[20 : 20 + n], 1: OTHER[9 : 9 + n]})
        if n > 3:
            with pytest.raises(StateError, match="stopped in the middle"):
                s.decode(TEXT[20:21])
            return
        clean.decode(TEXT[:20])
        assert s.memory.snapshots(0) == range(17 + n, 21)
        assert apart(halves(s), halves(clean)) < TOLERANCE
        s.rewind(n=3 - n)
        with pytest.raises(StateError, match="cannot go back"):
            s.rewind(n=1)
        clean.clear()
        clean.decode(TEXT[: 17 + n])
        for token in OTHER[:5]:
            assert max_abs(s.decode([token]), clean.decode([token])) < TOLERANCE
        assert apart(halves(s), halves(clean)) < TOLERANCE


def test_a_prompt_that_stops_keeps_its_checkpoints(model, monkeypatch):
    """Stopped in the fourth of five ubatches: the prompt goes on from the last checkpoint before it."""
    with model.session(**options(n_ubatch=64, checkpoint_every=50)) as s, model.session(**options()) as clean:
        with monkeypatch.context() as patch:
            stopping(s, patch, Aborted("computing was stopped"), at=3)
            with pytest.raises(Aborted):
                s.prompt(TEXT[:300])
        assert s.n_past() == 192
        logits = s.prompt(TEXT[:300])
        assert s.last_evaluated == 150 and "went back to the checkpoint at 150" in s.last_reuse
        assert max_abs(logits, clean.decode(TEXT[:300])) < TOLERANCE and apart(halves(s), halves(clean)) < TOLERANCE


def test_going_on_with_half_a_step_is_noticed(model, monkeypatch):
    monkeypatch.setattr(RecurrentMemory, "survives", lambda self, seq, n_past, n_tokens: True)
    monkeypatch.setattr(HybridMemory, "check_whole", HybridMemory.check_seq)
    with pytest.raises(AssertionError):
        test_with_a_ring_it_survives_fewer_tokens_than_that_holds(model, monkeypatch, 3, "fused", "lean")
