"""Every ggml operation as a method: it adds the context, a check and a readable error, nothing else (level 1).

The body of a method is its docstring; `@op` compiles the signature into a call of ggml's function of the same name.
Shapes are in ggml order, strides and offsets in bytes, arguments in ggml's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import GraphError
from ._native import lib
from .op import caller, compile_op, encoded, op
from .provider import failure, has
from .tensor import Context, Tensor
from .types import GgmlType

TRI_UPPER_DIAG, TRI_UPPER, TRI_LOWER_DIAG, TRI_LOWER = range(4)
SORT_ASC, SORT_DESC = range(2)
ROPE_NORMAL, ROPE_NEOX, ROPE_MROPE, ROPE_VISION, ROPE_IMROPE = 0, 2, 8, 24, 40
PREC_DEFAULT, PREC_F32 = 0, 10


def unary(name: str, text: str) -> Callable:
    """Make the method of an op with one operand and no parameters."""

    def stub(self, a: Tensor) -> Tensor: ...

    stub.__name__, stub.__qualname__, stub.__doc__ = name, f"Ops.{name}", text
    return op(stub)


class Ops:
    """The operations, bound to the context their results live in. Raises GraphError naming the op, its operands and what failed."""

    __slots__ = ("_p", "context")

    def __init__(self, context: Context):
        self.context = context
        self._p = context._p

    # element by element
    dup = unary("dup", "Copy a.")
    sqr = unary("sqr", "Square each element.")
    sqrt = unary("sqrt", "Take the square root of each element.")
    log = unary("log", "Take the natural logarithm of each element.")
    exp = unary("exp", "Take e to the power of each element.")
    expm1 = unary("expm1", "Take e to the power of each element, minus one.")
    sin = unary("sin", "Take the sine of each element.")
    cos = unary("cos", "Take the cosine of each element.")
    abs = unary("abs", "Drop the sign of each element.")
    sgn = unary("sgn", "Take the sign of each element.")
    neg = unary("neg", "Flip the sign of each element.")
    step = unary("step", "Give 1 where an element is above 0, else 0.")
    floor = unary("floor", "Round down.")
    round = unary("round", "Round to the nearest integer.")
    tanh = unary("tanh", "Take the hyperbolic tangent.")
    elu = unary("elu", "Exponential linear unit.")
    relu = unary("relu", "Give max(a, 0).")
    sigmoid = unary("sigmoid", "Give 1 / (1 + exp(-a)).")
    sigmoid_inplace = unary("sigmoid_inplace", "Like sigmoid, writing into a.")
    softplus = unary("softplus", "Give log(1 + exp(a)).")
    gelu = unary("gelu", "Gaussian error linear unit, by tanh and a half-precision table.")
    gelu_erf = unary("gelu_erf", "Gaussian error linear unit, by erf.")
    gelu_quick = unary("gelu_quick", "Give a * sigmoid(1.702 a).")
    silu = unary("silu", "Give a * sigmoid(a).")
    silu_inplace = unary("silu_inplace", "Like silu, writing into a.")
    cumsum = unary("cumsum", "Sum along dimension 0 up to and including each element.")
    soft_max = unary("soft_max", "Normalise exp(a) along dimension 0.")
    soft_max_inplace = unary("soft_max_inplace", "Like soft_max, writing into a.")
    cont = unary("cont", "Copy a into adjacent memory.")
    sum = unary("sum", "Sum all elements -> [1].")
    sum_rows = unary("sum_rows", "Sum along dimension 0 -> [1, ne1, ne2, ne3].")
    mean = unary("mean", "Average along dimension 0 -> [1, ne1, ne2, ne3].")
    argmax = unary("argmax", "Give the index of the largest element of each row of [n, rows] -> i32 [rows].")
    diag = unary("diag", "Put [n, 1, …] on the diagonal of zeros -> [n, n, …].")
    transpose = unary("transpose", "View with dimensions 0 and 1 swapped.")
    swiglu = unary("swiglu", "Give silu(first half) * second half of each row [2n, …] -> [n, …].")

    @op
    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Give a + b; b is repeated to the shape of a."""

    @op
    def add_inplace(self, a: Tensor, b: Tensor) -> Tensor:
        """Like add, writing into a."""

    @op
    def add_id(self, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
        """Add row ids[i1, i2] of b [n, n_rows] to row i1, i2 of a [n, n_used, n_tokens]."""

    @op
    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """Give a - b; b is repeated to the shape of a."""

    @op
    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Give a * b element by element; b is repeated to the shape of a."""

    @op
    def mul_inplace(self, a: Tensor, b: Tensor) -> Tensor:
        """Like mul, writing into a."""

    @op
    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """Give a / b element by element; b is repeated to the shape of a."""

    @op
    def scale(self, a: Tensor, s: float) -> Tensor:
        """Give s * a."""

    @op
    def scale_inplace(self, a: Tensor, s: float) -> Tensor:
        """Like scale, writing into a."""

    @op
    def scale_bias(self, a: Tensor, s: float, b: float) -> Tensor:
        """Give s * a + b."""

    def clamp(self, a: Tensor, min: float, max: float) -> Tensor:
        """Limit each element to min … max, in a tensor of its own whatever the provider's clamp does."""

    clamp = compile_op(clamp, "q_clamp")

    @op
    def arange(self, start: float, stop: float, step: float) -> Tensor:
        """Give start, start + step, … below stop -> f32 [ceil((stop - start) / step)]."""

    @op
    def fill(self, a: Tensor, c: float) -> Tensor:
        """Give a tensor like a with every element c."""

    @op
    def fill_inplace(self, a: Tensor, c: float) -> Tensor:
        """Like fill, writing into a."""

    @op
    def swiglu_split(self, a: Tensor, b: Tensor) -> Tensor:
        """Give silu(a) * b."""

    @op
    def geglu_split(self, a: Tensor, b: Tensor) -> Tensor:
        """Give gelu(a) * b."""

    @op
    def reglu_split(self, a: Tensor, b: Tensor) -> Tensor:
        """Give relu(a) * b."""

    @op
    def norm(self, a: Tensor, eps: float) -> Tensor:
        """Shift and scale each row to mean 0 and variance 1."""

    @op
    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        """Divide each row by the root of its mean square plus eps."""

    @op
    def rms_norm_inplace(self, a: Tensor, eps: float) -> Tensor:
        """Like rms_norm, writing into a."""

    @op
    def group_norm(self, a: Tensor, n_groups: int, eps: float) -> Tensor:
        """Normalise over groups of dimension 2."""

    @op
    def l2_norm(self, a: Tensor, eps: float) -> Tensor:
        """Divide each row by the larger of its length and eps."""

    @op
    def argsort(self, a: Tensor, order: int) -> Tensor:
        """Give the indices that sort each row, SORT_ASC or SORT_DESC -> i32."""

    @op
    def argsort_top_k(self, a: Tensor, k: int) -> Tensor:
        """Give the indices of the k largest of each row, largest first: a view of a full argsort -> i32 [k, …]."""

    @op
    def top_k(self, a: Tensor, k: int) -> Tensor:
        """Give the indices of the k largest of each row, in no order -> i32 [k, …]."""

    @op
    def soft_max_ext(self, a: Tensor, mask: Tensor | None = None, scale: float = 1.0, max_bias: float = 0.0) -> Tensor:
        """Normalise exp(scale * a + mask) along dimension 0; mask f16 or f32 [ne0, ≥ ne1, …]."""

    @op
    def diag_mask_inf(self, a: Tensor, n_past: int) -> Tensor:
        """Set element i0 of row i1 to -inf where i0 > n_past + i1."""

    @op
    def diag_mask_zero(self, a: Tensor, n_past: int) -> Tensor:
        """Set element i0 of row i1 to 0 where i0 > n_past + i1."""

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
    def cpy(self, a: Tensor, b: Tensor) -> Tensor:
        """Copy a into b, converting to the type of b -> view of b."""

    @op
    def cast(self, a: Tensor, type: GgmlType) -> Tensor:
        """Convert a to another type."""

    @op
    def cont_1d(self, a: Tensor, ne0: int) -> Tensor:
        """Copy a into adjacent memory of another shape."""

    @op
    def cont_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """Copy a into adjacent memory of another shape."""

    @op
    def cont_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """Copy a into adjacent memory of another shape."""

    @op
    def cont_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Copy a into adjacent memory of another shape."""

    @op
    def reshape(self, a: Tensor, b: Tensor) -> Tensor:
        """View contiguous a in the shape of b."""

    @op
    def reshape_1d(self, a: Tensor, ne0: int) -> Tensor:
        """View contiguous a in another shape."""

    @op
    def reshape_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """View contiguous a in another shape."""

    @op
    def reshape_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int) -> Tensor:
        """View contiguous a in another shape."""

    @op
    def reshape_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """View contiguous a in another shape."""

    @op
    def view_1d(self, a: Tensor, ne0: int, offset: int) -> Tensor:
        """View ne0 elements from a byte offset."""

    @op
    def view_2d(self, a: Tensor, ne0: int, ne1: int, nb1: int, offset: int) -> Tensor:
        """View rows nb1 bytes apart from a byte offset."""

    @op
    def view_3d(self, a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int) -> Tensor:
        """View with byte strides nb1, nb2 from a byte offset."""

    @op
    def view_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """View with byte strides nb1, nb2, nb3 from a byte offset."""

    @op
    def permute(self, a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int) -> Tensor:
        """View with dimension i of a moved to axis_i."""

    @op
    def repeat(self, a: Tensor, b: Tensor) -> Tensor:
        """Repeat a to the shape of b."""

    @op
    def repeat_4d(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Repeat a to a shape whose dimensions are multiples of its own."""

    @op
    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """Join a and b along one dimension."""

    @op
    def pad(self, a: Tensor, p0: int, p1: int, p2: int, p3: int) -> Tensor:
        """Append zeros to each dimension."""

    @op
    def pad_ext(self, a: Tensor, lp0: int, rp0: int, lp1: int, rp1: int, lp2: int, rp2: int, lp3: int, rp3: int) -> Tensor:
        """Put zeros before and after each dimension."""

    @op
    def roll(self, a: Tensor, shift0: int, shift1: int, shift2: int, shift3: int) -> Tensor:
        """Shift elements along each dimension, around the end."""

    @op
    def set(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Copy a and write b over the part that a view with these strides and byte offset would show."""

    @op
    def set_inplace(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Like set, writing into a -> view of a."""

    @op
    def acc(self, a: Tensor, b: Tensor, nb1: int, nb2: int, nb3: int, offset: int) -> Tensor:
        """Like set, adding b instead of writing it."""

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
