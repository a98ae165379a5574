"""K head by head and V transposed hold what K and V in rows hold, cell for cell: built up, read, saved, brought back."""

from dataclasses import replace

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.graph.options import LEAN
from qwen3next_ggml.memory import kv_bytes
from tests.kit.state import halves, same

IN_ROWS = LEAN.but(grouped_attn=False)
TEXT = np.random.default_rng(13).integers(0, 97, 60).tolist()


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.file(type="f16", geometry="tiny-q"), n_threads=1) as model:
        yield model


def filled(model, options, type_k):
    """A session whose used cells have gaps between them, and are those of three sequences."""
    s = model.session(n_ctx=512, n_seq_max=3, n_rollback=3, graph=options, type_k=type_k, type_v="f16")
    s.decode_batch({0: TEXT[:17], 1: TEXT[5:22]})
    s.fork(0, dst=2)
    s.decode_batch({0: [3], 1: [4], 2: [5]})
    s.decode(TEXT[:4])
    s.rewind(1, n=1)
    s.clear(2)
    s.decode([6], seq=1)
    return s


def cells(session):
    kv = session.memory.kv
    return {(il, what): kv.read(il, what, kv.used()) for il in kv.layers for what in ("k", "v")}


@pytest.mark.parametrize("type_k", ["f32", "f16", "q8_0"])
def test_the_same_in_every_cell(model, type_k):
    """Of one attention layer, which K and V precede: equal bits. The raw bytes of K show that the layouts are two."""
    with filled(model, LEAN, type_k) as by_head, filled(model, IN_ROWS, type_k) as in_rows:
        kv, other = by_head.memory.kv, in_rows.memory.kv
        assert kv.k_by_head and kv.v_transposed and not other.k_by_head and not other.v_transposed
        got, want = cells(by_head), cells(in_rows)
        assert got.keys() == want.keys() and all(np.array_equal(got[at], want[at]) for at in want)
        assert not np.array_equal(kv.layers[3].k.raw(), other.layers[3].k.raw())
        if type_k == "f16":
            assert all(same(halves(by_head, seq), halves(in_rows, seq)) for seq in range(3))


@pytest.mark.parametrize("was, now", [(LEAN, IN_ROWS), (IN_ROWS, LEAN), (LEAN, LEAN)], ids=["to rows", "from rows", "kept"])
@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_a_session_file_goes_from_layout_to_layout(model, tmp_path, was, now, type_k):
    with filled(model, was, type_k) as s:
        s.save(tmp_path / "s.state")
        want, step = cells(s), s.decode([7], seq=1)
    with model.load_session(tmp_path / "s.state", graph=now) as s:
        got = cells(s)
        assert all(np.array_equal(got[at], want[at]) for at in want)
        # scores are added up otherwise, and once more where cells moved
        assert np.allclose(s.decode([7], seq=1), step, atol=2e-3 * np.abs(step).max())


def test_erased_cells_of_every_head_are_zero(model):
    with filled(model, LEAN, "f16") as s:
        kv = s.memory.kv
        used = kv.used()
        kv.erase(used[2:5])
        k = kv.layers[3].k.get().reshape(kv.layers[3].spec.n_head_kv, kv.n_cells, -1)
        assert not k[:, used[2:5]].any() and k[:, used[5]].any(axis=-1).all() and k[:, used[1]].any(axis=-1).all()


def test_heads_taken_for_rows_are_seen(model):
    """The mutation: bytes read as if K lay in rows."""
    with filled(model, LEAN, "f16") as s:
        kv, layer = s.memory.kv, s.memory.kv.layers[3]
        assert not np.array_equal(kv_bytes.read_rows(replace(layer, k_by_head=False), "k", kv.used()), kv.read(3, "k", kv.used()))
