"""A session file loaded into another size, layout or cache type: it fits, or says why not."""

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import OptionError, StateError
from tests.kit import halves, max_abs, same
from tests.test_session_file import OTHER, TEXT, TOLERANCE, lived_in, options


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


def test_into_other_sizes(model, tmp_path):
    """More and fewer cells (those that lie too high move down), more sequences, longer and shorter rings, smaller ubatches."""
    path = tmp_path / "x"
    with lived_in(model) as s:
        s.save(path)
        used = s.memory.kv.used()
        assert used[-1] + 1 > len(used)
        for changes in (dict(n_ctx=1024), dict(n_ctx=256), dict(n_seq_max=9), dict(n_rollback=0), dict(n_rollback=9), dict(n_ubatch=7)):
            with model.load_session(path, **changes) as r:
                assert all(getattr(r, name) == value for name, value in changes.items())
                assert all(same(halves(r, seq), halves(s, seq)) for seq in (0, 2, 4))
                n_states = min(4, r.n_rollback + 1)
                assert len(r.memory.snapshots(4)) == n_states
                r.rewind(4, n=n_states - 1)
                with model.load_session(path) as plain:
                    plain.rewind(4, n=n_states - 1)
                    assert same(halves(r, 4), halves(plain, 4))
                    assert max_abs(r.decode(OTHER[:9], seq=4), plain.decode(OTHER[:9], seq=4)) < TOLERANCE
        with model.load_session(path, n_ctx=256) as r:
            assert r.memory.kv.used().tolist() == used.tolist()


def test_cells_move_down_when_they_lie_too_high(model, tmp_path):
    with model.session(**options(n_seq_max=2)) as s:
        s.decode((TEXT * 2)[:400], seq=1)
        s.decode(TEXT[:60])
        s.clear(1)
        s.decode(OTHER[:9], seq=1)
        assert s.memory.kv.used()[-1] > 256
        s.save(tmp_path / "x")
        with model.load_session(tmp_path / "x", n_ctx=256) as r:
            assert r.memory.kv.used().tolist() == list(range(69))
            assert all(same(halves(r, seq), halves(s, seq)) for seq in (0, 1))
            got, want = (x.decode_batch({0: [1, 2], 1: [3]}) for x in (r, s))
            assert all(max_abs(got[seq], want[seq]) < TOLERANCE for seq in (0, 1))


def test_into_a_smaller_budget(model, tmp_path):
    with model.session(**options(checkpoint_every=4)) as s:
        s.decode(TEXT[:200])
        s.save(tmp_path / "x")
        with model.load_session(tmp_path / "x", checkpoint_mib=1) as r:
            kept = r.checkpoints.of(0)
            assert 5 < len(kept) < 20 and kept == s.checkpoints.of(0)[-len(kept) :]
        with model.load_session(tmp_path / "x", checkpoint_mib=0, checkpoint_every=0) as r:
            assert r.checkpoints.of(0) == []


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_into_the_other_layout_of_v(model, tmp_path, saved, loaded):
    """Without flash attention V is kept transposed; in the file it is not."""
    with model.session(**options(flash_attn=saved)) as s:
        s.decode(TEXT[:70])
        s.save(tmp_path / "x")
        with model.load_session(tmp_path / "x", flash_attn=loaded) as r:
            assert same(halves(r), halves(s))
            assert max_abs(r.decode(OTHER[:9]), s.decode(OTHER[:9])) < TOLERANCE


@pytest.fixture(scope="module")
def wide(toys):
    """A toy whose heads can be kept in blocks of 32."""
    path = toys.file(metadata={"attention.key_length": 32, "attention.value_length": 32})
    with qwen3next_ggml.load(path, n_threads=1) as model:
        yield model


@pytest.mark.parametrize("to", ["f32", "f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("of", ["f32", "f16", "bf16", "q8_0"])
def test_into_another_cache_type(wide, tmp_path, of, to):
    """As if the values had been written to a cache of that type; the same type is copied as it is."""
    how = options(flash_attn=True)
    with wide.session(**how | dict(type_k=of, type_v=of)) as s:
        s.decode(TEXT[:70])
        s.save(tmp_path / "x")
        kept = halves(s)
        with wide.load_session(tmp_path / "x", type_k=to, type_v=to) as r:
            got = halves(r)
            for name, x in kept.items():
                if of == to or name[0] in "rs":
                    assert np.array_equal(got[name], x), name
                elif to.startswith("q"):
                    step = np.abs(x.reshape(-1, 32)).max(axis=1) / (127 if to == "q8_0" else 8)
                    assert (np.abs(got[name] - x).reshape(-1, 32).max(axis=1) <= step * (0.55 if to == "q8_0" else 1.01) + 1e-3 * step).all()
                elif to == "f16":
                    assert np.array_equal(got[name], x.astype(np.float16).astype(np.float32))
                else:
                    assert max_abs(got[name], x) <= (2.0**-8 * np.abs(x).max() if to == "bf16" else 0)
            assert np.isfinite(r.decode([1])).all()


def test_what_does_not_fit_is_refused(model, tmp_path):
    path = tmp_path / "x.qstate"
    with model.session(**options(n_seq_max=3)) as s:
        s.decode(TEXT[:300], seq=1)
        s.decode(TEXT[:100], seq=2)
        s.save(path)
        refused = [
            (dict(n_ctx=256), StateError, f"{path} holds 300 tokens of sequence 1; n_ctx is 256"),
            (dict(n_seq_max=2), StateError, f"{path} holds sequence 2; n_seq_max=2 has no such sequence"),
            (dict(type_k="q8_0"), OptionError, "needs a head width divisible by 32, got 24"),
            (dict(n_batch=3), TypeError, "n_batch"),
        ]
        for changes, kind, words in refused:
            with pytest.raises(kind, match=words.replace(".", r"\.")):
                model.load_session(path, **changes)
        s.decode((OTHER * 2)[:112], seq=0)
        s.clear(1)
        s.fork(0, dst=1)
        s.decode((TEXT * 2)[:100], seq=0)
        s.save(path)
        with pytest.raises(StateError, match="holds 312 KV cells; n_ctx is 256"):
            model.load_session(path, n_ctx=256)
