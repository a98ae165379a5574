"""All that lives between two graph runs: KV cells and recurrent slots under one cursor per sequence (level 6).

The rule of divergence: state is reused only when new tokens extend the old ones, or from a snapshot at or before the
point where they part. What cannot be honoured is refused, and both halves stay as they were.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from .. import ggml, machine
from ..batch import UBatch
from ..errors import BackendError, ContextFull, StateError
from ..graph.state import GraphState, KvSpec, RecurrentSpec
from .kv_cache import KvCache
from .recurrent import RecurrentMemory

MIB = 1 << 20


@dataclass(frozen=True, eq=False)
class Plan:
    """Where one ubatch goes: its cells, what attention sees, its recurrent slots. Nothing is moved until `apply`."""

    cells: np.ndarray
    n_kv: int
    rs_head: int | None
    keep: tuple[int, ...]
    inputs: dict[str, np.ndarray]


class HybridMemory:
    """Own every state tensor of a session, on the device of its layer.

    Only `apply`, `rewind`, `fork`, `restore` and `clear` move a cursor. A new sequence starts from zeros. `devices[il]`
    is the layer's device; `n_rollback` older recurrent states are kept per sequence; `kv_layout` as `KvCache`.
    """

    def __init__(
        self, specs: Sequence[KvSpec | RecurrentSpec], devices: Sequence[ggml.Device], *, n_ctx: int, n_seq_max: int,
        type_k: str, type_v: str, n_rollback: int = 0, n_staging: int = 0, **kv_layout: bool,
    ):  # fmt: skip
        kv = [s for s in specs if isinstance(s, KvSpec)]
        recurrent = [s for s in specs if isinstance(s, RecurrentSpec)]
        self.kv = KvCache(kv, n_ctx, n_seq_max, type_k=type_k, type_v=type_v, **kv_layout)
        self.recurrent = RecurrentMemory(recurrent, n_seq_max, n_rollback=n_rollback, n_staging=n_staging)
        self.n_ctx = n_ctx
        self.n_past = [0] * n_seq_max
        self._interrupted: set[int] = set()
        self._owned = ExitStack()
        self.nbytes = self._allocate(specs, devices)
        self.state = GraphState(self.kv.layers, self.recurrent.states)

    def _allocate(self, specs, devices) -> int:
        by_device: dict[ggml.Device, list] = {}
        for spec in specs:
            by_device.setdefault(devices[spec.il], []).append(spec)
        owner = {KvSpec: self.kv, RecurrentSpec: self.recurrent}
        sizes = {device: sum(owner[type(s)].nbytes_of(s) for s in mine) for device, mine in by_device.items()}
        for device, wanted in sizes.items():
            free = available_memory(device)
            if wanted > free:
                raise BackendError(
                    f"n_ctx={self.n_ctx} needs {wanted / MIB:,.0f} MiB of state on {device.name}, "
                    f"{free / MIB:,.0f} MiB are available"
                )
        self.kv.make_cells()
        for device, mine in by_device.items():
            ctx = self._owned.enter_context(ggml.Context(sum(owner[type(s)].n_tensors_of(s) for s in mine)))
            for spec in mine:
                owner[type(spec)].declare(ctx, spec)
            buffer = self._owned.enter_context(ggml.alloc_tensors(ctx, device.buffer_type()))
            if device.kind == "cpu":
                ggml.advise_huge_pages(buffer.base, buffer.size)
            # a masked cell still takes part in sums as 0·v, so it must never hold NaN
            buffer.clear(0)
            self.recurrent.bind(ctx)
        return sum(sizes.values())

    def check(self, wanted: dict[int, int]) -> None:
        """Raise, with nothing moved, unless `wanted` more tokens per sequence fit."""
        for seq, n in wanted.items():
            self.check_whole(seq)
            if self.n_past[seq] + n > self.n_ctx:
                raise ContextFull(
                    f"sequence {seq} holds {self.n_past[seq]} tokens and {n} more were handed in; n_ctx is {self.n_ctx}"
                )
        total = sum(wanted.values())
        if self.kv.specs and total > self.kv.n_free:
            raise ContextFull(f"{total} tokens were handed in; {self.kv.n_free} of {self.n_ctx} cells are free")

    def check_after(self, seq: int, n_past: int, n: int) -> None:
        """Raise ContextFull, with nothing moved, unless `seq` cut back to `n_past` tokens has room for `n` more."""
        if n_past + n > self.n_ctx:
            raise ContextFull(f"sequence {seq} was to hold {n_past + n} tokens; n_ctx is {self.n_ctx}")
        if self.kv.specs and n > self.kv.n_free and n > (free := self.kv.n_free + self.kv.n_own(seq, n_past)):
            raise ContextFull(f"{n} tokens are to be run; other sequences leave {free} of {self.n_ctx} cells")

    def check_whole(self, seq: int) -> None:
        """Raise StateError unless sequence `seq` exists and its last step ran to its end."""
        self.check_seq(seq)
        if seq in self._interrupted:
            raise StateError(f"sequence {seq} stopped in the middle of a step, its state is neither old nor new; clear it first")

    def check_seq(self, seq: int) -> None:
        """Raise StateError unless sequence `seq` exists."""
        self.check_open()
        if not 0 <= seq < len(self.n_past):
            raise StateError(f"sequence {seq} does not exist; n_seq_max={len(self.n_past)}")

    def check_open(self) -> None:
        """Raise StateError when there is no state any more."""
        if not self.n_past:
            raise StateError("the session is closed")

    def plan(self, ubatch: UBatch, marks: Sequence[int] = ()) -> Plan:
        """Say where `ubatch` goes, without moving anything; states after `marks` token counts go to staging slots."""
        for seq in ubatch.seqs:
            if self.n_past[seq] == 0:
                # a new sequence starts from zeros, whatever its slot held
                self.recurrent.clear(seq)
        keep = self.recurrent.keep(ubatch.n_seq_tokens, marks)
        inputs = dict(self.recurrent.inputs(ubatch, self.n_past, keep or (ubatch.n_seq_tokens,), marks))
        cells, n_kv = np.empty(0, np.int64), 0
        if self.kv.specs:
            cells = self.kv.find_cells(ubatch.n_tokens)
            n_kv = self.kv.n_kv(cells)
            inputs["attn_inp_kq_mask"] = self.kv.mask(ubatch, cells, n_kv)
            inputs["attn_inp_k_idxs"] = cells
            inputs["attn_inp_v_idxs"] = self.kv.v_elements(cells)
        head = None if keep else self.recurrent.head(ubatch.seqs)
        return Plan(cells, n_kv, head, keep, inputs)

    def apply(self, ubatch: UBatch, plan: Plan, failed: Collection[int] = ()) -> None:
        """Move the cursors past a ubatch that has been computed.

        Sequences that `failed` stay where they were, with their new cells erased; one whose only state may have been
        touched must be cleared before it goes on.
        """
        n = ubatch.n_seq_tokens
        whole = [seq for seq in ubatch.seqs if seq not in failed]
        if self.kv.specs:
            done = np.repeat([seq not in failed for seq in ubatch.seqs], n)
            self.kv.apply(whole, ubatch.pos[done], plan.cells[done])
            self.kv.erase(plan.cells[~done])
        for seq in whole:
            self.n_past[seq] += n
            self.recurrent.applied(seq, self.n_past[seq])
        for seq in failed:
            if not self.recurrent.survives(seq, self.n_past[seq], n):
                self._interrupted.add(seq)

    def goes_on(self, seq: int) -> bool:
        """Say whether one more token of `seq` can simply follow: it has some, there is room, and no other sequence has cells."""
        return (
            0 <= seq < len(self.n_past) and 0 < self.n_past[seq] < self.n_ctx and seq not in self._interrupted
            and (not self.kv.specs or self.kv.only(seq) and self.kv.n_free > 0)
        )  # fmt: skip

    def advance(self, seq: int) -> None:
        """Move the cursor of `seq`, which `goes_on`, past one token that has been computed."""
        if self.kv.specs:
            self.kv.append(seq, self.n_past[seq])
        self.n_past[seq] += 1
        self.recurrent.applied(seq, self.n_past[seq])

    def rewind(self, seq: int, n_past: int) -> None:
        """Go back to the state after `n_past` tokens: an index moves, nothing is computed or copied."""
        self.check_seq(seq)
        if n_past == 0:
            self.clear(seq)
            return
        self.check_whole(seq)
        if not self.can_rewind(seq, n_past):
            raise StateError(
                f"sequence {seq} holds {self.n_past[seq]} tokens and cannot go back to {n_past}: "
                f"the oldest state kept is that after {self.recurrent.oldest[seq]}"
            )
        self.kv.truncate(seq, n_past)
        self.n_past[seq] = n_past

    def can_rewind(self, seq: int, n_past: int) -> bool:
        """Say whether the state after `n_past` tokens is still in the ring."""
        oldest = self.recurrent.oldest[seq] if self.recurrent.specs else 0
        return oldest <= n_past <= self.n_past[seq] and seq not in self._interrupted

    def restore(self, seq: int, n_past: int, values: dict[tuple[int, str], np.ndarray]) -> None:
        """Go back to `n_past` tokens with recurrent states taken then; the KV cells up to there are still in place."""
        self.kv.truncate(seq, n_past)
        self.recurrent.restore(seq, n_past, values)
        self.n_past[seq] = n_past
        self._interrupted.discard(seq)

    def resume(self, seq: int, n_past: int, snapshots: dict[int, dict[tuple[int, str], np.ndarray]]) -> None:
        """Let an empty `seq`, whose KV cells are in place, hold `n_past` tokens; without snapshots it must be cleared first."""
        self.n_past[seq] = n_past
        if snapshots:
            self.recurrent.restore_ring(seq, snapshots)
        elif self.recurrent.specs:
            self._interrupted.add(seq)

    def snapshots(self, seq: int) -> range:
        """Return the token counts whose recurrent states `seq` can go back to; none when its last step did not end."""
        kept = self.recurrent.kept(seq, self.n_past[seq])
        return kept[:0] if seq in self._interrupted else kept

    def fork(self, src: int, dst: int) -> None:
        """Make `dst` a copy of `src`: recurrent states are copied, KV cells shared until they part."""
        self.check_seq(dst)
        self.check_whole(src)
        if src == dst:
            raise StateError(f"sequence {src} cannot be forked onto itself")
        self.kv.truncate(dst, 0)
        self.kv.fork(src, dst)
        self.recurrent.fork(src, dst)
        self.n_past[dst] = self.n_past[src]
        self._interrupted.discard(dst)

    def clear(self, seq: int) -> None:
        """Forget `seq`: its cells become free, its states zero."""
        self.check_seq(seq)
        if seq in self._interrupted:
            # NaN may have got into earlier cells of a prompt whose end only was looked at
            self.kv.erase(self.kv.own(seq))
        self.kv.truncate(seq, 0)
        self.recurrent.clear(seq)
        self.n_past[seq] = 0
        self._interrupted.discard(seq)

    def snapshot(self, seq: int) -> dict[tuple[int, str], np.ndarray]:
        """Copy the current recurrent states of `seq` to the host."""
        return self.recurrent.snapshot(self.recurrent.slot(seq, self.n_past[seq]))

    def recurrent_state(self, il: int, seq: int) -> dict[str, np.ndarray]:
        """Return layer `il`'s current recurrent states of `seq` by name, in numpy order of their specs."""
        self.check_seq(seq)
        slot = self.recurrent.slot(seq, self.n_past[seq])
        return {name: self.recurrent.read(i, name, slot) for i, name in self.recurrent.states if i == il}

    def close(self) -> None:
        """Free every state tensor; there are no sequences then."""
        self.n_past = []
        self._owned.close()


def available_memory(device: ggml.Device) -> int:
    """Return the bytes that can still be allocated on `device`; for the CPU what the system says is available."""
    host = machine.available_memory() if device.kind == "cpu" else None
    return device.memory()[0] if host is None else host
