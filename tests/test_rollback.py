"""C43, going back by a few tokens: afterwards the session cannot be told from one that never saw them."""

import re
from itertools import product

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import StateError
from qwen3next_ggml.memory import HybridMemory
from qwen3next_ggml.memory.kv_cache import KvCache
from qwen3next_ggml.memory.recurrent import RecurrentMemory
from tests.kit import apart, count_runs, digest, halves, max_abs, same
from tests.kit.process import ROOT

TOLERANCE = 1e-4
# llama.cpp's own graph hands an F32 cache to flash attention through F16
TOLERANCE_F16_CACHE = 2e-3
PATHS = [*product(("fused", "chunked"), ("plain", "lean"), (True, False)), ("autoregressive", "lean", True)]
FORMS = [("fused", "lean"), ("fused", "plain"), ("chunked", "lean"), ("autoregressive", "plain")]
N, K, FURTHER = 10, 8, 20
TEXT, WRONG, MORE = np.random.default_rng(31).integers(0, 97, (3, 64)).tolist()


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def options(delta_net="fused", graph="lean", flash_attn=True, **more):
    kinds = dict(delta_net=delta_net, graph=graph, flash_attn=flash_attn)
    return dict(n_ctx=256, type_k="f32", type_v="f32", n_ubatch=64) | kinds | more


def tolerance(_, graph, flash_attn):
    return TOLERANCE_F16_CACHE if (graph, flash_attn) == ("plain", True) else TOLERANCE


class Fresh:
    """Sessions that never saw a wrong token: after `right` tokens of TEXT, what they hold and the logits of MORE."""

    def __init__(self, model, path, n=FURTHER):
        self.model, self.path, self.n, self._known = model, path, n, {}

    def after(self, right):
        if right not in self._known:
            with self.model.session(**options(*self.path)) as s:
                s.decode(TEXT[:right], logits="none")
                before = halves(s)
                logits = [s.decode([token])[0] for token in MORE[: self.n]]
                self._known[right] = before, logits, halves(s)
        return self._known[right]

    def distance(self, s, right, seq=0, *, rebuild=False):
        """Return how far a session that went back to `right` tokens is off: states, cells, and logits of further steps."""
        before, logits, end = self.after(right)
        assert s.n_past(seq) == right
        off = [apart(halves(s, seq), before)]
        for token, want in zip(MORE, logits):
            if rebuild:
                s.graphs._drop_all()
            off.append(max_abs(s.decode([token], seq=seq)[0], want))
        return max(*off, apart(halves(s, seq), end))


def go_back(s, m, r, seq=0):
    """Decode N tokens, then m in one batch of which the last r are wrong, and take those back."""
    s.clear(seq)
    s.decode(TEXT[:N], seq=seq, logits="none")
    s.decode(TEXT[N : N + m - r] + WRONG[:r], seq=seq, logits="none")
    s.rewind(seq, n=r)
    return N + m - r


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_any_batch_any_depth(model, delta_net, graph, flash_attn):
    path = delta_net, graph, flash_attn
    fresh = Fresh(model, path)
    with model.session(**options(*path, n_rollback=K)) as s:
        for m in range(1, K + 1):
            for r in range(m + 1):
                off = fresh.distance(s, go_back(s, m, r))
                assert off < tolerance(*path), f"{m} tokens, {r} taken back"


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_with_every_graph_built_anew(model, delta_net, graph, flash_attn):
    path = delta_net, graph, flash_attn
    fresh = Fresh(model, path, n=4)
    with model.session(**options(*path, n_rollback=K)) as s:
        for m, r in ((1, 0), (1, 1), (5, 0), (5, 1), (5, 3), (5, 5), (K, 1), (K, K - 1), (K, K)):
            off = fresh.distance(s, go_back(s, m, r), rebuild=True)
            assert off < tolerance(*path), f"{m} tokens, {r} taken back"
        assert s.n_builds > 4 * 9


@pytest.mark.parametrize("delta_net, graph", FORMS)
@pytest.mark.parametrize("batches", [(4, 4), (1, 7), (7, 1), (1,) * K, (3, 1, 12), (12, 2)], ids=str)
def test_across_batches(model, delta_net, graph, batches):
    path = delta_net, graph, False
    fresh = Fresh(model, path, n=3)
    total = sum(batches)
    with model.session(**options(*path, n_rollback=K)) as s:
        for r in range(min(K, total) + 1):
            s.clear()
            s.decode(TEXT[:N], logits="none")
            coming = TEXT[N : N + total - r] + WRONG[:r]
            for n in batches:
                s.decode(coming[:n], logits="none")
                coming = coming[n:]
            s.rewind(n=r)
            assert fresh.distance(s, N + total - r) < TOLERANCE, f"{r} taken back"


@pytest.mark.parametrize("n_ubatch", [1, 3, 8, 9, 64])
@pytest.mark.parametrize("delta_net", ["fused", "chunked"])
def test_ubatch_borders(model, delta_net, n_ubatch):
    """One call that is cut into ubatches longer and shorter than the ring."""
    path = delta_net, "lean", False
    fresh = Fresh(model, path, n=3)
    with model.session(**options(*path, n_rollback=K, n_ubatch=n_ubatch)) as s:
        for r in range(K + 1):
            s.clear()
            s.decode(TEXT[: 20 - r] + WRONG[:r], logits="none")
            s.rewind(n=r)
            assert fresh.distance(s, 20 - r) < TOLERANCE, f"{r} taken back"


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_others_are_not_touched(model, delta_net, graph, flash_attn):
    """Three sequences in every batch, at unequal lengths; one goes back, then all of them by unequal amounts."""
    path = delta_net, graph, flash_attn
    fresh = Fresh(model, path, n=3)
    with model.session(**options(*path, n_rollback=4, n_seq_max=4)) as s:
        s.decode_batch({0: TEXT[:5], 1: TEXT[:9], 3: TEXT[:7]}, logits="none")
        s.decode_batch({0: TEXT[5:8], 1: TEXT[9:11] + WRONG[:2], 3: TEXT[7:8]}, logits="none")
        before = {seq: halves(s, seq) for seq in (0, 3)}
        s.rewind(1, n=2)
        assert fresh.distance(s, 11, 1) < tolerance(*path)
        assert all(same(halves(s, seq), before[seq]) for seq in (0, 3))
        s.decode_batch({0: WRONG[:1], 3: WRONG[:4]}, logits="none")
        s.rewind(3, n=4)
        s.rewind(0, n=1)
        assert all(same(halves(s, seq), before[seq]) for seq in (0, 3))
        assert fresh.distance(s, 8, 0) < tolerance(*path)
        assert fresh.distance(s, 8, 3) < tolerance(*path)


def test_going_back_runs_and_copies_nothing(model):
    with model.session(**options(n_rollback=4)) as s:
        s.decode(TEXT[:20], logits="none")
        states = [state.all.raw() for state in s.memory.recurrent.states.values()]
        ran = count_runs(s)
        s.rewind(n=2)
        s.rewind(n=0)
        s.rewind(n=2)
        assert ran == [] and s.n_past() == 16
        assert all(np.array_equal(x, state.all.raw()) for x, state in zip(states, s.memory.recurrent.states.values()))
        assert s.memory.kv.n_used == 16


def test_too_deep_is_refused_and_changes_nothing(model):
    with model.session(**options(n_rollback=3, n_seq_max=2)) as s:
        s.decode_batch({0: TEXT[:20], 1: WRONG[:9]})
        want = halves(s, 0), halves(s, 1)
        before = digest(s)
        for n, words in ((4, "cannot go back to 16.*after 17"), (19, "cannot go back to 1"), (21, "holds 20"), (-1, "holds 20")):
            with pytest.raises(StateError, match=words):
                s.rewind(0, n=n)
        with pytest.raises(StateError, match="sequence 2 does not exist"):
            s.rewind(2, n=1)
        assert digest(s) == before and same(halves(s, 0), want[0]) and same(halves(s, 1), want[1])
        # going back uses up what is kept: the states before the oldest do not come back
        s.rewind(0, n=2)
        s.rewind(0, n=1)
        with pytest.raises(StateError, match="cannot go back to 16"):
            s.rewind(0, n=1)
        # as far as to the start is always possible
        s.rewind(0, n=17)
        assert s.n_past() == 0 and s.memory.kv.n_used == 9
        s.decode(TEXT[:12], logits="none")
        assert Fresh(model, ("fused", "lean", True), n=3).distance(s, 12) < TOLERANCE


def test_history_grows_back(model):
    """Steps of one token fill the ring again after going back, and old states are not taken for new ones."""
    fresh = Fresh(model, ("fused", "lean", False), n=2)
    with model.session(**options(flash_attn=False, n_rollback=3)) as s:
        s.decode(TEXT[:10], logits="none")
        for at in range(10, 30):
            s.decode(WRONG[:2], logits="none")
            s.rewind(n=2)
            s.decode([TEXT[at]], logits="none")
        s.rewind(n=1)
        assert fresh.distance(s, 29) < TOLERANCE


def test_the_drawing_of_slots():
    """docs/state.md draws the ring as it is."""
    text = (ROOT / "docs" / "state.md").read_text()
    slots, counts = (re.search(rf"^{name} +([\d ]+)", text, re.MULTILINE)[1].split()[:8] for name in ("slot", "state after"))
    ring = RecurrentMemory((), 2, n_rollback=3)
    for seq, n_past in ((0, 10), (1, 6)):
        drawn = dict(zip(counts[4 * seq : 4 * seq + 4], slots[4 * seq : 4 * seq + 4]))
        assert drawn == {str(n): str(ring.slot(seq, n)) for n in range(n_past - 3, n_past + 1)}


def conv_window_stays(monkeypatch):
    """As in llama.cpp #28120: the delta state goes back, the window in front of it does not."""
    rewind = HybridMemory.rewind

    def bug(self, seq, n_past):
        views = [views for (_, name), views in self.recurrent._views.items() if name == "r"]
        newest = [view[self.recurrent.slot(seq, self.n_past[seq])].get() for view in views]
        rewind(self, seq, n_past)
        for view, values in zip(views, newest):
            view[self.recurrent.slot(seq, n_past)].set(values)

    monkeypatch.setattr(HybridMemory, "rewind", bug)


def delta_state_stays(monkeypatch):
    rewind = HybridMemory.rewind

    def bug(self, seq, n_past):
        views = [views for (_, name), views in self.recurrent._views.items() if name == "s"]
        newest = [view[self.recurrent.slot(seq, self.n_past[seq])].get() for view in views]
        rewind(self, seq, n_past)
        for view, values in zip(views, newest):
            view[self.recurrent.slot(seq, n_past)].set(values)

    monkeypatch.setattr(HybridMemory, "rewind", bug)


def ring_is_off_by_one(monkeypatch):
    slot_after = RecurrentMemory.slot_after

    def bug(self, seq, n_past, t, n_tokens, marks):
        at = slot_after(self, seq, n_past, t, n_tokens, marks)
        return at if t == n_tokens else self.slot(seq, n_past + t - 1)

    monkeypatch.setattr(RecurrentMemory, "slot_after", bug)


def cells_stay(monkeypatch):
    truncate = KvCache.truncate
    monkeypatch.setattr(KvCache, "truncate", lambda self, seq, n_past: truncate(self, seq, n_past) if n_past == 0 else None)


@pytest.mark.parametrize("bug", [conv_window_stays, delta_state_stays, ring_is_off_by_one, cells_stay])
@pytest.mark.parametrize("delta_net", ["fused", "chunked"])
def test_a_bug_is_noticed(model, monkeypatch, bug, delta_net):
    path = delta_net, "lean", False
    fresh = Fresh(model, path, n=3)
    fresh.after(12)
    with model.session(**options(*path, n_rollback=K)) as s:
        assert fresh.distance(s, go_back(s, 5, 3)) < TOLERANCE
        bug(monkeypatch)
        try:
            assert fresh.distance(s, go_back(s, 5, 3)) > 100 * TOLERANCE
        except AssertionError as error:
            assert "shapes differ" in str(error) and bug is cells_stay
