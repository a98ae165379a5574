"""The sum at the end of a layer as one op: experts, shared expert and residual of one token, laid one behind the other (level 5)."""

from dataclasses import dataclass

import numpy as np

from .. import ggml
from .builder import GraphBuilder

# value → where it lies: from which row on, of the rows, their weights or ids
PLACES = {
    "ffn_moe_down": ("rows", 0), "ffn_shexp": ("rows", -2), "attn_residual": ("rows", -1),
    "ffn_moe_weights_norm": ("weights", 0), "shared_expert_gate_sigmoid": ("weights", -2), "ffn_moe_topk": ("ids", 0),
}  # fmt: skip


@dataclass(frozen=True)
class JointSum:
    """Where a layer lays what it adds up: rows [n_embd, n_used + 2] of the experts, the shared one and the residual, and their weights
    [1, n_used + 2], of which the last is 1. All layers use the same memory in turns.

    Where the shared expert's matrices lie behind those of the others it runs as one of them: `gate_up` and `down` are all, `ids`
    [n_used + 1, 1] ends with its number. Else these are None.
    """

    rows: ggml.Tensor
    weights: ggml.Tensor
    gate_up: ggml.Tensor | None = None
    down: ggml.Tensor | None = None
    ids: ggml.Tensor | None = None

    @classmethod
    def of(cls, g: GraphBuilder, hp, wb, n_columns: int) -> "JointSum | None":
        """Return one where the sum can be one op: of one column, with weights that nothing scales, and without patches, which may hold on
        to a value for a later layer.
        """
        can = n_columns == 1 and wb.ffn_up_shexp is not None and hp.expert_weights_scale in (0.0, 1.0) and not g.is_patched
        if not (can and g.options.joint_sum and g.options.expert_sum and g.options.top_k_first):
            return None
        n = hp.n_expert_used + 2
        rows, weights = g.scratch("ffn_sum_rows", hp.n_embd, n), g.input("ffn_sum_weights", np.ones((n, 1)))
        gate_up, down = g.one_more.get(wb.ffn_gate_up_exps or wb.ffn_gate_exps), g.one_more.get(wb.ffn_down_exps)
        if not g.options.shared_as_expert or gate_up is None or down is None:
            return cls(rows, weights)
        return cls(rows, weights, gate_up, down, g.input("ffn_sum_ids", np.full((1, n - 1), hp.n_expert)))

    def sum(self, g: GraphBuilder) -> ggml.Tensor:
        """Add up what was laid → [n_embd, 1]."""
        return g.out_prod(self.rows, self.weights)


def lay(g: GraphBuilder, joint: JointSum | None, x: ggml.Tensor, name: str, il: int) -> ggml.Tensor:
    """Name a fresh node and, where there is a joint sum with a place for the name, let it lie there."""
    field, row = PLACES[name]
    owner = getattr(joint, field) if joint else None
    if owner is None:
        return g.name(x, name, il)
    x = g.name(g.into(x, owner, row % owner.ne[1] * owner.nb[1]), name, il)
    g.expand(x)
    return x
