"""The one way a projection enters a graph (level 5)."""

from collections.abc import Sequence

from .. import ggml
from .builder import GraphBuilder

# from here on ggml's tiled kernels overtake those over rewritten weights (docs/log.md)
FEW_COLUMNS = 32


def linear(g: GraphBuilder, w: ggml.Tensor, x: ggml.Tensor) -> ggml.Tensor:
    """Project x [n_in, …] with w [n_in, n_out] → [n_out, …], times w's own scale where the file has one.

    Mirrors llama.cpp's `build_lora_mm`.
    """
    y = g.mul_mat(_form(g, w, x), x)
    scale = g.scales.get(w) if g.scales else None
    return y if scale is None else g.mul(y, scale)


def linears(g: GraphBuilder, weights: Sequence[ggml.Tensor], x: ggml.Tensor) -> list[ggml.Tensor]:
    """Project x with each of `weights` → [n_out, …] each: in one product where x is one column and they lie one behind the other."""
    if not g.stacks or not g.options.stacked_weights or x.ne[1:] != (1, 1, 1):
        return [linear(g, w, x) for w in weights]
    found, rest = [], list(weights)
    while rest:
        stack = g.stacks.get(_form(g, rest[0], x))
        n = len(stack.parts) if stack else 1
        if stack and tuple(_form(g, w, x) for w in rest[:n]) == stack.parts:
            y = g.mul_mat(stack.whole, x)
            found += [g.view_2d(y, n_out, 1, stack.row_size, offset) for n_out, offset in stack.cuts]
        else:
            n = 1
            found.append(linear(g, rest[0], x))
        del rest[:n]
    return found


def _form(g: GraphBuilder, w: ggml.Tensor, x: ggml.Tensor) -> ggml.Tensor:
    """Return w, or the same rewritten where that is faster with the columns of x."""
    few = g.options.repacked_few and x.nelements <= FEW_COLUMNS * x.ne[0]
    return g.repacked.get(w, w) if few else w


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
