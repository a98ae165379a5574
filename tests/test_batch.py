"""Cutting token lists into ubatches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3next_ggml
from qwen3next_ggml.batch import best_ubatch, check_tokens, split_equal
from qwen3next_ggml.errors import OptionError


def ids(*n):
    return {s: np.arange(100 * s, 100 * s + k, dtype=np.int32) for s, k in enumerate(n) if k}


def test_sequences_advance_side_by_side_until_the_shortest_ends():
    ubatches = split_equal(ids(3, 1), {0: 10, 1: 0}, want="last", n_ubatch=8)
    assert [(u.seqs, u.n_seq_tokens) for u in ubatches] == [((0, 1), 1), ((0,), 2)]
    assert ubatches[0].tokens.tolist() == [0, 100] and ubatches[0].pos.tolist() == [10, 0]
    assert ubatches[1].tokens.tolist() == [1, 2] and ubatches[1].pos.tolist() == [11, 12]
    # sequence 1 ends in the first ubatch (row 1), sequence 0 in the second (row 1)
    assert [u.out_rows.tolist() for u in ubatches] == [[1], [1]]
    assert [u.out_slots for u in ubatches] == [((1, 0),), ((0, 0),)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), st.integers(1, 16), st.sampled_from(["last", "all", "none"]))
def test_every_token_is_run_once_in_order(lengths, n_ubatch, want):
    tokens = ids(*lengths)
    past = {s: 7 * s for s in tokens}
    ran = {s: [] for s in tokens}
    wanted = {s: [] for s in tokens}
    for u in split_equal(tokens, past, want=want, n_ubatch=n_ubatch):
        assert 0 < u.n_tokens <= n_ubatch and u.n_tokens == u.n_seqs * u.n_seq_tokens
        assert u.seqs == tuple(sorted(u.seqs))
        for s, row, p in zip(u.seq_of_row.tolist(), u.tokens.tolist(), u.pos.tolist()):
            assert p == past[s] + len(ran[s])
            ran[s].append(row)
        for (s, i), row in zip(u.out_slots, u.out_rows.tolist()):
            assert u.seq_of_row[row] == s
            wanted[s].append((i, int(u.tokens[row])))
    assert ran == {s: t.tolist() for s, t in tokens.items()}
    expect = {"none": lambda t: [], "last": lambda t: [(0, int(t[-1]))], "all": lambda t: list(enumerate(t.tolist()))}[want]
    assert wanted == {s: expect(t) for s, t in tokens.items()}


def test_a_share_can_be_capped():
    ubatches = split_equal(ids(3), {0: 0}, want="none", n_ubatch=8, max_seq_tokens=1)
    assert [u.n_seq_tokens for u in ubatches] == [1, 1, 1]


@pytest.mark.parametrize("tokens, says", [([], "non-empty"), ([3, 97], "token 97 at index 1"), ([-1], "token -1"), ([0.5], "integers")])
def test_bad_tokens_are_named(tokens, says):
    with pytest.raises(OptionError, match=says):
        check_tokens(tokens, 97, 0)


def test_unknown_want_is_refused():
    with pytest.raises(OptionError, match="last, all, none"):
        split_equal(ids(1), {0: 0}, want="first", n_ubatch=1)


@pytest.mark.parametrize("n_expert, n_used, n_ctx, tiled, wanted", [
    (512, 10, 4096, True, 2048), (512, 10, 4096, False, 512), (128, 8, 4096, True, 512), (256, 8, 4096, True, 1024), (4096, 1, 4096, True, 2048),
    (512, 10, 16384, True, 2048), (512, 10, 32768, True, 1024), (512, 10, 262144, True, 512),
])  # fmt: skip
def test_more_tokens_at_once_where_each_expert_gets_few(n_expert, n_used, n_ctx, tiled, wanted):
    assert best_ubatch(n_expert, n_used, n_ctx, tiled=tiled) == wanted


def test_a_session_computes_many_at_once_only_where_that_costs_no_memory_besides(monkeypatch):
    monkeypatch.setattr("qwen3next_ggml.session.best_ubatch", lambda n_expert, n_used, n_ctx, *, tiled: 768 if tiled else 256)
    with qwen3next_ggml.load() as model:
        model.tiles_experts = True
        for options, wanted in (({}, 768), ({"n_ubatch": 64}, 64), ({"n_ctx": 512}, 512), ({"checkpoint_every": 64}, 256), ({"flash_attn": False}, 256)):
            with model.session(**options) as s:
                assert s.n_ubatch == wanted, options
