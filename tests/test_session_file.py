"""C38, session files: a restore equals never having stopped, elsewhere it fits or says why not, and a damaged file is refused."""

import json
from itertools import product

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml import ggml, session_file
from qwen3next_ggml.array_file import read_arrays, write_arrays
from qwen3next_ggml.errors import Aborted, StateError
from qwen3next_ggml.history import Checkpoints
from qwen3next_ggml.memory.recurrent import RecurrentMemory
from qwen3next_ggml.session_file import describe, open_session_file
from tests.kit import digest, halves, max_abs, run_python, same
from tests.kit.gguf_bytes import edit_gguf

TOLERANCE = 1e-4
TEXT, OTHER = np.random.default_rng(71).integers(0, 97, (2, 400)).tolist()
PATHS = list(product(("fused", "chunked"), ("plain", "lean"), (True, False)))


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def options(delta_net="fused", graph="lean", flash_attn=False, **more):
    kinds = dict(delta_net=delta_net, graph=graph, flash_attn=flash_attn)
    return dict(n_ctx=512, type_k="f32", type_v="f32", n_ubatch=64) | kinds | more


def lived_in(model, **how):
    """A session with a past: a hole in its cells, unequal lengths, a fork that parted, rings, checkpoints, one sequence without logits."""
    s = model.session(**options(**how) | dict(n_seq_max=5, n_rollback=3, checkpoint_every=16))
    s.decode(OTHER[:40], seq=1)
    s.decode_batch({0: TEXT[:70], 2: OTHER[:30]})
    s.fork(0, dst=4)
    s.decode(TEXT[70:75])
    s.rewind(n=2)
    s.decode(TEXT[73:74])
    s.decode(OTHER[:3], seq=4)
    s.clear(1)
    s.decode(OTHER[30:33], seq=2, logits="none")
    return s


def go_on(s):
    """Everything a session can be asked: last logits, steps of one and of all, going back into the ring, a fork, a prompt."""
    found = [s.history[seq].logits for seq in (0, 4)]
    found += s.decode_batch({0: TEXT[74:76], 2: OTHER[33:34], 4: [5]}, logits="all").values()
    for seq in (0, 2, 4):
        s.rewind(seq, n=2)
        found.append(s.decode([7], seq=seq))
    s.fork(2, dst=3)
    found.append(s.decode(OTHER[:5], seq=3))
    found.append(s.prompt(TEXT[:60] + OTHER[:9], seq=4))
    return found, (s.last_evaluated, s.last_reuse)


@pytest.mark.parametrize("delta_net, graph, flash_attn", PATHS)
def test_everything_comes_back(model, tmp_path, delta_net, graph, flash_attn):
    path = tmp_path / "x.qstate"
    with lived_in(model, delta_net=delta_net, graph=graph, flash_attn=flash_attn) as s:
        before = digest(s)
        s.save(path)
        assert digest(s) == before
        with model.load_session(path) as r:
            assert r.settings == s.settings and r.options == s.options
            for seq in range(5):
                assert (r.n_past(seq), r.history[seq].tokens) == (s.n_past(seq), s.history[seq].tokens)
                assert same(halves(r, seq), halves(s, seq)) and r.checkpoints.of(seq) == s.checkpoints.of(seq)
                assert r.memory.snapshots(seq) == s.memory.snapshots(seq)
            assert np.array_equal(r.memory.kv.pos, s.memory.kv.pos) and np.array_equal(r.memory.kv.member, s.memory.kv.member)
            (got, how), (want, as_before) = go_on(r), go_on(s)
            assert how == as_before and how[0] == 69 - 48
            assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


NEXT_DAY = """
import sys
import numpy as np
import qwen3next_ggml
from tests.kit import digest
model_path, path, out, *tokens = sys.argv[1:]
tokens = [int(t) for t in tokens]
with qwen3next_ggml.load(model_path, n_threads=1) as model:
    chosen, same = [], True
    for _ in range(10):
        with model.load_session(path) as s:
            before = digest(s)
            chosen.append(int(s.prompt(s.history[0].tokens)[0].argmax()))
            same &= digest(s) == before and s.last_evaluated == 0
    with model.load_session(path) as s:
        logits = s.prompt(s.history[0].tokens + tokens)
        np.savez(out, logits=logits, all=s.decode(tokens, logits="all"), chosen=chosen, same=same, evaluated=s.last_evaluated)
"""


def test_another_process_goes_on(model, toys, tmp_path):
    """C38 (a) feed five tokens; (b) ask for the next one without feeding any; (c) ten times."""
    path, out = tmp_path / "x.qstate", tmp_path / "out.npz"
    with model.session(**options(n_rollback=2, checkpoint_every=32)) as s:
        last = s.decode(TEXT[:100])
        s.save(path)
        done = run_python(NEXT_DAY, toys.t0, path, out, *OTHER[:5])
        assert done.returncode == 0, done.stderr
        got = np.load(out)
        assert got["chosen"].tolist() == [int(last[0].argmax())] * 10 and got["same"]
        assert got["evaluated"] == 5 and np.array_equal(got["logits"], s.prompt(TEXT[:100] + OTHER[:5]))
        assert np.array_equal(got["all"], s.decode(OTHER[:5], logits="all"))


def test_another_libggml_goes_on(model, toys, tmp_path):
    path, out = tmp_path / "x.qstate", tmp_path / "out.npz"
    other = "ggml_python" if ggml.provider().name == "llama_cpp" else "llama_cpp"
    with model.session(**options(n_rollback=2, checkpoint_every=32)) as s:
        last = s.decode(TEXT[:100])
        s.save(path)
        done = run_python(NEXT_DAY, toys.t0, path, out, *OTHER[:5], env={"QGRAPH_GGML": other})
        assert done.returncode == 0, done.stderr
        got = np.load(out)
        assert got["chosen"].tolist() == [int(last[0].argmax())] * 10 and got["same"] and got["evaluated"] == 5
        assert max_abs(got["logits"], s.prompt(TEXT[:100] + OTHER[:5])) < TOLERANCE


def test_an_empty_session(model, tmp_path):
    with model.session(**options(n_seq_max=2)) as s:
        s.save(tmp_path / "x")
        with model.load_session(tmp_path / "x") as r:
            assert np.array_equal(r.decode(TEXT[:9], seq=1), s.decode(TEXT[:9], seq=1))


def test_saving_again_and_again(model, tmp_path):
    """Over its own file, from a session that came out of it."""
    path = tmp_path / "x.qstate"
    with model.session(**options()) as s:
        s.decode(TEXT[:10])
        s.save(path)
        for n in range(10, 14):
            with model.load_session(path) as r:
                assert np.array_equal(r.decode([TEXT[n]]), s.decode([TEXT[n]]))
                r.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.qstate"]


def test_a_broken_sequence_stays_broken(model, tmp_path, monkeypatch):
    """It is not taken for a whole one, and what its checkpoints hold is still there."""
    with model.session(**options(n_seq_max=2, checkpoint_every=16)) as s:
        s.decode_batch({0: TEXT[:40], 1: OTHER[:20]})
        run = s.graphs.executor.run

        def stopped(*args):
            run(*args)
            raise Aborted("computing was stopped")

        with monkeypatch.context() as patch, pytest.raises(Aborted):
            patch.setattr(s.graphs.executor, "run", stopped)
            s.decode([1])
        s.save(tmp_path / "x")
        with model.load_session(tmp_path / "x") as r:
            with pytest.raises(StateError, match="sequence 0 stopped in the middle of a step"):
                r.decode([1])
            assert np.array_equal(r.decode([2], seq=1), s.decode([2], seq=1))
            assert np.array_equal(r.prompt(TEXT[:40]), s.prompt(TEXT[:40])) and r.last_evaluated == 8


@pytest.fixture(scope="module")
def with_head(toys):
    with qwen3next_ggml.load(toys.mtp, n_threads=1) as model:
        yield model


def test_drafts_go_on(with_head, tmp_path):
    """What the NextN head was fed and what it still waits for comes back too."""
    def draft(s):
        return s.drafter.draft(TEXT[70], lambda logits: int(logits.argmax()), n=3)

    with with_head.session(**options(mtp=True, n_rollback=3)) as s:
        s.decode(TEXT[:66])
        draft(s)
        s.decode(TEXT[66:72])
        s.rewind(n=2)
        s.save(tmp_path / "x")
        with with_head.load_session(tmp_path / "x") as r:
            assert draft(r) == draft(s) != []
            assert np.array_equal(r.decode(TEXT[70:75]), s.decode(TEXT[70:75])) and draft(r) == draft(s)
            assert same(halves(r), halves(s))


@pytest.mark.parametrize("saved", [True, False])
def test_with_a_head_and_without(with_head, tmp_path, saved):
    with with_head.session(**options(mtp=saved, n_rollback=3)) as s:
        s.decode(TEXT[:40])
        s.save(tmp_path / "x")
        with with_head.load_session(tmp_path / "x", mtp=not saved) as r:
            assert max_abs(r.decode(TEXT[40:43]), s.decode(TEXT[40:43])) < TOLERANCE
            assert (r.drafter is None) == saved
            if r.drafter:
                assert len(r.drafter.draft(TEXT[43], lambda logits: int(logits.argmax()), n=3)) == 3


# the file


@pytest.fixture(scope="module")
def small(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("sessions") / "small.qstate"
    with model.session(**options(n_rollback=1, checkpoint_every=4)) as s:
        s.decode(TEXT[:9])
        s.save(path)
    return path


def test_another_model_is_refused(small, toys, tmp_path):
    for path, differs in ((toys.file(seed=1), True), (toys.mtp, True), (toys.t0, False)):
        with qwen3next_ggml.load(path, n_threads=1) as other:
            if differs:
                with pytest.raises(StateError, match=r"belongs to another model: saved with toy \(qwen3next, fingerprint \w{12}\), this is toy"):
                    other.load_session(small)
            else:
                other.load_session(small).close()


def test_what_a_fingerprint_is_made_of(toys, tmp_path):
    def fingerprint(name, **edits):
        path, *_ = edit_gguf(toys.t0, tmp_path / name, **edits)
        with qwen3next_ggml.load(path, n_threads=1) as model:
            return model.fingerprint

    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        same_model, changed = model.fingerprint, model.weights.by_name["blk.2.ffn_up_exps.weight"].get()
    assert len(same_model) == 32
    assert fingerprint("copy.gguf") == fingerprint("split", split=20) == same_model
    assert fingerprint("name.gguf", metadata={"general.name": "other"}) == same_model
    assert fingerprint("key.gguf", metadata={"qwen3next.rope.freq_base": 10000.0}) != same_model
    changed.reshape(-1)[changed.size // 2] += 1
    assert fingerprint("weight.gguf", replace={"blk.2.ffn_up_exps.weight": ("f32", changed)}) != same_model
    assert fingerprint("type.gguf", replace={"blk.2.ffn_up_exps.weight": ("f16", changed)}) != same_model


def test_damage_is_refused_before_a_session_is_made(model, small, tmp_path, monkeypatch):
    monkeypatch.setattr(type(model), "session", lambda *_, **__: pytest.fail("a session was made"))
    data, path = small.read_bytes(), tmp_path / "x.qstate"
    for at in np.random.default_rng(0).integers(0, len(data), 60).tolist():
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(StateError, match="x.qstate"):
            model.load_session(path)
        path.write_bytes(data[:at])
        with pytest.raises(StateError, match="x.qstate"):
            model.load_session(path)


def rewritten(small, path, change):
    """Write the small file again with another content and a right checksum."""
    about, arrays = read_arrays(small)
    about, arrays = dict(about), dict(arrays)
    change(about, arrays)
    write_arrays(path, about, arrays)
    return path


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda about, _: about.update(version="2"), "format version 2 is not known here, expected 1"),
        (lambda about, _: about.update(format="weights"), "is not a session file: its format is 'weights'"),
        (lambda _, arrays: arrays.pop("tokens.0"), "array tokens.0 of shape .9. was expected, it is missing"),
        (lambda _, arrays: arrays.pop("state.0.8.1.s"), "array state.0.8.1.s .*missing"),
        (lambda _, arrays: arrays.update({"kv.3.k": arrays["kv.3.k"][:5]}), "array kv.3.k .*its shape is .5, 384."),
        (lambda _, arrays: arrays.update({"checkpoint.0.0.r": arrays["tokens.0"]}), "array checkpoint.0.0.r"),
    ],
)
def test_a_whole_file_with_another_content(model, small, tmp_path, change, words):
    with pytest.raises(StateError, match=words):
        model.load_session(rewritten(small, tmp_path / "x.qstate", change))


def test_what_is_no_session_file(model, toys, tmp_path):
    with pytest.raises(StateError, match="is not a session file"):
        model.load_session(toys.t0)
    with pytest.raises(StateError, match="No such file"):
        model.load_session(tmp_path / "nowhere")


def test_what_a_file_says_of_itself(model, small):
    told = describe(open_session_file(small))
    assert json.loads(json.dumps(told)) == told
    assert told["model"] == {"name": "toy", "arch": "qwen3next", "file": model.file.path.name, "fingerprint": model.fingerprint}
    assert told["sequences"] == [{"seq": 0, "n_past": 9, "states": [8, 9], "checkpoints": [4, 8], "last_logits": True}]
    assert told["options"]["n_rollback"] == 1 and told["n_cells"] == 9 and told["sampler"] is False
    assert sum(told["bytes"][x] for x in ("kv", "state", "checkpoint")) < told["bytes"]["all"] < small.stat().st_size


# what the tests above would not let pass


def no_last_logits(monkeypatch):
    add = session_file._add_held
    monkeypatch.setattr(session_file, "_add_held", lambda arrays, seq, held: (add(arrays, seq, held), arrays.pop(f"logits.{seq}", None)))


def only_the_newest_state(monkeypatch):
    restore_ring = RecurrentMemory.restore_ring
    monkeypatch.setattr(RecurrentMemory, "restore_ring", lambda self, seq, states: restore_ring(self, seq, {max(states): states[max(states)]}))


def states_in_the_wrong_turn(monkeypatch):
    restore_ring = RecurrentMemory.restore_ring
    monkeypatch.setattr(RecurrentMemory, "restore_ring", lambda self, seq, states: restore_ring(self, seq, dict(zip(states, [*states.values()][::-1]))))


def no_checkpoints(monkeypatch):
    add = Checkpoints.add
    monkeypatch.setattr(Checkpoints, "add", lambda self, seqs, n, values, *more: any(x.ndim > 1 for x in values.values()) or add(self, seqs, n, values, *more))


@pytest.mark.parametrize("bug", [no_last_logits, only_the_newest_state, states_in_the_wrong_turn, no_checkpoints])
def test_a_bug_is_noticed(model, tmp_path, monkeypatch, bug):
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        test_everything_comes_back(model, tmp_path, "fused", "lean", False)
