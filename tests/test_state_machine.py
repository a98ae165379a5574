"""Whatever is done to a session in whatever order, each sequence is what a fresh session would hold of its tokens."""

import tempfile
from functools import lru_cache
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import qwen3next_ggml
from qwen3next_ggml.errors import ContextFull, StateError
from qwen3next_ggml.memory.kv_cache import KvCache
from qwen3next_ggml.memory.recurrent import RecurrentMemory
from tests.kit import apart, digest, halves, max_abs

TOLERANCE = 1e-4
# llama.cpp's own graph hands an F32 cache to flash attention through F16
TOLERANCE_F16_CACHE = 2e-3
N_SEQS, LONGEST, N_CTX = 3, 60, 256
SETTINGS = hypothesis.settings(
    max_examples=hypothesis.settings().max_examples // 4, stateful_step_count=20, deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip

seqs = st.integers(0, N_SEQS - 1)
some_tokens = st.lists(st.integers(0, 5), min_size=1, max_size=12)  # few, so that texts meet again


class Truth:
    """What sessions that do nothing else hold of a text, and the logits after it."""

    def __init__(self, model):
        self.model, self.sessions = model, {}
        self.of = lru_cache(maxsize=500)(self._of)

    def _of(self, form, tokens):
        if form not in self.sessions:
            self.sessions[form] = self.model.session(**options(form))
        s = self.sessions[form]
        s.clear()
        return s.decode(tokens)[0], halves(s)


def options(form, **more):
    delta_net, graph = form
    how = dict(n_ctx=N_CTX, type_k="f32", type_v="f32", flash_attn=False, n_ubatch=8, delta_net=delta_net, graph=graph)
    return how | more


class Sessions(RuleBasedStateMachine):
    """One session, and beside it nothing but the tokens each sequence should hold."""

    model = truth = None

    @initialize(
        form=st.sampled_from([("fused", "lean"), ("fused", "plain"), ("chunked", "lean"), ("autoregressive", "lean")]),
        n_rollback=st.sampled_from([0, 1, 3, 9]), every=st.sampled_from([0, 5, 8]), room=st.sampled_from([1, 1024]),
    )  # fmt: skip
    def begin(self, form, n_rollback, every, room):
        self.form, self.tokens = form, [[] for _ in range(N_SEQS)]
        # how far each sequence can go back for sure, beside all the way
        self.sure = [0] * N_SEQS
        how = options(form, n_seq_max=N_SEQS, n_rollback=n_rollback, checkpoint_every=every, checkpoint_mib=room)
        self.s = self.model.session(**how)
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self):
        if hasattr(self, "s"):
            self.s.close()
            self.folder.cleanup()

    def check(self, seq, logits=None):
        assert self.s.n_past(seq) == len(self.tokens[seq])
        if not self.tokens[seq]:
            assert not any(x.any() for x in halves(self.s, seq).values())
            return
        want, held = self.truth.of(self.form, tuple(self.tokens[seq]))
        through_f16 = self.s.options.flash_attn and not self.s.options.kv_as_stored
        tolerance = TOLERANCE_F16_CACHE if through_f16 else TOLERANCE
        assert apart(halves(self.s, seq), held) < tolerance
        if logits is not None:
            assert max_abs(logits, want) < tolerance

    def add(self, seq, tokens):
        self.tokens[seq] = self.tokens[seq] + tokens
        self.sure[seq] = min(self.sure[seq] + len(tokens), self.s.n_rollback)

    @rule(seq=seqs, tokens=some_tokens, want=st.sampled_from(["last", "all", "none"]))
    def decode(self, seq, tokens, want):
        tokens = tokens[: LONGEST - len(self.tokens[seq])]
        if tokens:
            logits = self.s.decode(tokens, seq=seq, logits=want)
            assert len(logits) == {"last": 1, "all": len(tokens), "none": 0}[want]
            self.add(seq, tokens)
            self.check(seq, logits[-1] if len(logits) else None)

    @rule(batch=st.dictionaries(seqs, some_tokens, min_size=2))
    def decode_batch(self, batch):
        batch = {seq: tokens[: LONGEST - len(self.tokens[seq])] for seq, tokens in batch.items()}
        batch = {seq: tokens for seq, tokens in batch.items() if tokens}
        if batch:
            for seq, logits in self.s.decode_batch(batch).items():
                self.add(seq, batch[seq])
                self.check(seq, logits[0])

    @rule(seq=seqs, kept=st.floats(0, 1), tokens=st.lists(st.integers(0, 5), max_size=12))
    def prompt(self, seq, kept, tokens):
        kept = round(kept * len(self.tokens[seq]))
        wanted = (self.tokens[seq][:kept] + tokens)[:LONGEST]
        if not wanted:
            return
        extends = wanted[: len(self.tokens[seq])] == self.tokens[seq]
        n_new, same = len(wanted) - len(self.tokens[seq]), wanted == self.tokens[seq]
        logits = self.s.prompt(wanted, seq=seq)
        assert self.s.last_evaluated <= len(wanted)
        if extends and not same:
            assert self.s.last_evaluated == n_new
        self.tokens[seq], self.sure[seq] = wanted, min(self.s.last_evaluated, self.s.n_rollback)
        self.check(seq, logits[0])
        assert np.array_equal(self.s.prompt(wanted, seq=seq), logits) and self.s.last_evaluated == 0

    @rule(src=seqs, dst=seqs)
    def fork(self, src, dst):
        if src != dst:
            own = self.s.memory.kv.n_used
            self.s.fork(src, dst=dst)
            assert self.s.memory.kv.n_used <= own
            self.tokens[dst], self.sure[dst] = list(self.tokens[src]), self.sure[src]
            self.check(dst)

    @rule(seq=seqs, n=st.integers(0, 12))
    def rewind(self, seq, n):
        before = digest(self.s)
        try:
            self.s.rewind(seq, n=n)
        except StateError:
            assert n > self.sure[seq] and n != len(self.tokens[seq]) and digest(self.s) == before
            return
        within = n <= self.sure[seq]
        self.tokens[seq] = self.tokens[seq][: len(self.tokens[seq]) - n]
        self.sure[seq] = self.sure[seq] - n if within else 0
        self.check(seq)

    @rule(seq=seqs)
    def clear(self, seq):
        self.s.clear(seq)
        self.tokens[seq], self.sure[seq] = [], 0
        self.check(seq)

    @rule(seq=seqs)
    def checkpoint(self, seq):
        before = halves(self.s, seq)
        if self.s.checkpoint(seq):
            assert len(self.tokens[seq]) in self.s.checkpoints.of(seq)
        assert apart(halves(self.s, seq), before) == 0
        assert self.s.checkpoints.nbytes <= self.s.checkpoints.budget

    @rule()
    def forget_graphs(self):
        self.s.graphs._drop_all()

    @rule(changes=st.sampled_from([{}, {}, dict(n_rollback=2), dict(n_ctx=512), dict(flash_attn=True), dict(n_ubatch=5, checkpoint_every=0)]))
    def save_and_load(self, changes):
        path = Path(self.folder.name) / "x.qstate"
        self.s.save(path)
        kept = digest(self.s)
        logits = [self.s.history[seq].logits for seq in range(N_SEQS)]
        loaded = self.model.load_session(path, **changes)
        assert digest(self.s) == kept
        self.s.close()
        self.s = loaded
        self.sure = [min(sure, self.s.n_rollback) for sure in self.sure]
        for seq in range(N_SEQS):
            self.check(seq, logits[seq])
            assert (logits[seq] is None) == (self.s.history[seq].logits is None)

    @precondition(lambda self: self.s.n_ctx == N_CTX)
    @rule(seq=seqs)
    def too_much(self, seq):
        before = digest(self.s)
        with pytest.raises(ContextFull):
            self.s.decode([1] * (N_CTX + 1 - len(self.tokens[seq])), seq=seq)
        with pytest.raises(ContextFull):
            self.s.prompt([1] * (N_CTX + 1), seq=seq)
        assert digest(self.s) == before


@pytest.fixture(scope="module")
def machine(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        Sessions.model, Sessions.truth = model, Truth(model)
        yield Sessions
        for s in Sessions.truth.sessions.values():
            s.close()


def test_any_order(machine):
    run_state_machine_as_test(machine, settings=SETTINGS)


def forks_without_states(monkeypatch):
    monkeypatch.setattr(RecurrentMemory, "fork", lambda self, src, dst: None)


def cells_of_another_text(monkeypatch):
    truncate = KvCache.truncate
    monkeypatch.setattr(KvCache, "truncate", lambda self, seq, n_past: truncate(self, seq, n_past + 1))


def older_than_it_says(monkeypatch):
    monkeypatch.setattr(RecurrentMemory, "applied", lambda self, seq, n_past: None)


BUGS = [forks_without_states, cells_of_another_text, older_than_it_says]


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(machine, monkeypatch, bug):
    bug(monkeypatch)
    settings = hypothesis.settings(SETTINGS, max_examples=60, phases=[hypothesis.Phase.generate], derandomize=True, database=None, print_blob=False)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(machine, settings=settings)
