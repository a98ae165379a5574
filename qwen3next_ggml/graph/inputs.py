"""The input tensors of a graph, created when a block first asks for them (level 5).

Names are llama.cpp's. Who fills them (batch, memory) is not known here.
"""

from dataclasses import dataclass

from .. import ggml
from ..ggml import types
from .builder import GraphBuilder


@dataclass(frozen=True)
class Sizes:
    """The sizes that fix a graph's shape.

    `n_kv` is the padded number of cells attention looks at; `rs_head` the first of adjacent recurrent slots, or None
    when slots are reached by index. `keep` are the token counts after which recurrent states are kept, newest first;
    empty means after the last token only. With `hidden` the final-norm hidden of every token is an output too.
    """

    n_seq_tokens: int
    n_seqs: int
    n_outputs: int
    n_kv: int
    rs_head: int | None
    keep: tuple[int, ...] = ()
    hidden: bool = False

    @property
    def n_tokens(self) -> int:
        return self.n_seq_tokens * self.n_seqs

    @property
    def kept(self) -> tuple[int, ...]:
        return self.keep or (self.n_seq_tokens,)


class Inputs:
    """Hand out the inputs of one graph by role; `pos_per_token` is 4 for multi-section rope, else 1."""

    def __init__(self, g: GraphBuilder, sizes: Sizes, *, pos_per_token: int = 1):
        self.g = g
        self.sizes = sizes
        self.pos_per_token = pos_per_token

    @property
    def tokens(self) -> ggml.Tensor:  # [n_tokens]
        return self.g.input("inp_tokens", types.I32, self.sizes.n_tokens)

    @property
    def pos(self) -> ggml.Tensor:  # [pos_per_token * n_tokens]
        return self.g.input("inp_pos", types.I32, self.pos_per_token * self.sizes.n_tokens)

    @property
    def out_ids(self) -> ggml.Tensor:  # [n_outputs]
        return self.g.input("out_ids", types.I32, self.sizes.n_outputs)

    def hidden(self, n_embd: int) -> ggml.Tensor:
        """Return, for the NextN block, the hidden of the token before each token [n_embd, n_tokens]."""
        return self.g.input("mtp_h_input", types.F32, n_embd, self.sizes.n_tokens)

    @property
    def kq_mask(self) -> ggml.Tensor:  # [n_kv, n_tokens]
        dtype = types.F16 if self.g.options.flash_attn else types.F32
        return self.g.input("attn_inp_kq_mask", dtype, self.sizes.n_kv, self.sizes.n_tokens)

    @property
    def k_idxs(self) -> ggml.Tensor:  # [n_tokens]
        return self.g.input("attn_inp_k_idxs", types.I64, self.sizes.n_tokens)

    def v_idxs(self, per_token: int) -> ggml.Tensor:
        """Return where V goes: one cell per token, or one element per value when the cache is transposed."""
        return self.g.input("attn_inp_v_idxs", types.I64, per_token * self.sizes.n_tokens)

    def s_copy(self, n_rows: int) -> ggml.Tensor:
        """Return the rows to read states from [n_rows · n_seqs]; a state is `n_rows` adjacent rows."""
        return self.g.input(rows_input("rs_s_copy", n_rows), types.I32, n_rows * self.sizes.n_seqs)

    def s_dst(self, n_rows: int) -> ggml.Tensor:
        """Return the rows to write states to [n_rows · n_seqs · n_kept], kept states newest first."""
        n_states = self.sizes.n_seqs * len(self.sizes.kept)
        return self.g.input(rows_input("rs_s_dst", n_rows), types.I64, n_rows * n_states)


def rows_input(name: str, n_rows: int) -> str:
    """Return the name of an index input for states of `n_rows` rows: llama.cpp's own name where that is one."""
    return name if n_rows == 1 else f"{name}_{n_rows}"
