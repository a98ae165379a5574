"""Recurrent states: a ring of snapshots per sequence (level 6). Knows specs, no model.

The state of sequence s after n tokens lies in slot s·K + n mod K, K = n_rollback + 1, so going back is a matter of
reading another slot. Behind the rings lie staging slots for states taken in the middle of a ubatch.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from .. import ggml
from ..batch import UBatch
from ..ggml import types
from ..graph.inputs import rows_input
from ..graph.state import RecurrentSpec, RecurrentState


class RecurrentMemory:
    """Own the conv windows and delta states of `n_seq_max` sequences, with `n_rollback` older ones of each."""

    def __init__(self, specs: Sequence[RecurrentSpec], n_seq_max: int, *, n_rollback: int = 0, n_staging: int = 0):
        self.specs = tuple(specs)
        self.ring = n_rollback + 1
        self.n_staging = n_staging
        self._first_staging = n_seq_max * self.ring
        self.n_slots = self._first_staging + n_staging
        self.states: dict[tuple[int, str], RecurrentState] = {}
        self._views: dict[tuple[int, str], list[ggml.Tensor]] = {}
        # a ring has few turns, and its rows are asked for at every step
        self._known_rows = lru_cache(maxsize=64)(self._rows)
        # the oldest token count of each sequence whose state is still in its ring
        self.oldest = [0] * n_seq_max

    def nbytes_of(self, spec: RecurrentSpec) -> int:
        """Return the bytes of one spec's slots."""
        return 4 * spec.row * spec.n_slot_rows * self.n_slots

    def n_tensors_of(self, spec: RecurrentSpec) -> int:
        """Return how many tensor structs one spec needs: itself and a view of each slot."""
        return 1 + self.n_slots

    def declare(self, ctx: ggml.Context, spec: RecurrentSpec) -> None:
        """Create one spec's tensor [row, n_slot_rows · n_slots] in `ctx`."""
        x = ctx.new_tensor(types.F32, spec.row, spec.n_slot_rows * self.n_slots, name=f"cache_{spec.name}_l{spec.il}")
        self.states[spec.il, spec.name] = RecurrentState(spec, x)

    def bind(self, ctx: ggml.Context) -> None:
        """Make a view of every slot of the states that live in `ctx`, once these have memory."""
        g = ggml.Ops(ctx)
        for at, state in self.states.items():
            if state.all.context is ctx:
                self._views[at] = [g.view_1d(state.all, state.spec.n_embd, state.start(i)) for i in range(self.n_slots)]

    # slots

    def slot(self, seq: int, n_past: int) -> int:
        """Return the slot that holds the state of `seq` after `n_past` tokens."""
        return seq * self.ring + n_past % self.ring

    def head(self, seqs: Sequence[int]) -> int | None:
        """Return the first slot of `seqs` when they lie side by side for good, else None."""
        first = seqs[0]
        return first if self.ring == 1 and tuple(seqs) == tuple(range(first, first + len(seqs))) else None

    def keep(self, n_tokens: int, marks: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the token counts of a ubatch after which states are kept, newest first; empty for the last alone."""
        ring = range(max(n_tokens - self.ring, 0) + 1, n_tokens + 1)
        kept = tuple(sorted({*ring, *marks}, reverse=True))
        return () if kept == (n_tokens,) else kept

    def inputs(self, ubatch: UBatch, n_past: Sequence[int], kept: Sequence[int], marks: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the rows a graph reads states from and writes them to, for every way of cutting states into rows."""
        src = tuple(self.slot(s, n_past[s]) for s in ubatch.seqs)
        dst = tuple(self.slot_after(s, n_past[s], t, ubatch.n_seq_tokens, marks) for t in kept for s in ubatch.seqs)
        return self._known_rows(src, dst)

    def inputs_of_one(self, seq: int, n_past: int) -> dict[str, np.ndarray]:
        """Return the same for one more token of `seq`; the arrays are the same objects whenever the rows are."""
        return self._known_rows((self.slot(seq, n_past),), (self.slot(seq, n_past + 1),))

    def _rows(self, src: tuple[int, ...], dst: tuple[int, ...]) -> dict[str, np.ndarray]:
        found = {}
        for n_rows, n_ahead in {(1, 0), *((s.n_rows, s.n_ahead) for s in self.specs)}:
            offsets = n_ahead + np.arange(n_rows)
            found[rows_input("rs_s_copy", n_rows)] = (np.array(src)[:, None] * (n_ahead + n_rows) + offsets).reshape(-1).astype(np.int32)
            found[rows_input("rs_s_dst", n_rows)] = (np.array(dst)[:, None] * (n_ahead + n_rows) + offsets).reshape(-1)
        return found

    def slot_after(self, seq: int, n_past: int, t: int, n_tokens: int, marks: Sequence[int]) -> int:
        """Return where the state after `t` tokens of a ubatch goes: the ring if it ends up there, else staging."""
        if t > n_tokens - self.ring:
            return self.slot(seq, n_past + t)
        return self._first_staging + list(marks).index(t)

    # moving

    def applied(self, seq: int, n_past: int) -> None:
        """Note that states up to `n_past` tokens are in place; the ring forgets what they overwrote."""
        self.oldest[seq] = max(self.oldest[seq], n_past - self.ring + 1)

    def survives(self, seq: int, n_past: int, n_tokens: int) -> bool:
        """Say whether the state after `n_past` tokens is untouched by a run of `n_tokens` more that failed half-way."""
        if n_tokens >= self.ring:
            return not self.specs
        self.oldest[seq] = max(self.oldest[seq], n_past + n_tokens - self.ring + 1)
        return True

    def clear(self, seq: int) -> None:
        """Write zeros over the state `seq` starts from, whatever was there."""
        for views in self._views.values():
            views[self.slot(seq, 0)].memset(0)
        self.oldest[seq] = 0

    def fork(self, src: int, dst: int) -> None:
        """Copy all snapshots of `src` to `dst`."""
        for views in self._views.values():
            for i in range(self.ring):
                views[dst * self.ring + i].set(views[src * self.ring + i].get())
        self.oldest[dst] = self.oldest[src]

    # values

    def snapshot(self, slot: int) -> dict[tuple[int, str], np.ndarray]:
        """Copy one slot of every state to the host, flat float32."""
        return {at: views[slot].get() for at, views in self._views.items()}

    def restore(self, seq: int, n_past: int, values: Mapping[tuple[int, str], np.ndarray]) -> None:
        """Put a snapshot back as the state of `seq` after `n_past` tokens; all others are forgotten."""
        for at, views in self._views.items():
            views[self.slot(seq, n_past)].set(values[at])
        self.oldest[seq] = n_past

    def restore_ring(self, seq: int, snapshots: Mapping[int, Mapping[tuple[int, str], np.ndarray]]) -> None:
        """Put snapshots back as the states of `seq` after adjacent token counts, as many as the ring holds."""
        for n_past in sorted(snapshots)[-self.ring :]:
            self.restore(seq, n_past, snapshots[n_past])
        self.oldest[seq] = max(min(snapshots), max(snapshots) - self.ring + 1)

    def kept(self, seq: int, n_past: int) -> range:
        """Return the token counts of `seq`, which holds `n_past`, whose states are in its ring."""
        return range(self.oldest[seq], n_past + 1)

    def read(self, il: int, name: str, slot: int) -> np.ndarray:
        """Return a state in numpy order of its spec: conv [channels, d_conv − 1], delta [H, S_v, S_k]."""
        return self._views[il, name][slot].get().reshape(self.states[il, name].spec.ne[::-1])

    def non_finite(self, seq: int, n_past: int) -> Iterable[int]:
        """Return the layers whose state of `seq` after `n_past` tokens holds NaN or infinity."""
        slot = self.slot(seq, n_past)
        return sorted({il for (il, _), views in self._views.items() if not np.isfinite(views[slot].get()).all()})
