"""Whether two sides compute the same thing in a configuration; without that a speed says nothing.

Both get the same prompt and the same tokens after it, so that one near-tie does not lead them apart.
"""

from dataclasses import dataclass

import numpy as np

# how far above the limit one row may lie: a router that chose another of two equal experts moves its own row alone
WORST = 10


@dataclass(frozen=True)
class Equivalence:
    """How close the logits of two sides are, row by row [n, n_vocab]."""

    nmse: float
    max_nmse: float
    top1_agreement: float
    limit: float
    n_rows: int

    @property
    def passed(self) -> bool:
        return self.nmse <= self.limit and self.max_nmse <= WORST * self.limit and self.top1_agreement == 1.0

    def __str__(self) -> str:
        return f"NMSE {self.nmse:.1e} (limit {self.limit:.0e}), top-1 agreement {self.top1_agreement:.1%} of {self.n_rows}"


def compare(a: np.ndarray, b: np.ndarray, limit: float) -> Equivalence:
    """Compare our logits a with theirs b.

    A top-1 that differs counts as agreeing where their own lead is a near-tie: within three standard deviations of what the
    errors of that row make two of its values move apart.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return Equivalence(float("inf"), float("inf"), 0.0, limit, len(b))
    error, size = ((a - b) ** 2).sum(-1), (b**2).sum(-1)
    lead = b.max(-1) - np.take_along_axis(b, a.argmax(-1)[:, None], -1)[:, 0]
    agree = lead <= 3 * (2 * error / b.shape[-1]) ** 0.5
    return Equivalence(float(error.sum() / size.sum()), float((error / size).max()), float(agree.mean()), limit, len(b))


def limit_between(ours, theirs, loose: float) -> float:
    """Return the NMSE allowed between the logits of two EngineConfigs; `loose` is what other kernels may do to this file.

    llama.cpp's own graph on the same libggml and the same weights must give its numbers. Everything else adds in another order,
    and quantised products round their activations: a last-bit difference of 1e-13 was seen to end as 2e-4 after one rounding
    fell the other way.
    """
    same_kernels = (
        ours.provider == "llama_cpp" and ours.graph == "plain" and not ours.repack and not theirs.repack
        and (ours.flash_attn, ours.tiled, ours.n_ubatch) == (theirs.flash_attn, theirs.tiled, theirs.n_ubatch)
    )  # fmt: skip
    return 1e-6 if same_kernels else loose
