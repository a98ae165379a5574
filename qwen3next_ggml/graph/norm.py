"""Normalisations (level 5). GGUF norm weights are final: nothing is ever added to them."""

from math import sqrt

import numpy as np

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
    if g.options.joint_qk:
        # a norm and a multiplication by a vector are one kernel
        return g.mul(g.rms_norm(x, eps / n), g.input("l2_norm_scale", np.full(n, 1 / sqrt(n), np.float32)))
    return g.scale(g.rms_norm(x, eps / n), 1 / sqrt(n))


def gated_rms_norm(
    g: GraphBuilder, x: ggml.Tensor, weight: ggml.Tensor, gate: ggml.Tensor, eps: float, il: int
) -> ggml.Tensor:
    """Return rms_norm(x)·weight·silu(gate) [S, H, n_tokens, n_seqs]; the axes of x after the first may be cut otherwise."""
    normalized = rms_norm(g, x, weight, eps, il)
    if normalized.ne != gate.ne:
        normalized = g.reshape_4d(normalized, *gate.ne)
    if g.options.fewer_conts:
        return g.swiglu_split(gate, normalized)
    return g.mul(normalized, g.silu(gate))
