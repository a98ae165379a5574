"""Normalisations (level 5). GGUF norm weights are final: nothing is ever added to them."""

from math import sqrt

from .. import ggml
from .builder import GraphBuilder


def rms_norm(g: GraphBuilder, x: ggml.Tensor, weight: ggml.Tensor, eps: float, il: int) -> ggml.Tensor:
    """Normalise x [n, …] by its root mean square and scale by weight [n]. Mirrors llama.cpp's `build_norm`."""
    x = g.name(g.rms_norm(x, eps), "norm", il)
    return g.mul(x, weight)


def l2_norm(g: GraphBuilder, x: ggml.Tensor, n: int, eps: float) -> ggml.Tensor:
    """Return x·rsqrt(Σx² + eps) over its first axis of length n.

    Σx² + eps is n times the mean square plus eps/n, so an rms norm and a scale give it; ggml's own l2_norm divides
    by max(‖x‖, eps) instead.
    """
    return g.scale(g.rms_norm(x, eps / n), 1 / sqrt(n))


def gated_rms_norm(
    g: GraphBuilder, x: ggml.Tensor, weight: ggml.Tensor, gate: ggml.Tensor, eps: float, il: int
) -> ggml.Tensor:
    """Return rms_norm(x)·weight·silu(gate), all [S, H, n_tokens, n_seqs]."""
    normalized = rms_norm(g, x, weight, eps, il)
    return g.mul(normalized, g.silu(gate))
