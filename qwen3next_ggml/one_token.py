"""The step that is taken a thousand times: one more token of one sequence (level 7).

Keeps the graph and the input arrays of the last such step and changes what changed in them; what is out of the ordinary is
left to the session's general way. Knows memory, history and graphs; knows no text.
"""

from dataclasses import replace
from math import inf

import numpy as np

from .executor import Built
from .graph.key import GraphKey
from .graph_cache import GraphCache
from .memory import HybridMemory


class OneToken:
    """Decode single tokens over one session's graphs, memory and history; `base` is the key of a one-token graph."""

    def __init__(self, graphs: GraphCache, memory: HybridMemory, history, base: GraphKey):
        self.graphs, self.memory, self.history, self.base = graphs, memory, history, base
        self._built: Built | None = None
        self._made_for: tuple = ()
        self._outs: list[tuple] = []
        self._values: dict[str, np.ndarray] = {}
        self._tokens, self._pos, self._cell = np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int64)
        self._mask, self._n_seen, self._v_of_cell_0 = np.zeros((1, 0)), 0, self._cell

    def is_ordinary(self, seq: int) -> bool:
        """Say whether the next token of `seq` is not its first, has room, and no other sequence has cells."""
        return self.graphs.executor.keeps_outputs and self.memory.goes_on(seq)

    def prepare(self, token: int, seq: int, top: int = 0) -> None:
        """Get the graph and fill its inputs for `token` of `seq`, whose next token is ordinary; nothing is moved."""
        memory, kv = self.memory, self.memory.kv
        n_past, n_kv = memory.n_past[seq], kv.n_kv_after_one
        head = memory.recurrent.head((seq,))
        if self._made_for != (n_kv, head, top, self.graphs.n_changes):
            self._make(n_kv, head, top)
        self._tokens[0], self._pos[0] = token, n_past
        self._values.update(memory.recurrent.inputs_of_one(seq, n_past))
        if kv.specs:
            self._cell[0] = cell = kv.next_cell
            self._mask[0, self._n_seen : cell + 1] = 0
            self._mask[0, cell + 1 : self._n_seen] = -inf
            self._n_seen = cell + 1
            np.add(self._v_of_cell_0, cell, out=self._values["attn_inp_v_idxs"])

    def compute(self) -> list[np.ndarray]:
        """Run what was prepared → logits [1, n_vocab], or ids [top] and logits [top] of the largest."""
        outs = [np.empty(shape, dtype) for shape, dtype in self._outs]
        self.graphs.executor.run(self._built, self._values, outs)
        return outs

    def keep(self, token: int, seq: int) -> None:
        """Move the cursor of `seq` past what was computed; its logits stay where they are until somebody asks for them."""
        self.memory.advance(seq)
        self.history.extend_by_one(seq, token, self._fetch)

    def _make(self, n_kv: int, head: int | None, top: int) -> None:
        key = replace(self.base, sizes=replace(self.base.sizes, n_kv=n_kv, rs_head=head), top=top)
        self._built = self.graphs.get(key)
        self._outs = [(top, np.int32), (top, np.float32)] if top else [((1, self._built.logits.ne[0]), np.float32)]
        self._mask, self._n_seen = np.full((1, n_kv), -inf, self.memory.kv.mask_type), 0
        self._v_of_cell_0 = self.memory.kv.v_elements(np.zeros(1, np.int64))
        self._values = {
            **self._built.constants, "inp_tokens": self._tokens, "inp_pos": self._pos, "out_ids": np.zeros(1, np.int32),
            "attn_inp_kq_mask": self._mask, "attn_inp_k_idxs": self._cell, "attn_inp_v_idxs": np.empty_like(self._v_of_cell_0),
        }  # fmt: skip
        self._made_for = n_kv, head, top, self.graphs.n_changes

    def _fetch(self) -> np.ndarray:
        return self._built.logits.get().reshape(-1)
