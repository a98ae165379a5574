"""Recurrent states: one slot per sequence for each spec (level 6). Knows specs, no model."""

from collections.abc import Sequence

import numpy as np

from .. import ggml
from ..batch import UBatch
from ..ggml import types
from ..graph.state import RecurrentSpec, RecurrentState


class RecurrentMemory:
    """Own the conv windows and delta states; slot i belongs to sequence i."""

    def __init__(self, specs: Sequence[RecurrentSpec], n_seq_max: int):
        self.specs = tuple(specs)
        self.n_slots = n_seq_max
        self.states: dict[tuple[int, str], RecurrentState] = {}

    def nbytes_of(self, spec: RecurrentSpec) -> int:
        """Return the bytes of one spec's slots."""
        return 4 * spec.n_embd * self.n_slots

    def declare(self, ctx: ggml.Context, spec: RecurrentSpec) -> None:
        """Create one spec's tensor [n_embd, n_slots] in `ctx`."""
        x = ctx.new_tensor(types.F32, spec.n_embd, self.n_slots, name=f"cache_{spec.name}_l{spec.il}")
        self.states[spec.il, spec.name] = RecurrentState(spec, x)

    def head(self, seqs: Sequence[int]) -> int | None:
        """Return the first slot of `seqs` when they lie side by side in order, else None."""
        first = seqs[0]
        return first if tuple(seqs) == tuple(range(first, first + len(seqs))) else None

    def inputs(self, ubatch: UBatch) -> dict[str, np.ndarray]:
        """Return the slots a graph reads from and, where they are scattered, writes to."""
        slots = np.asarray(ubatch.seqs)
        return {"rs_s_copy": slots.astype(np.int32), "rs_s_dst": slots.astype(np.int64)}

    def clear(self, seq: int) -> None:
        """Write zeros over the slot of `seq`, whatever it held."""
        for state in self.states.values():
            row = state.all.nb[1]
            state.all.memset(0, seq * row, row)

    def read(self, il: int, name: str, seq: int) -> np.ndarray:
        """Return the state of `seq` in numpy order of its spec: conv [channels, d_conv − 1], delta [H, S_v, S_k]."""
        state = self.states[il, name]
        return state.all.get().reshape(self.n_slots, *state.spec.ne[::-1])[seq]
