"""Many sequences in one session: each gets what it would get alone, whoever else is in the batch, joins, leaves or is forked."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import ggml
from qwen3next_ggml.errors import ContextFull, OptionError, StateError
from qwen3next_ggml.executor import Built
from qwen3next_ggml.history import History
from qwen3next_ggml.memory.kv_cache import KvCache
from qwen3next_ggml.memory.recurrent import RecurrentMemory
from tests.kit import apart, digest, halves, max_abs, run_python, same

TOLERANCE = 1e-5
STEPS = 64
N_TEXTS, LONGEST = 16, 20 + STEPS
TEXTS = np.random.default_rng(41).integers(0, 97, (N_TEXTS, LONGEST)).tolist()
START = [20, 1, 7, 13, 2, 19, 5, 11, 3, 17, 1, 8, 14, 6, 20, 9]
# F32 all the way: the plain graph hands an F32 cache to flash attention through F16
PATHS = [("lean", True), ("lean", False), ("plain", False)]


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def options(graph="lean", flash_attn=False, **more):
    return dict(n_ctx=1536, type_k="f32", type_v="f32", n_ubatch=64, graph=graph, flash_attn=flash_attn) | more


@pytest.fixture(scope="module")
def solo(model):
    """Return the logits after each token of a text, from a session that holds nothing else."""
    known = {}

    def logits(path, i):
        if (path, i) not in known:
            with model.session(**options(*path)) as s:
                first = s.decode(TEXTS[i][: START[i]], logits="all")
                known[path, i] = [*first, *(s.decode([token])[0] for token in TEXTS[i][START[i] :])]
        return known[path, i]

    return logits


@pytest.mark.parametrize("graph, flash_attn", PATHS)
@pytest.mark.parametrize("n_seqs", [1, 2, 3, 4, 8, 16])
def test_each_as_if_alone(model, solo, n_seqs, graph, flash_attn):
    """Unequal lengths from the start; every third step one of them goes on alone, so no two stay side by side."""
    with model.session(**options(graph, flash_attn, n_seq_max=n_seqs)) as s:
        out = s.decode_batch({i: TEXTS[i][: START[i]] for i in range(n_seqs)})
        worst = max(max_abs(out[i][0], solo((graph, flash_attn), i)[START[i] - 1]) for i in range(n_seqs))
        for step in range(STEPS):
            going = range(n_seqs) if step % 3 else [step // 3 % n_seqs]
            batch = {i: [TEXTS[i][s.n_past(i)]] for i in going if s.n_past(i) < LONGEST}
            for i, rows in s.decode_batch(batch).items():
                worst = max(worst, max_abs(rows[0], solo((graph, flash_attn), i)[s.n_past(i) - 1]))
        # llama.cpp's build multiplies several columns in another order than one
        assert worst < (TOLERANCE if ggml.provider().name == "ggml_python" else 2 * TOLERANCE)
        cells = {seq: s.n_past(seq) for seq in range(n_seqs)}
        assert s.memory.kv.n_used == sum(cells.values())


MANY = """
import sys
import qwen3next_ggml
devices = sys.argv[2].split(",")
with qwen3next_ggml.load(sys.argv[1], device=devices, n_threads=1) as model, model.session(n_ctx=1024, n_seq_max=300) as s:
    out = [s.decode_batch({seq: [token] for seq in range(300)}) for token in (1, 2)]
    assert all((out[1][seq] == out[1][0]).all() for seq in range(300)) and s.n_past(299) == 2
"""


@pytest.mark.parametrize("devices", ["CPU", "CPU,CPU"])
def test_a_step_of_hundreds_of_sequences(toys, devices):
    """A lean graph has nodes of its own for each; ggml ends the interpreter where a scheduler was made for fewer."""
    done = run_python(MANY, toys.t0, devices)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("graph, flash_attn", PATHS)
def test_it_does_not_matter_which_slots_are_busy(model, solo, graph, flash_attn):
    """Two of three sequences go on, whichever they are: to the same logits, in about as many nodes."""
    nodes = {}
    for pair in ((0, 1), (1, 2), (0, 2)):
        with model.session(**options(graph, flash_attn, n_seq_max=3)) as s:
            s.decode_batch({seq: TEXTS[0][:20] for seq in range(3)})
            for step in range(20, 30):
                for row in s.decode_batch({seq: [TEXTS[0][step]] for seq in pair}).values():
                    assert max_abs(row[0], solo((graph, flash_attn), 0)[step]) < 2 * TOLERANCE
            nodes[pair] = next(reversed(s.graphs._graphs.values())).graph.n_nodes
    assert max(nodes.values()) <= 1.25 * min(nodes.values())


@pytest.mark.parametrize("graph, flash_attn", PATHS)
def test_joining_leaving_and_prompts_beside_steps(model, solo, graph, flash_attn):
    """Ids with gaps, prompts of 1 … 20 tokens in the batch with single steps, sequences that end and make room for others."""
    want, text_of = {}, {0: 0, 3: 1, 5: 2}
    # sequence → how many of its text's tokens it holds after each batch; None: it left before
    script = [
        {0: 20}, {0: 21, 5: 7}, {0: 22, 3: 1, 5: 8}, {3: 5, 5: 9}, {0: None}, {3: 6, 5: 20}, {0: 13, 3: 7, 5: 21},
        {3: 40}, {5: None}, {0: 14, 3: 41, 5: 19}, {0: 30, 5: 20}, {5: 21}, {0: 31, 3: 42, 5: 22},
    ]  # fmt: skip
    with model.session(**options(graph, flash_attn, n_seq_max=6)) as s:
        others = iter((3, 5))
        for step in script:
            if None in step.values():
                (seq,) = step
                s.clear(seq)
                text_of[seq] = next(others)
                continue
            batch = {seq: TEXTS[text_of[seq]][s.n_past(seq) : n] for seq, n in step.items()}
            for seq, rows in s.decode_batch(batch, logits="all").items():
                want = solo((graph, flash_attn), text_of[seq])[s.n_past(seq) - len(rows) : s.n_past(seq)]
                assert max_abs(rows, np.stack(want)) < TOLERANCE, f"sequence {seq} in {step}"


def test_a_thousand_steps_build_few_graphs(model):
    with model.session(**options(n_ctx=1280, n_rollback=2, checkpoint_every=64)) as s:
        for step in range(1000):
            s.decode([step % 97])
        assert s.n_builds <= 1000 // 256 + 2


def test_the_same_prompt_again(model):
    """C35: the same prompt in one session three times, then without its last token, then with one more."""

    def greedy(s, prompt):
        logits, chosen = s.prompt(prompt)[-1], []
        for _ in range(20):
            chosen.append(int(logits.argmax()))
            logits = s.decode(chosen[-1:])[-1]
        return chosen

    prompts = [TEXTS[0]] * 3 + [TEXTS[0][:-1], TEXTS[0] + [5]]
    with model.session(**options()) as s, model.session(**options(n_rollback=3, checkpoint_every=16)) as keeping:
        for prompt in prompts:
            with model.session(**options()) as fresh:
                want = greedy(fresh, prompt)
            assert greedy(s, prompt) == greedy(keeping, prompt) == want
        assert keeping.last_evaluated < s.last_evaluated


# forks


@pytest.mark.parametrize("graph, flash_attn", PATHS)
def test_a_fork_shares_its_cells_until_it_parts(model, solo, graph, flash_attn):
    path = graph, flash_attn
    with model.session(**options(*path, n_seq_max=4, n_rollback=2)) as s:
        kv = s.memory.kv
        s.decode(TEXTS[0][:30])
        s.decode(TEXTS[1][:9], seq=2)
        s.fork(0, dst=2)
        s.fork(2, dst=3)
        assert kv.n_used == 30 and kv.member[[0, 2, 3]][:, kv.used()].all()
        assert same(halves(s, 0), halves(s, 3))
        out = s.decode_batch({0: TEXTS[0][30:33], 2: TEXTS[1][:2], 3: TEXTS[0][30:31]})
        assert kv.n_used == 30 + 3 + 2 + 1
        assert max_abs(out[0][0], solo(path, 0)[32]) < TOLERANCE and max_abs(out[3][0], solo(path, 0)[30]) < TOLERANCE
        # back over the point of parting, into cells that are shared
        s.rewind(2, n=2)
        before = halves(s, 0), halves(s, 3)
        assert kv.n_used == 30 + 3 + 1
        s.clear(2)
        assert kv.n_used == 30 + 3 + 1 and same(halves(s, 0), before[0]) and same(halves(s, 3), before[1])
        s.clear(0)
        assert kv.n_used == 31
        assert max_abs(s.decode(TEXTS[0][31:35], seq=3)[0], solo(path, 0)[34]) < TOLERANCE


def test_a_fork_keeps_the_ring(model):
    """What the source could go back to, the fork can, and neither disturbs the other."""
    with model.session(**options(n_seq_max=2, n_rollback=3)) as s, model.session(**options()) as fresh:
        s.decode(TEXTS[0][:30])
        s.fork(0, dst=1)
        s.rewind(1, n=3)
        s.decode(TEXTS[1][:3], seq=1)
        s.rewind(0, n=2)
        for seq, tokens in ((0, TEXTS[0][:28]), (1, TEXTS[0][:27] + TEXTS[1][:3])):
            fresh.clear()
            fresh.decode(tokens)
            assert apart(halves(s, seq), halves(fresh)) < TOLERANCE


def test_what_cannot_be_forked(model):
    with model.session(**options(n_seq_max=2)) as s:
        s.decode(TEXTS[0][:9])
        before = digest(s)
        for src, dst, words in ((0, 0, "onto itself"), (0, 2, "sequence 2 does not exist"), (-1, 1, "sequence -1 does not exist")):
            with pytest.raises(StateError, match=words):
                s.fork(src, dst=dst)
        assert digest(s) == before
        s.fork(1, dst=0)
        assert s.n_past(0) == 0 and s.memory.kv.n_used == 0


# refusals


def test_what_does_not_fit_is_refused_and_changes_nothing(model):
    with model.session(**options(n_ctx=256, n_seq_max=3, checkpoint_every=40)) as s:
        text = (TEXTS[0] * 4)[:300]
        s.decode(text[:150])
        s.fork(0, dst=1)
        s.decode(text[150:240])
        s.decode(text[:10], seq=2)
        before = digest(s)
        refused = [
            (ContextFull, "7 tokens were handed in; 6 of 256 cells", lambda: s.decode([1] * 7)),
            (ContextFull, "8 tokens were handed in; 6 of 256 cells", lambda: s.decode_batch({0: [1] * 4, 2: [1] * 4})),
            (ContextFull, "holds 150 tokens and 107 more", lambda: s.decode([1] * 107, seq=1)),
            (ContextFull, "n_ctx is 256", lambda: s.prompt(text[:257])),
            # the cells that prompts would leave behind belong to a fork too
            (ContextFull, "110 tokens are to be run; other sequences leave 96 of 256 cells", lambda: s.prompt(text[:120] + [1] * 110)),
            (OptionError, "token 97", lambda: s.decode_batch({0: [1], 2: [97]})),
            (OptionError, "non-empty", lambda: s.prompt([])),
            (StateError, "sequence 3 does not exist", lambda: s.decode([1], seq=3)),
        ]
        for kind, words, call in refused:
            with pytest.raises(kind, match=words):
                call()
            assert digest(s) == before, words


def test_the_callers_logits_are_his(model):
    """What he writes over them does not come back as the last logits."""
    with model.session(**options()) as s:
        rows = s.decode(TEXTS[0][:9], logits="all")
        want = rows[-1].copy()
        rows[:] = -1
        assert np.array_equal(s.prompt(TEXTS[0][:9])[0], want) and s.last_evaluated == 0
        s.prompt(TEXTS[0][:9])[:] = -1
        assert np.array_equal(s.prompt(TEXTS[0][:9])[0], want)


def count_fetches(monkeypatch):
    """Count the rows of logits that are copied for the session to keep."""
    fetched, row = [], Built.row
    monkeypatch.setattr(Built, "row", lambda self, i: (fetched.append(i), row(self, i))[1])
    return fetched


def go_on_beside_others(model):
    """Logits of a batch, kept by three sequences and a fork while one goes on, one is cut and one is cleared."""
    with model.session(**options(n_seq_max=5, n_rollback=2)) as s:
        # the graph of one token, which has to be there already: building one has all fetched
        for seq in range(4):
            s.decode(TEXTS[seq][:1], seq=seq)
        out = s.decode_batch({seq: TEXTS[seq][1:9] for seq in range(4)})
        want = {seq: rows[0].copy() for seq, rows in out.items()}
        for rows in out.values():
            rows[:] = -1
        s.decode(TEXTS[1][9:10], seq=1)
        s.fork(2, dst=4)
        s.rewind(3, n=1)
        s.clear(0)
        for seq, text in ((2, 2), (4, 2)):
            assert np.array_equal(s.prompt(TEXTS[text][:9], seq=seq)[0], want[text]) and s.last_evaluated == 0
        assert not np.array_equal(s.prompt(TEXTS[3][:8], seq=3)[0], want[3]) and s.history[0].logits is None


def test_the_logits_of_a_batch_wait_where_they_are(model, monkeypatch):
    """They are copied for those alone that somebody asks for or that others' would be written over."""
    fetched = count_fetches(monkeypatch)
    with model.session(**options(n_seq_max=4)) as s:
        s.decode_batch({seq: [TEXTS[seq][0]] for seq in (0, 3)})
        s.decode_batch({seq: [TEXTS[seq][0]] for seq in range(3)})
        fetched.clear()
        for step in range(1, 20):
            s.decode_batch({seq: [TEXTS[seq][step]] for seq in range(3)})
        assert fetched == []
        s.decode_batch({seq: [TEXTS[seq][20]] for seq in (0, 3)})
        assert fetched == [1, 2]
    go_on_beside_others(model)


@pytest.mark.parametrize("name, bug", {
    "supersede": lambda self, seqs: None,
    "truncate": lambda self, seq, n_past, logits=None: self._held[seq].tokens.__delitem__(slice(n_past, None)),
}.items())  # fmt: skip
def test_logits_that_wait_too_long_are_noticed(model, monkeypatch, name, bug):
    monkeypatch.setattr(History, name, bug)
    with pytest.raises(AssertionError):
        go_on_beside_others(model)


def visible_by_cell(kv, ubatch, n_kv):
    """Say of every token and cell whether the cell holds an earlier token of the same sequence, or this one."""
    rows = zip(ubatch.seq_of_row.tolist(), ubatch.pos.tolist())
    return np.array([[bool(kv.member[seq, cell]) and kv.pos[cell] <= pos for cell in range(n_kv)] for seq, pos in rows])


def test_a_mask_shows_each_token_what_came_before_it(model):
    """Looked at when the ubatch is in its cells: prompts beside steps, forks, holes that cuts have left."""
    seen = []
    with model.session(**options(n_seq_max=4, n_rollback=3)) as s:
        kv, apply, mask = s.memory.kv, s.memory.apply, s.memory.kv.mask

        def remember(ubatch, cells, n_kv):
            seen.append([ubatch, mask(ubatch, cells, n_kv)])
            return seen[-1][1]

        def look(ubatch, plan, failed=()):
            apply(ubatch, plan, failed)
            seen[-1].append(visible_by_cell(kv, ubatch, plan.n_kv))

        kv.mask, s.memory.apply = remember, look
        s.decode_batch({seq: TEXTS[seq][: 5 + 3 * seq] for seq in range(3)})
        s.fork(2, dst=3)
        s.rewind(1, n=2)
        s.decode_batch({0: TEXTS[3][:4], 1: TEXTS[4][:4], 3: TEXTS[5][:4]})
        s.rewind(2, n=3)
        s.decode_batch({seq: [7] for seq in range(4)})
        s.clear(0)
        s.decode(TEXTS[6][:20], seq=0)
    assert len(seen) >= 6
    for _, got, visible in seen:
        assert np.array_equal(got == 0, visible) and np.isneginf(got[~visible]).all()


# what the tests above would not let pass


def one_state_for_two(monkeypatch):
    monkeypatch.setattr(RecurrentMemory, "slot", lambda self, seq, n_past: max(seq - 1, 0) * self.ring + n_past % self.ring)


def everybody_sees_everything(monkeypatch):
    mask = KvCache.mask

    def bug(self, ubatch, cells, n_kv):
        own = self.member.copy()
        self.member[:, self.pos >= 0] = True
        try:
            return mask(self, ubatch, cells, n_kv)
        finally:
            self.member[:] = own

    monkeypatch.setattr(KvCache, "mask", bug)


def solo_slot_is_always_the_first(monkeypatch):
    monkeypatch.setattr(RecurrentMemory, "head", lambda self, seqs: 0 if len(seqs) == 1 else None)


@pytest.mark.parametrize("bug", [one_state_for_two, everybody_sees_everything, solo_slot_is_always_the_first])
def test_a_bug_is_noticed(model, solo, monkeypatch, bug):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        test_each_as_if_alone(model, solo, 3, "lean", False)


def test_a_fork_without_states_is_noticed(model, solo, monkeypatch):
    monkeypatch.setattr(RecurrentMemory, "fork", lambda self, src, dst: None)
    with pytest.raises(AssertionError):
        test_a_fork_shares_its_cells_until_it_parts(model, solo, "lean", False)
