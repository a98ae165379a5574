"""The step that is taken a thousand times: one more token of one sequence (level 7).

Keeps the graph and the input arrays of the last such step and changes what changed in them; what is out of the ordinary is
left to the session's general way. Knows memory, history, graphs and probes; knows no text.
"""

from dataclasses import replace
from math import inf

import numpy as np

from .executor import Built
from .graph_cache import GraphCache
from .memory import HybridMemory


class OneToken:
    """Decode single tokens over one session's graphs, memory and history, read and changed by its probes."""

    def __init__(self, graphs: GraphCache, memory: HybridMemory, history, probes):
        self.graphs, self.memory, self.history, self.probes = graphs, memory, history, probes
        self._built: Built | None = None
        self._made_for: tuple = ()
        self._outs: list[tuple] = []
        self._arrays: tuple[np.ndarray, ...] = ()
        self._rows: list[tuple[np.ndarray, str]] = []
        self._tokens, self._pos, self._cell = np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64)
        self._mask, self._n_seen = np.zeros((1, 0)), 0
        self._v_of_cell_0 = self._v_cells = self._cell

    def is_ordinary(self, seq: int) -> bool:
        """Say whether the next token of `seq` is not its first, has room, and no other sequence has cells."""
        return self.graphs.executor.keeps_outputs and self.memory.goes_on(seq)

    def prepare(self, token: int, seq: int, top: int = 0) -> None:
        """Get the graph and fill its inputs for `token` of `seq`, whose next token is ordinary; nothing is moved."""
        memory, kv = self.memory, self.memory.kv
        n_past, cell = memory.n_past[seq], kv.next_cell
        made_for = kv.n_kv_after_one, seq, top, self.graphs.n_changes, self.probes.n_changes
        if self._made_for != made_for:
            self._make(*made_for)
        self._tokens[0], self._pos[0] = token, n_past
        if self._rows:
            rows = memory.recurrent.inputs_of_one(seq, n_past)
            for array, name in self._rows:
                array[:] = rows[name]
        if cell != self._n_seen:
            self._mask[0, self._n_seen : cell] = 0
            self._mask[0, cell + 1 : self._n_seen] = -inf
        self._cell[0] = cell
        self._mask[0, cell : cell + 1] = 0
        self._n_seen = cell + 1
        if self._v_cells is not self._cell:
            np.add(self._v_of_cell_0, cell, out=self._v_cells)

    def compute(self) -> list[np.ndarray]:
        """Run what was prepared → logits [1, n_vocab], or ids [top] and logits [top] of the largest."""
        outs = [np.empty(shape, dtype) for shape, dtype in self._outs]
        self.graphs.executor.run(self._built, self._arrays, outs)
        if self._built.kept:
            self.probes.note(self._built.read_kept())
        return outs

    def keep(self, token: int, seq: int) -> None:
        """Move the cursor of `seq` past what was computed; its logits stay where they are until somebody asks for them."""
        self.memory.advance(seq)
        self.history.extend(seq, [token])
        self.history.leave({seq: 0}, self._built.row)

    def _make(self, n_kv: int, seq: int, top: int, *_) -> None:
        memory, kv, base = self.memory, self.memory.kv, self.probes.base
        key = replace(base, sizes=replace(base.sizes, n_kv=n_kv, rs_head=memory.recurrent.head((seq,))), top=top)
        self._built = built = self.graphs.get(self.probes.key(key))
        self._outs = [(top, np.int32), (top, np.float32)] if top else [((1, built.logits.ne[0]), np.float32)]
        self._mask, self._n_seen = np.full((1, n_kv), -inf, kv.mask_type), 0
        self._v_of_cell_0 = kv.v_elements(np.zeros(1, np.int64))
        self._v_cells = np.empty_like(self._v_of_cell_0) if len(self._v_of_cell_0) > 1 else self._cell
        rows = {name: x.copy() for name, x in memory.recurrent.inputs_of_one(seq, memory.n_past[seq]).items()}
        # without a ring a sequence's rows are always the same
        self._rows = [(x, name) for name, x in rows.items() if name in built.inputs and memory.recurrent.ring > 1]
        self._arrays = built.arrange({
            **built.constants, **rows, "inp_tokens": self._tokens, "inp_pos": self._pos, "out_ids": np.zeros(1, np.int32),
            "attn_inp_kq_mask": self._mask, "attn_inp_k_idxs": self._cell, "attn_inp_v_idxs": self._v_cells,
        })  # fmt: skip
        self._made_for = n_kv, seq, top, self.graphs.n_changes, self.probes.n_changes
