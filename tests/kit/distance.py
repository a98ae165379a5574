"""How far two results are apart, and when two greedy texts count as the same."""

import numpy as np


def max_abs(a, b):
    """Return the largest absolute difference; shapes must be equal, a NaN anywhere gives NaN, equal infinities count as equal."""
    a, b = _pair(a, b)
    with np.errstate(invalid="ignore"):
        difference = np.where(a == b, 0.0, np.abs(a - b))
    return float(difference.max(initial=0.0))


def nmse(got, want):
    """Return the squared error relative to the squared size of `want`, as ggml's test-backend-ops does."""
    got, want = _pair(got, want)
    return float(np.sum((got - want) ** 2) / max(np.sum(want**2), np.finfo(np.float64).tiny))


def top2_gap(logits):
    """Return by how much the largest of the last axis leads the second largest."""
    top = np.partition(np.asarray(logits, np.float64), -2, axis=-1)
    return top[..., -1] - top[..., -2]


def assert_same_greedy(got, want, gaps, *, tie=1e-3):
    """Fail unless two greedy runs agree up to a near-tie.

    got, want: token ids; gaps: the top-2 gap of the logits each token of `want` was taken from. After a first difference the runs
    see different text, so it ends the comparison, and passes only where the gap was below `tie`.
    """
    assert len(got) == len(want) == len(gaps), f"{len(got)} tokens against {len(want)} with {len(gaps)} gaps"
    for i, (g, w, gap) in enumerate(zip(got, want, gaps)):
        if g != w:
            assert gap < tie, f"token {i}: got {g}, want {w}, where the first led the second by {gap:.3g}"
            return


def _pair(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, f"shapes differ: {a.shape} and {b.shape}"
    return a, b
