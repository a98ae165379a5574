"""Mixture of experts with a gated shared expert (level 5)."""

from math import inf

from .. import ggml
from ..ggml.ops import SORT_DESC
from .builder import GraphBuilder, expect_shape
from .joint_sum import JointSum, lay
from .linear import linear, linear_id, linears

# the smallest normal float16: a weight sum never divides by less
WEIGHT_SUM_MIN = 6.103515625e-5


def route(g: GraphBuilder, hp, logits: ggml.Tensor, il: int, joint: JointSum | None = None) -> tuple[ggml.Tensor, ggml.Tensor]:
    """Pick experts by logits [n_expert, n_tokens] → ids [n_used, n_tokens], weights [1, n_used, n_tokens] that sum to 1.

    A softmax over all experts, its n_used largest, renormalised.
    """
    n_expert, n_used, n_tokens = hp.n_expert, hp.n_expert_used, logits.ne[1]
    logits = g.name(logits, "ffn_moe_logits", il)
    if g.options.top_k_first:
        # renormalising cancels the softmax's denominator, so a softmax over the picked logits is the same number
        ids = lay(g, joint, g.top_k(logits, n_used), "ffn_moe_topk", il)
        picked = g.get_rows(g.reshape_3d(logits, 1, n_expert, n_tokens), ids)  # [1, n_used, n_tokens]
        weights = g.soft_max(g.reshape_2d(picked, n_used, n_tokens))
        weights = lay(g, joint, weights, "ffn_moe_weights_norm", il)
    else:
        probs = g.name(g.soft_max(logits), "ffn_moe_probs", il)
        order = g.argsort(probs, SORT_DESC)
        ids = g.view_4d(order, n_used, *order.ne[1:], *order.nb[1:], 0)
        g.name(order, "ffn_moe_argsort", il)
        ids = g.name(ids, "ffn_moe_topk", il)
        picked = g.get_rows(g.reshape_3d(probs, 1, n_expert, n_tokens), ids)
        weights = g.reshape_2d(g.name(picked, "ffn_moe_weights", il), n_used, n_tokens)
        total = g.name(g.sum_rows(weights), "ffn_moe_weights_sum", il)  # [1, n_tokens]
        total = g.name(g.clamp(total, WEIGHT_SUM_MIN, inf), "ffn_moe_weights_sum_clamped", il)
        weights = g.name(g.div(weights, total), "ffn_moe_weights_norm", il)
    weights = g.reshape_3d(weights, 1, n_used, n_tokens)
    if hp.expert_weights_scale not in (0.0, 1.0):
        weights = g.name(g.scale(weights, hp.expert_weights_scale), "ffn_moe_weights_scaled", il)
    g.expand(weights)
    return ids, weights


def experts(g: GraphBuilder, wb, x: ggml.Tensor, ids: ggml.Tensor, il: int, joint: JointSum | None = None) -> ggml.Tensor:
    """Run the picked experts' SwiGLU on x [n_embd, n_tokens] → [n_embd, n_used, n_tokens]."""
    n_embd, n_tokens = x.ne[0], x.ne[1]
    x = g.reshape_3d(x, n_embd, 1, n_tokens)
    whole = wb.ffn_gate_up_exps or _gate_up(g, wb)
    if whole is not None:
        both = linear_id(g, whole, x, ids)  # [2·n_ff, n_used, n_tokens]
        if wb.ffn_gate_up_exps is not None:
            both = g.name(both, "ffn_moe_gate_up", il)
        gate, up = _halves(g, both)
        gate, up = g.name(gate, "ffn_moe_gate", il), g.name(up, "ffn_moe_up", il)
    else:
        up = g.name(linear_id(g, wb.ffn_up_exps, x, ids), "ffn_moe_up", il)  # [n_ff, n_used, n_tokens]
        gate = g.name(linear_id(g, wb.ffn_gate_exps, x, ids), "ffn_moe_gate", il)
    hidden = g.name(g.swiglu_split(gate, up), "ffn_moe_swiglu", il)
    return lay(g, joint, linear_id(g, wb.ffn_down_exps, hidden, ids), "ffn_moe_down", il)


def _halves(g: GraphBuilder, both: ggml.Tensor) -> tuple[ggml.Tensor, ggml.Tensor]:
    """Cut both [2·n_ff, n_used, n_tokens] into gate and up [n_ff, n_used, n_tokens]."""
    n_ff2, n_used, n_tokens, _ = both.ne
    nb0, nb1, nb2, _ = both.nb
    gate, up = (g.view_3d(both, n_ff2 // 2, n_used, n_tokens, nb1, nb2, offset) for offset in (0, n_ff2 // 2 * nb0))
    return gate, up


def _gate_up(g: GraphBuilder, wb) -> ggml.Tensor | None:
    """Return gate and up weights of all experts as one, where that is how they lie."""
    stack = g.stacks.get(wb.ffn_gate_exps) if g.options.stacked_weights else None
    return stack.whole if stack and stack.parts == (wb.ffn_gate_exps, wb.ffn_up_exps) else None


def moe(g: GraphBuilder, hp, wb, x: ggml.Tensor, logits: ggml.Tensor, il: int) -> ggml.Tensor:
    """Return the sum of the experts of x [n_embd, n_tokens] that `logits` [n_expert, n_tokens] pick. Mirrors `build_moe_ffn`."""
    n_embd, n_tokens = x.ne[0], x.ne[1]
    n_used = hp.n_expert_used
    ids, weights = route(g, hp, logits, il)
    down = experts(g, wb, x, ids, il)  # [n_embd, n_used, n_tokens]
    if g.options.expert_sum:
        out = g.out_prod(down, weights)  # [n_embd, 1, n_tokens]
        return g.name(g.reshape_2d(out, n_embd, n_tokens), "ffn_moe_out", il)

    weighted = g.name(g.mul(down, weights), "ffn_moe_weighted", il)
    g.expand(weighted)
    _, nb1, nb2, _ = weighted.nb
    parts = [g.view_2d(weighted, n_embd, n_tokens, nb2, i * nb1) for i in range(n_used)]
    for part in parts:
        g.expand(part)
    out = parts[0]
    for part in parts[1:]:
        out = g.add(out, part)
        g.expand(out)
    if n_used == 1:
        out = g.cont(out)
    return g.name(out, "ffn_moe_out", il)


def gate_logits(g: GraphBuilder, wb, x: ggml.Tensor) -> tuple[ggml.Tensor, ggml.Tensor | None]:
    """Return what x [n_embd, n_tokens] gives each expert [n_expert, n_tokens] and the shared one, where there is one [1, n_tokens]."""
    if wb.ffn_up_shexp is None:
        return linear(g, wb.ffn_gate_inp, x), None
    logits, open_ = linears(g, (wb.ffn_gate_inp, wb.ffn_gate_inp_shexp), x)
    return logits, open_


def shared_expert(g: GraphBuilder, wb, x: ggml.Tensor, open_: ggml.Tensor, il: int, *, prefix: str = "") -> ggml.Tensor:
    """Run the shared expert on x [n_embd, n_tokens], scaled by the sigmoid of open_ [1, n_tokens].

    `prefix` goes before the names llama.cpp spells otherwise in its MTP graph.
    """
    out = g.name(_shared(g, wb, x, il), f"{prefix}ffn_shexp", il)
    open_ = g.name(g.sigmoid(g.name(open_, "shared_expert_gate", il)), f"{prefix}shared_expert_gate_sigmoid", il)
    return g.name(g.mul(out, open_), f"{prefix}ffn_shexp_gated", il)


def _shared(g: GraphBuilder, wb, x: ggml.Tensor, il: int) -> ggml.Tensor:
    gate, up = linears(g, (wb.ffn_gate_shexp, wb.ffn_up_shexp), x)
    up, gate = g.name(up, "ffn_up", il), g.name(gate, "ffn_gate", il)
    hidden = g.name(g.swiglu_split(gate, up), "ffn_swiglu", il)
    return linear(g, wb.ffn_down_shexp, hidden)


def joint_ffn(g: GraphBuilder, hp, wb, x: ggml.Tensor, joint: JointSum, il: int) -> ggml.Tensor:
    """Return routed plus shared experts of x [n_embd, 1], plus the residual that `joint` holds."""
    logits, open_ = gate_logits(g, wb, x)
    ids, _ = route(g, hp, logits, il, joint)
    if joint.ids is None:
        experts(g, wb, x, ids, il, joint)
        lay(g, joint, _shared(g, wb, x, il), "ffn_shexp", il)
    else:
        _experts_and_shared(g, wb, x, joint, il)
    lay(g, joint, g.sigmoid(g.name(open_, "shared_expert_gate", il)), "shared_expert_gate_sigmoid", il)
    return joint.sum(g)


def _experts_and_shared(g: GraphBuilder, wb, x: ggml.Tensor, joint: JointSum, il: int) -> None:
    """Run the picked experts and behind them the shared one on x [n_embd, 1], and lay what they give where `joint` adds it up."""
    both = g.mul_mat_id(joint.gate_up, g.reshape_3d(x, x.ne[0], 1, 1), joint.ids)  # [2·n_ff, n_used + 1, 1]
    gate, up = _halves(g, both)
    if wb.ffn_gate_up_exps is not None:
        _name_rows(g, both, "ffn_moe_gate_up", None, il)
    _name_rows(g, up, "ffn_moe_up", "ffn_up", il)
    _name_rows(g, gate, "ffn_moe_gate", "ffn_gate", il)
    hidden = g.swiglu_split(gate, up)  # [n_ff, n_used + 1, 1]
    _name_rows(g, hidden, "ffn_moe_swiglu", "ffn_swiglu", il)
    down = g.into(g.mul_mat_id(joint.down, hidden, joint.ids), joint.rows, 0)  # [n_embd, n_used + 1, 1]
    _name_rows(g, down, "ffn_moe_down", "ffn_shexp", il)


def _name_rows(g: GraphBuilder, x: ggml.Tensor, picked: str, shared: str | None, il: int) -> None:
    """Name the rows of x [n, n_used + 1, 1] that llama.cpp has as two values, so that they are found under its names."""
    n, n_rows, _, _ = x.ne
    _, nb1, nb2, _ = x.nb
    g.expand(g.name(g.view_3d(x, n, n_rows - 1, 1, nb1, nb2, 0), picked, il))
    if shared:
        g.expand(g.name(g.view_2d(x, n, 1, nb1, (n_rows - 1) * nb1), shared, il))


def moe_ffn(g: GraphBuilder, hp, wb, x: ggml.Tensor, il: int) -> ggml.Tensor:
    """Return routed plus shared experts of x [n_embd, n_tokens]. Mirrors llama.cpp's `build_layer_ffn`."""
    expect_shape(x, f"feed-forward layer {il}", hp.n_embd, 0)
    logits, open_ = gate_logits(g, wb, x)
    out = g.name(moe(g, hp, wb, x, logits, il), "ffn_moe_out", il)
    if open_ is None:
        return out
    return g.name(g.add(out, shared_expert(g, wb, x, open_, il)), "ffn_out", il)
