"""The one way a projection enters a graph (level 5)."""

from collections.abc import Sequence

from .. import ggml
from .builder import GraphBuilder


def linear(g: GraphBuilder, w: ggml.Tensor, x: ggml.Tensor) -> ggml.Tensor:
    """Project x [n_in, …] with w [n_in, n_out] → [n_out, …], times w's own scale where the file has one.

    Mirrors llama.cpp's `build_lora_mm`.
    """
    y = g.mul_mat(w, x)
    scale = g.scales.get(w) if g.scales else None
    return y if scale is None else g.mul(y, scale)


def linears(g: GraphBuilder, weights: Sequence[ggml.Tensor], x: ggml.Tensor) -> list[ggml.Tensor]:
    """Project x with each of `weights` → [n_out, …] each: in one product where x is one column and they lie one behind the other."""
    if not g.stacks or not g.options.stacked_weights or x.ne[1:] != (1, 1, 1):
        return [linear(g, w, x) for w in weights]
    found, rest = [], tuple(weights)
    while rest:
        stack = g.stacks.get(rest[0])
        if stack and rest[: len(stack.parts)] == stack.parts:
            y = g.mul_mat(stack.whole, x)
            found += [g.view_2d(y, n_out, 1, stack.row_size, offset) for n_out, offset in stack.cuts]
            rest = rest[len(stack.parts) :]
        else:
            found.append(linear(g, rest[0], x))
            rest = rest[1:]
    return found


def linear_id(g: GraphBuilder, w: ggml.Tensor, x: ggml.Tensor, ids: ggml.Tensor) -> ggml.Tensor:
    """Project x [n_in, 1 or n_used, n_tokens] with the experts ids [n_used, n_tokens] of w → [n_out, n_used, n_tokens].

    Mirrors llama.cpp's `build_lora_mm_id`; a scale is one number per expert.
    """
    y = g.mul_mat_id(w, x, ids)
    scale = g.scales.get(w) if g.scales else None
    if scale is None:
        return y
    n_expert, n_tokens = w.ne[2], ids.ne[1]
    per_token = g.repeat_4d(g.reshape_3d(scale, 1, n_expert, 1), 1, n_expert, n_tokens, 1)
    return g.mul(y, g.get_rows(per_token, ids))  # [1, n_used, n_tokens] broadcasts over n_out
