"""How far a model's predictions are from saved ones: llama.cpp's statistics of KL divergence (level 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .logits_file import unpack
from .scores import Mean, blocks, chosen, log_softmax, mean, perplexity

# llama.cpp leaves tokens out that the base holds for less likely than exp of this
LEAST = -16.0
KLD_PERCENTILES = (100.0, 99.9, 99.0, 95.0, 90.0, 50.0, 10.0, 5.0, 1.0, 0.1, 0.0)
DELTA_P_PERCENTILES = (100.0, 99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1, 0.0)


@dataclass(frozen=True, eq=False)
class Comparison:
    """What was found at each prediction, all [n]: −log p of the target under both, the divergence, whether both rank the same token first."""

    nll: np.ndarray
    nll_base: np.ndarray
    kld: np.ndarray
    same_top: np.ndarray

    @property
    def delta_p(self) -> np.ndarray:
        """By how much the target is more likely than under the base."""
        return np.exp(-self.nll) - np.exp(-self.nll_base)


def join(parts: Sequence[Comparison]) -> Comparison:
    """Return several comparisons as one."""
    return Comparison(*map(np.concatenate, zip(*((p.nll, p.nll_base, p.kld, p.same_top) for p in parts))))


def compare(logits: np.ndarray, base: np.ndarray, targets: np.ndarray) -> Comparison:
    """Compare logits [n, n_vocab] with rows of a logits file [n, row_width]; targets [n]."""
    return join([_compare(logits[at], unpack(base[at], logits.shape[-1]), targets[at]) for at in blocks(logits)])


def _compare(logits: np.ndarray, log_base: np.ndarray, targets: np.ndarray) -> Comparison:
    log_p = log_softmax(logits)
    terms = np.exp(log_base) * (log_base - log_p)
    return Comparison(
        nll=-chosen(log_p, targets),
        nll_base=-chosen(log_base, targets),
        kld=terms.sum(-1, where=log_base > LEAST),
        same_top=log_p.argmax(-1) == log_base.argmax(-1),
    )


def statistics(found: Comparison) -> dict[str, Mean | float | dict[float, float]]:
    """Return llama.cpp's figures by name: means with their errors, the correlation, and values by percentile."""
    ppl, ppl_base = perplexity(found.nll), perplexity(found.nll_base)
    log_ratio = mean(found.nll - found.nll_base)
    delta_p = found.delta_p
    square = mean(delta_p**2)
    rms = float(np.sqrt(square.value))
    return {
        "ppl": ppl,
        "ppl_base": ppl_base,
        "log_ppl_correlation": _correlation(found.nll, found.nll_base),
        "log_ppl_ratio": log_ratio,
        "ppl_ratio": Mean(float(np.exp(log_ratio.value)), float(np.exp(log_ratio.value) * log_ratio.error)),
        # to first order a perplexity moves by itself times the move of its logarithm
        "ppl_difference": Mean(ppl.value - ppl_base.value, mean(ppl.value * found.nll - ppl_base.value * found.nll_base).error),
        "kld": mean(found.kld),
        "kld_percentiles": _percentiles(found.kld, KLD_PERCENTILES),
        "delta_p": mean(delta_p),
        "delta_p_percentiles": _percentiles(delta_p, DELTA_P_PERCENTILES),
        "delta_p_rms": Mean(rms, square.error / (2 * rms) if rms else 0.0),
        "same_top": mean(found.same_top),
    }


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    spread = np.std(a) * np.std(b)
    return float(np.mean((a - a.mean()) * (b - b.mean())) / spread) if spread else 0.0


def _percentiles(values: np.ndarray, wanted: Sequence[float]) -> dict[float, float]:
    return dict(zip(wanted, np.percentile(values, wanted).tolist()))
