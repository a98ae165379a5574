"""All that lives between two graph runs: KV cells and recurrent slots under one cursor per sequence (level 6)."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from .. import ggml
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
    inputs: dict[str, np.ndarray]


class HybridMemory:
    """Own every state tensor of a session, on the device of its layer.

    Only `apply` and `clear` move a cursor. A new sequence starts from zeros. `devices[il]` is the layer's device.
    """

    def __init__(
        self, specs: Sequence[KvSpec | RecurrentSpec], devices: Sequence[ggml.Device], *, n_ctx: int, n_seq_max: int,
        type_k: str, type_v: str, flash_attn: bool,
    ):  # fmt: skip
        kv = [s for s in specs if isinstance(s, KvSpec)]
        recurrent = [s for s in specs if isinstance(s, RecurrentSpec)]
        self.kv = KvCache(kv, n_ctx, n_seq_max, type_k=type_k, type_v=type_v, flash_attn=flash_attn)
        self.recurrent = RecurrentMemory(recurrent, n_seq_max)
        self.n_ctx = n_ctx
        self.n_past = [0] * n_seq_max
        self._interrupted: set[int] = set()
        self._owned = ExitStack()
        self.nbytes = self._allocate(specs, devices)
        for seq in range(n_seq_max):
            self.recurrent.clear(seq)
        self.state = GraphState(self.kv.layers, self.recurrent.states)

    def _allocate(self, specs, devices) -> int:
        by_device: dict[ggml.Device, list] = {}
        for spec in specs:
            by_device.setdefault(devices[spec.il], []).append(spec)
        owner = {KvSpec: self.kv, RecurrentSpec: self.recurrent}
        total = 0
        for device, mine in by_device.items():
            wanted = sum(owner[type(s)].nbytes_of(s) for s in mine)
            free = available_memory(device)
            if wanted > free:
                raise BackendError(
                    f"n_ctx={self.n_ctx} needs {wanted / MIB:,.0f} MiB of state on {device.name}, "
                    f"{free / MIB:,.0f} MiB are available"
                )
            ctx = self._owned.enter_context(ggml.Context(2 * len(mine)))
            for spec in mine:
                owner[type(spec)].declare(ctx, spec)
            buffer = self._owned.enter_context(ggml.alloc_tensors(ctx, device.buffer_type()))
            # masked cells still take part in sums as 0·v, so they must never hold NaN
            buffer.clear(0)
            total += wanted
        return total

    def check(self, wanted: dict[int, int]) -> None:
        """Raise, with nothing moved, unless `wanted` more tokens per sequence fit."""
        for seq, n in wanted.items():
            if not 0 <= seq < len(self.n_past):
                raise StateError(f"sequence {seq} does not exist; n_seq_max={len(self.n_past)}")
            if seq in self._interrupted:
                raise StateError(f"sequence {seq} was interrupted in the middle of a step; clear it first")
            if self.n_past[seq] + n > self.n_ctx:
                raise ContextFull(
                    f"sequence {seq} holds {self.n_past[seq]} tokens and {n} more were handed in; n_ctx is {self.n_ctx}"
                )
        total = sum(wanted.values())
        if self.kv.specs and total > self.kv.n_free:
            raise ContextFull(f"{total} tokens were handed in; {self.kv.n_free} of {self.n_ctx} cells are free")

    def plan(self, ubatch: UBatch) -> Plan:
        """Say where `ubatch` goes, without moving anything."""
        inputs = self.recurrent.inputs(ubatch)
        cells, n_kv = np.empty(0, np.int64), 0
        if self.kv.specs:
            cells = self.kv.find_cells(ubatch.n_tokens)
            n_kv = self.kv.n_kv(cells)
            inputs["attn_inp_kq_mask"] = self.kv.mask(ubatch, cells, n_kv)
            inputs["attn_inp_k_idxs"] = cells
            inputs["attn_inp_v_idxs"] = cells if self.kv.flash_attn else self.kv.v_elements(cells)
        return Plan(cells, n_kv, self.recurrent.head(ubatch.seqs), inputs)

    def apply(self, ubatch: UBatch, plan: Plan) -> None:
        """Move the cursors past a ubatch that has been computed."""
        if self.kv.specs:
            self.kv.apply(ubatch, plan.cells)
        for seq in ubatch.seqs:
            self.n_past[seq] += ubatch.n_seq_tokens

    def interrupt(self, ubatch: UBatch) -> None:
        """Note that a ubatch failed half-way: its recurrent states are neither old nor new."""
        if self.recurrent.specs:
            self._interrupted.update(ubatch.seqs)

    def clear(self, seq: int) -> None:
        """Forget `seq`: its cells become free, its states zero."""
        if not 0 <= seq < len(self.n_past):
            raise StateError(f"sequence {seq} does not exist; n_seq_max={len(self.n_past)}")
        self.kv.clear(seq)
        self.recurrent.clear(seq)
        self.n_past[seq] = 0
        self._interrupted.discard(seq)

    def close(self) -> None:
        """Free every state tensor."""
        self._owned.close()


def available_memory(device: ggml.Device) -> int:
    """Return the bytes that can still be allocated on `device`; for the CPU what the system says is available."""
    if device.kind == "cpu":
        try:
            with open("/proc/meminfo") as f:
                for line in f:
                    if line.startswith("MemAvailable:"):
                        return int(line.split()[1]) * 1024
        except OSError:
            pass  # not Linux: ggml's own figure is the best there is
    return device.memory()[0]
