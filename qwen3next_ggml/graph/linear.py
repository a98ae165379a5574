"""The one way a projection enters a graph (level 5)."""

from collections.abc import Sequence
from itertools import accumulate, groupby

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
    if not g.options.stacked_weights or x.ne[1] * x.ne[2] * x.ne[3] > 1:
        return [linear(g, w, x) for w in weights]
    found = []
    for whole, neighbours in groupby(weights, key=lambda w: w.view_src):
        run = list(neighbours)
        if not fills(whole, run) or any(w in g.scales for w in run):
            found += [linear(g, w, x) for w in run]
            continue
        y = g.mul_mat(whole, x)
        ends = accumulate(w.ne[1] for w in run)
        found += [g.view_2d(y, w.ne[1], 1, y.nb[1], y.type.row_size(end - w.ne[1])) for w, end in zip(run, ends)]
    return found


def fills(whole: ggml.Tensor | None, parts: Sequence[ggml.Tensor]) -> bool:
    """Say whether several `parts` are all the rows of `whole`, one behind the other as they come."""
    starts = accumulate((w.ne[1] for w in parts), initial=0)
    return (
        whole is not None and len(parts) > 1 and sum(w.ne[1] for w in parts) == whole.ne[1]
        and all(w.view_src == whole and w.view_offs == start * whole.nb[1] for w, start in zip(parts, starts))
    )  # fmt: skip


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
