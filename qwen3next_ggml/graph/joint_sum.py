"""The sum at the end of a layer as one op: experts, shared expert and residual of one token, laid one behind the other (level 5)."""

from dataclasses import dataclass

import numpy as np

from .. import ggml
from .builder import GraphBuilder


@dataclass(frozen=True)
class JointSum:
    """Where a layer lays what it adds up: rows [n_embd, n_used + 2] of the experts, the shared one and the residual, and their weights
    [1, n_used + 2], of which the last is 1. All layers use the same memory in turns.
    """

    rows: ggml.Tensor
    weights: ggml.Tensor

    @classmethod
    def of(cls, g: GraphBuilder, hp, wb, n_columns: int) -> "JointSum | None":
        """Return one where the sum can be one op: of one column, with weights that nothing scales, and without patches, which may hold on
        to a value for a later layer.
        """
        can = n_columns == 1 and wb.ffn_up_shexp is not None and hp.expert_weights_scale in (0.0, 1.0) and not g.is_patched
        if not (can and g.options.joint_sum and g.options.expert_sum and g.options.top_k_first):
            return None
        n = hp.n_expert_used + 2
        return cls(g.scratch("ffn_sum_rows", hp.n_embd, n), g.input("ffn_sum_weights", np.ones((n, 1))))

    def lay_experts(self, g: GraphBuilder, down: ggml.Tensor, name: str, il: int) -> ggml.Tensor:
        """Lay and name the experts' outputs [n_embd, n_used, 1], a fresh node."""
        return _lay(g, down, self.rows, 0, name, il)

    def lay_weights(self, g: GraphBuilder, weights: ggml.Tensor, name: str, il: int) -> ggml.Tensor:
        """Lay and name their weights [n_used, 1]."""
        return _lay(g, weights, self.weights, 0, name, il)

    def lay_shared(self, g: GraphBuilder, out: ggml.Tensor, name: str, il: int) -> ggml.Tensor:
        """Lay and name the shared expert's output [n_embd, 1]."""
        return _lay(g, out, self.rows, self.rows.ne[1] - 2, name, il)

    def lay_gate(self, g: GraphBuilder, gate: ggml.Tensor, name: str, il: int) -> ggml.Tensor:
        """Lay and name its weight [1, 1]."""
        return _lay(g, gate, self.weights, self.weights.ne[1] - 2, name, il)

    def lay_residual(self, g: GraphBuilder, x: ggml.Tensor, name: str, il: int) -> ggml.Tensor:
        """Lay and name the residual [n_embd, 1]."""
        return _lay(g, x, self.rows, self.rows.ne[1] - 1, name, il)

    def sum(self, g: GraphBuilder) -> ggml.Tensor:
        """Add up what was laid → [n_embd, 1]."""
        return g.out_prod(self.rows, self.weights)


def _lay(g: GraphBuilder, x: ggml.Tensor, owner: ggml.Tensor, row: int, name: str, il: int) -> ggml.Tensor:
    x = g.name(g.into(x, owner, row * owner.nb[1]), name, il)
    g.expand(x)
    return x
