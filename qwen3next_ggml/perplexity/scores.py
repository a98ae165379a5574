"""Log-probabilities, means and their standard errors, in float64 (level 11)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# values worked on at once: a large vocabulary in float64 would fill memory
BLOCK = 1 << 22


class Mean(NamedTuple):
    """A mean and its standard error."""

    value: float
    error: float


def mean(values: np.ndarray) -> Mean:
    """Return the mean of independent values; the error of a single one counts as 0."""
    n = len(values)
    return Mean(float(np.mean(values)), float(np.std(values) / np.sqrt(n - 1)) if n > 1 else 0.0)


def perplexity(nll: np.ndarray) -> Mean:
    """Return exp of the mean of negative log-likelihoods [n]."""
    value, error = mean(nll)
    return Mean(float(np.exp(value)), float(np.exp(value) * error))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities of logits [n, n_vocab] in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def blocks(rows: np.ndarray) -> Iterator[slice]:
    """Yield slices that cut rows [n, n_vocab] into parts of a bounded number of values."""
    step = max(1, BLOCK // rows.shape[-1])
    return (slice(i, i + step) for i in range(0, len(rows), step))


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return −log p of each row's target: logits [n, n_vocab], targets [n] → float64 [n]."""
    return np.concatenate([-chosen(log_softmax(logits[at]), targets[at]) for at in blocks(logits)])


def chosen(rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the entry of each row [n, n_vocab] that `targets` [n] names."""
    return np.take_along_axis(rows, targets[:, None], -1)[:, 0]
