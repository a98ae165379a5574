"""Going back, copying and breaking the state of a sequence: afterwards nobody can tell, or a sentence says so."""

from itertools import product

import numpy as np
import pytest

import qwen3next_ggml
from qwen3next_ggml.errors import NonFinite, StateError
from tests.kit import max_abs, reference_of

TOLERANCE = 1e-4
TEXT = np.random.default_rng(21).integers(0, 96, 140).tolist()
OTHER = np.random.default_rng(22).integers(0, 96, 140).tolist()
WRONG = 96  # a token neither text has
PATHS = list(product(("fused", "chunked", "autoregressive"), ("plain", "lean")))


@pytest.fixture(scope="module")
def model(toys):
    with qwen3next_ggml.load(toys.t0, n_threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def want(toys):
    """Logits after every token of TEXT."""
    return reference_of(toys.t0).decode(TEXT)


def options(delta_net="fused", graph="lean", **more):
    return dict(n_ctx=512, type_k="f32", type_v="f32", flash_attn=False, delta_net=delta_net, graph=graph, n_ubatch=64) | more


def states(session, seq):
    return [x for il in range(3) for x in session.state(il, seq).values()]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("delta_net, graph", PATHS)
def test_rejected_drafts_leave_no_trace(model, want, delta_net, graph):
    """C43: m tokens in one batch of which the last r are wrong, r taken back, then the text goes on."""
    with model.session(**options(delta_net, graph, n_rollback=4, n_seq_max=2)) as s:
        s.decode(OTHER[:9], seq=1)
        bystander = states(s, 1)
        for m in range(1, 6):
            for r in range(1, min(m, 4) + 1):
                s.clear(0)
                s.decode(TEXT[:10])
                right = 10 + m - r
                s.decode(TEXT[10:right] + [WRONG] * r)
                s.rewind(0, n=r)
                assert s.n_past(0) == right
                for at in range(right, right + 3):
                    assert max_abs(s.decode([TEXT[at]])[0], want[at]) < TOLERANCE, f"{m} tokens, {r} taken back, token {at}"
        assert equal(states(s, 1), bystander)


def test_not_going_back_is_seen(model, want):
    with model.session(**options(n_rollback=4)) as s:
        s.decode(TEXT[:10] + [WRONG])
        assert max_abs(s.decode([TEXT[10]])[0], want[10]) > 100 * TOLERANCE


def test_going_back_further_than_kept_is_refused(model, want):
    with model.session(**options(n_rollback=2)) as s:
        s.decode(TEXT[:20])
        before = states(s, 0)
        with pytest.raises(StateError):
            s.rewind(0, n=3)
        assert s.n_past(0) == 20 and equal(states(s, 0), before)
        assert max_abs(s.decode([TEXT[20]])[0], want[20]) < TOLERANCE
        s.rewind(0, n=21)
        assert max_abs(s.decode(TEXT[:5])[0], want[4]) < TOLERANCE


@pytest.mark.parametrize("delta_net, graph", PATHS)
def test_forks_part(model, want, delta_net, graph):
    with model.session(**options(delta_net, graph, n_seq_max=3, n_rollback=2)) as s:
        s.decode(TEXT[:70])
        s.fork(0, dst=2)
        s.decode([WRONG, WRONG], seq=0)
        assert max_abs(s.decode(TEXT[70:75], seq=2)[0], want[74]) < TOLERANCE
        s.rewind(0, n=2)
        assert max_abs(s.decode(TEXT[70:75], seq=0)[0], want[74]) < TOLERANCE
        s.clear(0)
        assert max_abs(s.decode(TEXT[75:78], seq=2)[0], want[77]) < TOLERANCE


def test_prompt_reuses_what_it_can(model, want):
    with model.session(**options(n_rollback=2)) as s:
        assert max_abs(s.prompt(TEXT[:70])[0], want[69]) < TOLERANCE and s.last_evaluated == 70
        assert max_abs(s.prompt(TEXT[:80])[0], want[79]) < TOLERANCE and s.last_evaluated == 10
        s.decode([WRONG])
        assert max_abs(s.prompt(TEXT[:81])[0], want[80]) < TOLERANCE and s.last_evaluated == 1
        s.prompt(OTHER[:30])
        assert max_abs(s.prompt(TEXT[:40])[0], want[39]) < TOLERANCE and s.last_evaluated == 40


def break_state(session, seq, value):
    """Put one bad number into layer 1's delta state of a sequence."""
    recurrent, n_past = session.memory.recurrent, session.n_past(seq)
    values = recurrent.snapshot(recurrent.slot(seq, n_past))
    values[1, "s"][5] = value
    recurrent.restore(seq, n_past, values)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_nan_stays_where_it_is(model, want, bad, flash_attn):
    """C40: the sentence names layer and sequence, the other sequence goes on, a cleared one is as new.

    The broken step writes more cells than the next good one, so bad K and V lie among the cells that one must not see.
    """
    with model.session(**options(n_seq_max=2, flash_attn=flash_attn)) as s:
        s.decode_batch({0: TEXT[:20], 1: TEXT[:20]})
        break_state(s, 1, bad)
        with pytest.raises(NonFinite, match="sequence 1.*layer 1"):
            s.decode(TEXT[20:25], seq=1)
        assert max_abs(s.decode([TEXT[20]], seq=0)[0], want[20]) < TOLERANCE
        s.clear(1)
        assert max_abs(s.decode(TEXT[:20], seq=1)[0], want[19]) < TOLERANCE
        assert max_abs(s.decode([TEXT[21]], seq=0)[0], want[21]) < TOLERANCE
