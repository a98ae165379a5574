"""Every ggml operation as a method, those of elements and of layout in files of their own: it adds the context, a check and a readable error, nothing else (level 1).

The body of a method is its docstring; `@op` compiles the signature into a call of ggml's function of the same name.
Shapes are in ggml order, strides and offsets in bytes, arguments in ggml's order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import GraphError
from ._native import lib
from .op import caller, encoded, op
from .ops_elements import Elements
from .ops_layout import Layout
from .provider import failure, has
from .tensor import Context, Tensor

TRI_UPPER_DIAG, TRI_UPPER, TRI_LOWER_DIAG, TRI_LOWER = range(4)
SORT_ASC, SORT_DESC = range(2)
ROPE_NORMAL, ROPE_NEOX, ROPE_MROPE, ROPE_VISION, ROPE_IMROPE = 0, 2, 8, 24, 40
PREC_DEFAULT, PREC_F32 = 0, 10


class Ops(Elements, Layout):
    """The operations, bound to the context their results live in. Raises GraphError naming the op, its operands and what failed."""

    __slots__ = ("_p", "context")

    def __init__(self, context: Context):
        self.context = context
        self._p = context._p

    @op
    def get_rows(self, a: Tensor, b: Tensor) -> Tensor:
        """Take the rows i32 b [n, ne2, ne3] of a [k, n_rows, ne2, ne3] -> f32 [k, n, ne2, ne3]."""

    @op
    def set_rows(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Write the rows of f32 b [k, n, …] into rows i64 or i32 c [n, …] of a [k, n_rows, …] -> view of a."""

    @op
    def mul_mat(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply a [k, n, …], of any type, with b [k, m, …] -> f32 [n, m, …]; a is repeated along dimensions 2 and 3."""

    @op
    def mul_mat_id(self, as_: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """Multiply as_ [k, n, n_expert], chosen by i32 ids [n_used, n_tokens], with b [k, 1 or n_used, n_tokens] -> [n, n_used, n_tokens]."""

    @op
    def out_prod(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply a [n, k, …] with b [m, k, …] over dimension 1 -> [n, m, …]."""

    @op
    def tri(self, a: Tensor, kind: int) -> Tensor:
        """Keep one triangle of square a, TRI_UPPER_DIAG, TRI_UPPER, TRI_LOWER_DIAG or TRI_LOWER, and set the rest to 0."""

    @op
    def solve_tri(self, a: Tensor, b: Tensor, left: bool, lower: bool, uni: bool) -> Tensor:
        """Solve a x = b for lower triangular a [n, n, …] and b [m, n, …] -> [m, n, …]; ggml has left, lower, not unit."""

    @op
    def rope_ext(self, a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, mode: int, n_ctx_orig: int, freq_base: float, freq_scale: float,
                 ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float) -> Tensor:  # fmt: skip
        """Rotate the first n_dims of a [head_dim, n_head, n_tokens, …] by positions i32 b [n_tokens]; c are frequency factors."""

    @op
    def rope_ext_inplace(self, a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, mode: int, n_ctx_orig: int, freq_base: float,
                         freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float) -> Tensor:  # fmt: skip
        """Like rope_ext, writing into a."""

    @op
    def rope_multi(self, a: Tensor, b: Tensor, c: Tensor | None, n_dims: int, sections: Sequence[int], mode: int, n_ctx_orig: int,
                   freq_base: float, freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float,
                   beta_slow: float) -> Tensor:  # fmt: skip
        """Like rope_ext with four positions a token, i32 b [4 n_tokens], spread over four sections of the rotated pairs."""

    @op
    def flash_attn_ext(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0,
                       logit_softcap: float = 0.0) -> Tensor:  # fmt: skip
        """Attend: q [d, n_tokens, n_head, …], k and v [d, n_kv, n_head_kv, …], f16 mask [n_kv, n_tokens, …] -> [d_v, n_head, n_tokens, …]."""

    @op
    def conv_2d_dw_direct(self, a: Tensor, b: Tensor, stride0: int, stride1: int, pad0: int, pad1: int, dilation0: int, dilation1: int) -> Tensor:
        """Convolve channels of b [W, H, C, N], 0 around it, with kernels a [KW, KH, 1, C] -> [OW, OH, C, N]; packed or, faster, channels innermost."""

    @op
    def ssm_conv(self, sx: Tensor, c: Tensor) -> Tensor:
        """Convolve sx [d_conv - 1 + n_tokens, d_inner, n_seqs] with c [d_conv, d_inner] -> [d_inner, n_tokens, n_seqs]."""

    @op
    def gated_delta_net(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int) -> Tensor:
        """Run the gated delta rule; returns outputs, then the last min(n_tokens, K) states, newest first.

        q, k [S, H_k, n_tokens, n_seqs], v [S, H, …], g [1 or S, H, …], beta [1, H, …], state [S, S, H, n_seqs]
        -> [S * H, n_tokens * n_seqs + K * S * n_seqs]. Value head h reads key head h % H_k. State slots beyond n_tokens are not written.
        """

    @op
    def gated_linear_attn(self, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
        """Run gated linear attention over k, v, q, g [S, H, n_tokens] with state [S, S, H, n_seqs]."""

    def mul_mat_set_prec(self, a: Tensor, prec: int) -> Tensor:
        """Ask for a precision (PREC_F32) inside a mul_mat. Returns a."""
        return self._set_prec("ggml_mul_mat_set_prec", a, "MUL_MAT", prec)

    def flash_attn_ext_set_prec(self, a: Tensor, prec: int) -> Tensor:
        """Ask for a precision (PREC_F32) inside a flash_attn_ext. Returns a."""
        return self._set_prec("ggml_flash_attn_ext_set_prec", a, "FLASH_ATTN_EXT", prec)

    def into(self, a: Tensor, owner: Tensor, offset: int) -> Tensor:
        """Let the result of a fresh node lie inside `owner`, a tensor that is no view, from byte `offset` on. Returns it.

        Raises GraphError when it does not fit. Whoever reads or writes that part of `owner` besides must be expanded in the right order.
        """
        if not lib.q_into(a._p, owner._p, offset):
            raise GraphError(f"into: {a!r} at byte {offset} of {owner!r}: {failure()}{caller()}")
        return a

    def set_name(self, a: Tensor, name: str, il: int = -1) -> Tensor:
        """Name a tensor, "name-il" for a layer; 63 bytes are kept. Returns it."""
        lib.q_name(a._p, encoded(name), il)
        return a

    def set_input(self, a: Tensor) -> Tensor:
        """Mark a tensor as filled before the graph runs: its memory is not shared with nodes that run first. Returns it."""
        lib.ggml_set_input(a._p)
        return a

    def set_output(self, a: Tensor) -> Tensor:
        """Mark a tensor as read after the graph ran: its memory is not used again. Returns it."""
        lib.ggml_set_output(a._p)
        return a

    def _set_prec(self, function: str, a: Tensor, wanted: str, prec: int) -> Tensor:
        if a.op != wanted:
            raise GraphError(f"{function.removeprefix('ggml_')}: {a!r} is no {wanted}{caller()}")
        if has(function):
            getattr(lib, function)(a._p, prec)
        return a
