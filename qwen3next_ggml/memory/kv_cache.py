"""The K and V caches of all attention layers over one pool of cells (level 6).

A cell holds one token's position and the set of sequences it belongs to, so sequences of any length share the pool.
Knows specs and ubatches, no model.
"""

from collections.abc import Sequence

import numpy as np

from .. import ggml
from ..batch import UBatch
from ..errors import ContextFull, OptionError
from ..ggml import types
from ..graph.state import KvLayer, KvSpec
from .kv_bytes import read_rows, row_size, write_rows

N_PAD = 256  # n_kv grows in such steps, so that a graph serves 256 decode steps
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")


def padded(n: int) -> int:
    """Return `n` cells rounded up to whole steps."""
    return -(-n // N_PAD) * N_PAD


class KvCache:
    """Own the caches, know which cell holds what, and say what a ubatch may see.

    `k_by_head` keeps the cells of each head together. `v_transposed` keeps V with a row per value, as llama.cpp does without flash
    attention; a quantised V cannot be kept so.
    """

    def __init__(
        self, specs: Sequence[KvSpec], n_cells: int, n_seq_max: int, *, type_k: str, type_v: str, flash_attn: bool,
        k_by_head: bool, v_transposed: bool,
    ):
        self.specs = tuple(specs)
        self.n_cells = n_cells
        self._n_seq_max = n_seq_max
        self.flash_attn, self.k_by_head, self.v_transposed = flash_attn, k_by_head, v_transposed
        self.type_k, self.type_v = _cache_type("type_k", type_k), _cache_type("type_v", type_v)
        if self.type_v.is_quantized and v_transposed:
            raise OptionError(f"type_v={type_v} needs flash attention, which is off; use f16 or turn it on")
        for s in self.specs:
            for what, dtype, n in (("type_k", self.type_k, s.n_embd_head_k), ("type_v", self.type_v, s.n_embd_head_v)):
                if n % dtype.block_size:
                    raise OptionError(f"{what}={dtype.name} needs a head width divisible by {dtype.block_size}, got {n}")
        self.layers: dict[int, KvLayer] = {}

    def make_cells(self) -> None:
        """Make the table of cells, all free; done once it is known that the caches fit."""
        self.pos = np.full(self.n_cells, -1, np.int32)
        self.member = np.zeros((self._n_seq_max, self.n_cells), bool)
        self.fed = np.zeros(self.n_cells, bool)  # cells in which the NextN head has its K and V too
        self.n_used = 0
        self._n_held = [0] * self._n_seq_max
        self._top = 0  # one past the highest cell in use
        self._packed = True  # cells 0 … _top − 1 are all in use

    def nbytes_of(self, spec: KvSpec) -> int:
        """Return the bytes of one layer's K and V."""
        per_cell = self.type_k.row_size(spec.n_embd_head_k * spec.n_head_kv)
        return self.n_cells * (per_cell + self.type_v.row_size(spec.n_embd_head_v * spec.n_head_kv))

    def n_tensors_of(self, spec: KvSpec) -> int:
        """Return how many tensor structs one layer needs."""
        return 2

    def declare(self, ctx: ggml.Context, spec: KvSpec) -> None:
        """Create one layer's tensors in `ctx`; whoever owns `ctx` allocates them."""
        k = ctx.new_tensor(self.type_k, spec.n_embd_head_k * spec.n_head_kv, self.n_cells, name=f"cache_k_l{spec.il}")
        v = ctx.new_tensor(self.type_v, spec.n_embd_head_v * spec.n_head_kv, self.n_cells, name=f"cache_v_l{spec.il}")
        self.layers[spec.il] = KvLayer(spec, k, v, self.n_cells, self.k_by_head, self.v_transposed)

    @property
    def n_free(self) -> int:
        return self.n_cells - self.n_used

    def find_cells(self, n: int) -> np.ndarray:
        """Return the first `n` free cells, or raise ContextFull."""
        if n > self.n_free:
            raise ContextFull(f"{n} tokens need {n} cells, {self.n_free} of {self.n_cells} are free")
        if self._packed:
            return np.arange(self._top, self._top + n)
        return np.flatnonzero(self.pos < 0)[:n]

    def n_kv(self, cells: np.ndarray) -> int:
        """Return how many cells attention must look at once `cells` are used: a multiple of 256, or all."""
        return self._padded(max(self._top, int(cells[-1]) + 1))

    def _padded(self, n: int) -> int:
        return min(self.n_cells, padded(n))

    # one more token of the only sequence that has cells

    def only(self, seq: int) -> bool:
        """Say whether all cells in use are those of `seq`, without a gap."""
        return self._packed and self.n_used == self._n_held[seq]

    @property
    def next_cell(self) -> int:
        return self._top

    @property
    def n_kv_after_one(self) -> int:
        return self._padded(self._top + 1) if self.specs else 0

    @property
    def mask_type(self) -> type:
        return np.float16 if self.flash_attn else np.float32

    def append(self, seq: int, pos: int) -> None:
        """Mark the next cell as holding the token of `seq` at `pos`."""
        self.pos[self._top] = pos
        self.member[seq, self._top] = True
        self.n_used += 1
        self._n_held[seq] += 1
        self._top += 1

    def mask(self, ubatch: UBatch, cells: np.ndarray, n_kv: int) -> np.ndarray:
        """Return the mask [n_tokens, n_kv]: 0 where a token may look, −inf elsewhere; f16 for flash attention."""
        dtype, n = self.mask_type, ubatch.n_seq_tokens
        if ubatch.n_seqs == 1 and self.only(ubatch.seqs[0]):
            # nobody else's cells, and none out of order: each token sees one more than the one before
            mask = np.full((ubatch.n_tokens, n_kv), -np.inf, dtype)
            for row, cell in enumerate(cells.tolist()):
                mask[row, : cell + 1] = 0
            return mask
        # a sequence sees all it holds, and of what is new its own up to each token
        seen = self.member[list(ubatch.seqs), :n_kv].repeat(n, axis=0)
        new = cells.reshape(-1, n)
        rows = np.arange(ubatch.n_tokens).reshape(-1, n, 1)
        seen[rows, new[:, None]] = np.tri(n, dtype=bool)
        return np.where(seen, dtype(0), dtype(-np.inf))

    def nextn_cells(self, seq: int, pos: np.ndarray) -> np.ndarray:
        """Return the cells of `seq` at `pos`, adjacent positions to its end or beyond, where free cells are taken."""
        held = np.flatnonzero(self.member[seq] & (self.pos >= pos[0]))
        held = held[np.argsort(self.pos[held])]
        new = self.find_cells(len(pos) - len(held))
        self.apply([seq], pos[len(held) :], new)
        return np.concatenate([held, new])

    def nextn_mask(self, seq: int, pos: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Return the mask of the NextN head for tokens at `pos`, whose K and V go to `cells`: it sees what it was fed."""
        dtype, n_kv = self.mask_type, self.n_kv(cells)
        seen = self.member[seq, :n_kv] & self.fed[:n_kv]
        seen[cells] = True
        return np.where(seen & (self.pos[:n_kv] <= pos[:, None]), dtype(0), dtype(-np.inf))

    def v_elements(self, cells: np.ndarray) -> np.ndarray:
        """Return where V goes: the cells, or in a transposed cache the place of each value of each token [n_tokens · n_embd_v_gqa]."""
        if not self.v_transposed or not self.specs:
            return cells
        n_embd_v = max(s.n_embd_head_v * s.n_head_kv for s in self.specs)
        return (np.arange(n_embd_v) * self.n_cells + cells[:, None]).reshape(-1).astype(np.int64)

    def apply(self, seqs: Sequence[int], pos: np.ndarray, cells: np.ndarray) -> None:
        """Mark `cells` as holding equally many tokens of each of `seqs`, in order, at positions `pos`."""
        if not len(cells):
            return
        n = len(cells) // len(seqs)
        self.pos[cells] = pos
        self.member[np.repeat(seqs, n), cells] = True
        self.n_used += len(cells)
        for seq in seqs:
            self._n_held[seq] += n
        self._top = max(self._top, int(cells[-1]) + 1)
        self._packed = self.n_used == self._top

    def truncate(self, seq: int, n_past: int) -> None:
        """Take `seq` out of every cell at position `n_past` and beyond; cells nobody is left in become free."""
        pos, member = self.pos[: self._top], self.member[:, : self._top]
        gone = np.flatnonzero(member[seq] & (pos >= n_past))
        member[seq, gone] = False
        free = gone[~member[:, gone].any(axis=0)]
        pos[free] = -1
        self.fed[free] = False
        self._n_held[seq] -= len(gone)
        self.n_used -= len(free)
        self._find_top(pos)

    def _find_top(self, pos: np.ndarray) -> None:
        used = pos >= 0
        self._top = len(used) - int(used[::-1].argmax()) if used.any() else 0
        self._packed = self.n_used == self._top

    def used(self) -> np.ndarray:
        """Return the cells in use, ascending."""
        return np.flatnonzero(self.pos >= 0)

    def fork(self, src: int, dst: int) -> None:
        """Let `dst` share every cell of `src`; they part as each writes cells of its own."""
        self.member[dst] = self.member[src]
        self._n_held[dst] = self._n_held[src]

    def n_own(self, seq: int, n_past: int) -> int:
        """Return how many cells become free when `seq` is cut back to `n_past` tokens."""
        return int(np.count_nonzero(self.pos[self.own(seq)] >= n_past))

    def read(self, il: int, what: str, cells: np.ndarray) -> np.ndarray:
        """Return what ascending `cells` of layer `il` hold: uint8 [n, row]; `what` is "k" or "v"."""
        return read_rows(self.layers[il], what, cells)

    def write(self, il: int, what: str, cells: np.ndarray, rows: np.ndarray) -> None:
        """Let ascending `cells` of layer `il` hold rows, uint8 [n, row]."""
        write_rows(self.layers[il], what, cells, rows)

    def erase(self, cells: np.ndarray) -> None:
        """Write zeros over ascending `cells`: a masked cell still takes part in sums as 0·v, and must not hold NaN."""
        for il in self.layers if len(cells) else ():
            for what in ("k", "v"):
                self.write(il, what, cells, np.zeros((len(cells), self.row_size(il, what)), np.uint8))

    def own(self, seq: int) -> np.ndarray:
        """Return the cells that nobody but `seq` is in, ascending."""
        member = self.member[:, : self._top]
        return np.flatnonzero(member[seq] & (np.count_nonzero(member, axis=0) == 1))

    def row_size(self, il: int, what: str) -> int:
        """Return the bytes of one cell of layer `il`."""
        return row_size(self.layers[il], what)

    def occupy(self, cells: np.ndarray, pos: np.ndarray, seqs: Sequence[int], member: np.ndarray, fed: np.ndarray) -> None:
        """Take `cells` of an empty cache into use: their positions, whose they are [n_seqs, n], which the NextN head has too."""
        self.pos[cells], self.fed[cells] = pos, fed
        for seq, own in zip(seqs, member):
            self.member[seq, cells] = own
            self._n_held[seq] = int(np.count_nonzero(own))
        self.n_used = len(cells)
        self._find_top(self.pos)


def _cache_type(what: str, name: str) -> ggml.GgmlType:
    if name not in CACHE_TYPES:
        raise OptionError(f"{what} must be one of {', '.join(CACHE_TYPES)}, got {name!r}")
    return types.GgmlType.of(name)
