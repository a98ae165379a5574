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
    return _scaled(g, g.mul_mat(_form(g, w, x), x), w)


def linears(g: GraphBuilder, weights: Sequence[ggml.Tensor], x: ggml.Tensor) -> list[ggml.Tensor]:
    """Project x with each of `weights` → [n_out, …] each: in one product where x is one column and they lie one behind the other."""
    if not g.stacks or not g.options.stacked_weights or x.nrows > 1:
        return [linear(g, w, x) for w in weights]
    forms = tuple(_form(g, w, x) for w in weights)
    found: list[ggml.Tensor] = []
    while (i := len(found)) < len(forms):
        stack = g.stacks.get(forms[i])
        if stack and forms[i : i + len(stack.parts)] == stack.parts:
            y = g.mul_mat(stack.whole, x)
            found += [g.view_2d(y, n_out, 1, stack.row_size, offset) for n_out, offset in stack.cuts]
        else:
            found.append(_scaled(g, g.mul_mat(forms[i], x), weights[i]))
    return found


def _scaled(g: GraphBuilder, y: ggml.Tensor, w: ggml.Tensor) -> ggml.Tensor:
    scale = g.scales.get(w) if g.scales else None
    return y if scale is None else g.mul(y, scale)


def _form(g: GraphBuilder, w: ggml.Tensor, x: ggml.Tensor) -> ggml.Tensor:
    """Return w, or the same rewritten where that is faster with the columns of x."""
    few = g.options.repacked_few and x.nrows <= FEW_COLUMNS
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
