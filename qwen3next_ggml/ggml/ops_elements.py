"""Ops on elements and on rows: arithmetic, activations, norms, sorting (level 1)."""

from __future__ import annotations

from .op import compile_op, op, unary
from .tensor import Tensor


class Elements:
    """Part of `Ops`."""

    __slots__ = ()

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
    sum = unary("sum", "Sum all elements -> [1].")
    sum_rows = unary("sum_rows", "Sum along dimension 0 -> [1, ne1, ne2, ne3].")
    mean = unary("mean", "Average along dimension 0 -> [1, ne1, ne2, ne3].")
    argmax = unary("argmax", "Give the index of the largest element of each row of [n, rows] -> i32 [rows].")
    diag = unary("diag", "Put [n, 1, …] on the diagonal of zeros -> [n, n, …].")
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
