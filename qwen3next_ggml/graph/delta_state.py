"""Between the delta rule and the states memory keeps: read before, write after, or run where they lie (level 5)."""

from .. import ggml
from .builder import GraphBuilder
from .inputs import Inputs
from .state import RecurrentState


def read_state(g: GraphBuilder, inp: Inputs, delta: RecurrentState, il: int) -> ggml.Tensor:
    """Return the states of the ubatch's sequences as the delta rule wants them [S, S, H_v, n_seqs]."""
    S, _, H_v = delta.spec.ne
    return g.name(g.reshape_4d(delta.read(g, inp), S, S, H_v, inp.sizes.n_seqs), "state_predelta", il)


def write_states(g: GraphBuilder, inp: Inputs, delta: RecurrentState, states: list[ggml.Tensor], il: int) -> None:
    """Write `states`, newest first, each tensor with any number of them on its last axis, to the slots of the sequences."""
    first = 0
    for new in states:
        new = g.name(new, "new_state", il)
        delta.write(g, inp, new, first)
        first += new.ne[3]


def is_in_place(g: GraphBuilder, inp: Inputs, delta: RecurrentState, n_out: int) -> bool:
    """Say whether the op can run where the states lie: one token of each sequence, `n_out` elements of output, no history kept."""
    sizes = inp.sizes
    return (
        g.options.state_in_place and g.options.delta_net == "fused" and sizes.n_seq_tokens == 1 and not sizes.keep
        and delta.room_for(inp, n_out)
    )  # fmt: skip


def delta_net_in_place(
    g: GraphBuilder, inp: Inputs, delta: RecurrentState, q: ggml.Tensor, k: ggml.Tensor, v: ggml.Tensor, gate: ggml.Tensor,
    beta: ggml.Tensor,
) -> ggml.Tensor:  # fmt: skip
    """Run the delta rule for one token of each sequence, new states over old ones → output [S, H_v, 1, n_seqs].

    The fused op returns its output and behind it the new state: with the output in the room in front of the old state, the new one
    falls on it. The op reads a state before it writes it, head by head.
    """
    S, H_v, _, n_seqs = v.ne
    size = v.type.row_size
    n_out, starts = size(S * H_v), [delta.start(inp.sizes.rs_head + i) for i in range(n_seqs)]
    for i, at in enumerate(starts):
        past = g.view_4d(delta.all, S, S, H_v, 1, size(S), size(S * S), size(S * S * H_v), at)
        part = (g.view_4d(x, *x.ne[:3], 1, *x.nb[1:], i * x.nb[3]) for x in (q, k, v, gate, beta))
        both = g.into(g.gated_delta_net(*part, past, 1), delta.all, at - n_out)
        g.expand(both)
    if n_seqs == 1:
        return g.view_4d(both, S, H_v, 1, 1, size(S), n_out, n_out, 0)
    return g.view_4d(delta.all, S, H_v, 1, n_seqs, size(S), n_out, starts[1] - starts[0], starts[0] - n_out)
