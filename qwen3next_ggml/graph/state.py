"""What a graph is handed of the past, and how it reads and writes it (level 5).

An architecture declares specs; memory makes the tensors; a block sees one layer of them here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .. import ggml
from .builder import GraphBuilder
from .inputs import Inputs

F16_MAX = 65504.0


@dataclass(frozen=True)
class KvSpec:
    """Ask for a K and a V cache in layer `il`."""

    il: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int


@dataclass(frozen=True)
class RecurrentSpec:
    """Ask for one F32 state of `ne` elements per sequence in layer `il`; `name` is llama.cpp's ("r" conv, "s" delta).

    `n_rows` is how many adjacent rows it may be moved in: rows are what threads share. `n_ahead` rows in front of each state
    are room for the output of an op that returns it together with the new state, so that the new state takes the old one's place.
    """

    il: int
    name: str
    ne: tuple[int, ...]
    n_rows: int = 1
    n_ahead: int = 0

    @property
    def n_embd(self) -> int:
        n = 1
        for size in self.ne:
            n *= size
        return n

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.n_embd // self.n_rows

    @property
    def n_slot_rows(self) -> int:
        """Rows from one state to the next."""
        return self.n_ahead + self.n_rows


@dataclass(frozen=True)
class KvLayer:
    """The K and V cache of one attention layer: k [n_embd_k_gqa, n_cells], v alike.

    `k_by_head`: k holds [D, n_cells, H_kv] instead; `v_transposed`: v has a row per value.
    """

    spec: KvSpec
    k: ggml.Tensor
    v: ggml.Tensor
    n_cells: int
    k_by_head: bool
    v_transposed: bool

    def write(self, g: GraphBuilder, inp: Inputs, k_cur: ggml.Tensor, v_cur: ggml.Tensor) -> None:
        """Store k_cur and v_cur [n_embd_head, n_head_kv, n_tokens] at the cells of this ubatch."""
        if g.options.finite_kv:
            k_cur, v_cur = (g.clamp(x, -F16_MAX, F16_MAX) for x in (k_cur, v_cur))
        n_tokens = inp.sizes.n_tokens
        n_embd_k = self.spec.n_embd_head_k * self.spec.n_head_kv
        n_embd_v = self.spec.n_embd_head_v * self.spec.n_head_kv
        if self.k_by_head:
            heads = g.reshape_3d(self.k, self.spec.n_embd_head_k, self.n_cells, self.spec.n_head_kv)
            g.expand(g.set_rows(heads, g.permute(k_cur, 0, 2, 1, 3), inp.k_idxs))  # of [D, n_tokens, H_kv]
        else:
            k_rows = g.view_2d(k_cur, n_embd_k, n_tokens, k_cur.nb[2], 0)  # [n_embd_k_gqa, n_tokens]
            g.expand(g.set_rows(self.k, k_rows, inp.k_idxs))
        v_idxs = inp.v_idxs(n_embd_v if self.v_transposed else 1)
        if not self.v_transposed:
            v_rows = g.view_2d(v_cur, n_embd_v, n_tokens, v_cur.nb[2], 0)  # [n_embd_v_gqa, n_tokens]
            g.expand(g.set_rows(self.v, v_rows, v_idxs))
            return
        # a transposed cache takes every element as a row of its own
        v_flat = g.reshape_2d(v_cur, n_embd_v, n_tokens)
        v_cells = g.reshape_2d(self.v, 1, self.n_cells * n_embd_v)
        g.expand(g.set_rows(v_cells, g.reshape_2d(v_flat, 1, n_embd_v * n_tokens), v_idxs))

    def read(self, g: GraphBuilder, n_kv: int) -> tuple[ggml.Tensor, ggml.Tensor]:
        """Return views of the first `n_kv` cells: k [D, H_kv, n_kv], v alike or, transposed, [n_kv, H_kv, D]."""
        s = self.spec
        row_k, row_v = self.k.type.row_size, self.v.type.row_size
        n_embd_k, n_embd_v = s.n_embd_head_k * s.n_head_kv, s.n_embd_head_v * s.n_head_kv
        head, cell = (self.n_cells, 1) if self.k_by_head else (1, s.n_head_kv)
        k = g.view_4d(  # [D, H_kv, n_kv, 1]
            self.k, s.n_embd_head_k, s.n_head_kv, n_kv, 1,
            row_k(s.n_embd_head_k * head), row_k(s.n_embd_head_k * cell), row_k(n_embd_k * self.n_cells), 0,
        )  # fmt: skip
        if not self.v_transposed:
            v = g.view_4d(  # [D, H_kv, n_kv, 1]
                self.v, s.n_embd_head_v, s.n_head_kv, n_kv, 1,
                row_v(s.n_embd_head_v), row_v(n_embd_v), row_v(n_embd_v * self.n_cells), 0,
            )  # fmt: skip
        else:
            v = g.view_4d(  # [n_kv, H_kv, D, 1]
                self.v, n_kv, s.n_head_kv, s.n_embd_head_v, 1,
                row_v(self.n_cells * s.n_embd_head_v), row_v(self.n_cells), row_v(self.n_cells * n_embd_v), 0,
            )  # fmt: skip
        return k, v


@dataclass(frozen=True)
class RecurrentState:
    """One recurrent state of one layer: `all` holds rows, [row, n_slot_rows · n_slots]; which slots a sequence has is memory's business."""

    spec: RecurrentSpec
    all: ggml.Tensor

    @property
    def n_slots(self) -> int:
        return self.all.ne[1] // self.spec.n_slot_rows

    def read(self, g: GraphBuilder, inp: Inputs) -> ggml.Tensor:
        """Return the states of this ubatch's sequences [n_embd, n_seqs], read before anything overwrites them."""
        head, n_seqs = inp.sizes.rs_head, inp.sizes.n_seqs
        # several states are one block only where nothing lies between them
        if g.options.state_view and head is not None and (n_seqs == 1 or not self.spec.n_ahead):
            # safe because every reader of this view is emitted before the write that replaces it
            return self._slots(g, head, n_seqs)
        n_rows = self._n_rows(g)
        rows = g.get_rows(self._as_rows(g, n_rows), inp.s_copy(n_rows))
        g.expand(rows)
        return rows if n_rows == 1 else g.reshape_2d(rows, self.spec.n_embd, n_seqs)

    def write(self, g: GraphBuilder, inp: Inputs, new: ggml.Tensor, first: int, name: str = "") -> None:
        """Write `new`, any number of states in order, to the slots of the sequences: over adjacent ones, whose view gets `name`, or to
        those that `s_dst` names from its state `first` on.
        """
        head = inp.sizes.rs_head
        if head is None:
            self._scatter(g, inp, new, first)
            return
        target = self._slots(g, head, inp.sizes.n_seqs)
        g.expand(g.cpy(new, g.name(target, name, self.spec.il) if name else target))

    def room_for(self, inp: Inputs, n: int) -> bool:
        """Say whether `n` elements of output fit in front of each state, and slots are adjacent and known."""
        return inp.sizes.rs_head is not None and n <= self.spec.n_ahead * self.spec.row

    def start(self, slot: int) -> int:
        """Return the byte at which the state of a slot starts in `all`."""
        return (slot * self.spec.n_slot_rows + self.spec.n_ahead) * self.all.nb[1]

    def _scatter(self, g: GraphBuilder, inp: Inputs, new: ggml.Tensor, first: int) -> None:
        n_rows = self._n_rows(g)
        n_states = new.nelements // self.spec.n_embd
        new = g.reshape_2d(new if new.is_contiguous else g.cont(new), self.spec.n_embd // n_rows, n_rows * n_states)
        dst = inp.s_dst(n_rows)
        if n_rows * n_states != dst.ne[0]:
            dst = g.view_1d(dst, n_rows * n_states, first * n_rows * dst.nb[0])
        g.expand(g.set_rows(self._as_rows(g, n_rows), new, dst))

    def _slots(self, g: GraphBuilder, head: int, n: int) -> ggml.Tensor:
        return g.view_2d(self.all, self.spec.n_embd, n, self.spec.n_slot_rows * self.all.nb[1], self.start(head))

    def _n_rows(self, g: GraphBuilder) -> int:
        return self.spec.n_rows if g.options.state_rows else 1

    def _as_rows(self, g: GraphBuilder, n_rows: int) -> ggml.Tensor:
        if n_rows == 1:
            return self.all if self.spec.n_slot_rows == 1 else self._slots(g, 0, self.n_slots)
        return self.all


@dataclass(frozen=True)
class GraphState:
    """All of the past one graph may touch: per layer, a KvLayer or recurrent states by name."""

    kv: Mapping[int, KvLayer]
    recurrent: Mapping[tuple[int, str], RecurrentState]
