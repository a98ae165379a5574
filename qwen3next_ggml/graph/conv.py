"""The causal depthwise convolution in front of the delta rule, and its window state (level 5)."""

from dataclasses import dataclass
from math import gcd

from .. import ggml
from .builder import GraphBuilder, expect_shape
from .inputs import Inputs
from .state import RecurrentState

PARTS = 16
# from here on flash attention goes by tiles as well: shorter pieces of a text round alike, however it is cut
MANY_TOKENS = 64


@dataclass(frozen=True)
class Rows:
    """What a convolution reads, a row per token: `old` [channels, d_conv − 1, n_seqs] before `new` [channels, T, n_seqs]."""

    old: ggml.Tensor
    new: ggml.Tensor


def conv_input(
    g: GraphBuilder, inp: Inputs, window: RecurrentState, x: ggml.Tensor, d_conv: int, il: int
) -> ggml.Tensor | Rows:
    """Put the last d_conv − 1 columns before x and keep the windows wanted → [d_conv − 1 + T, channels, n_seqs], or both as rows.

    x [channels, T, n_seqs]. Mirrors llama.cpp's `build_conv_state`.
    """
    channels, T, n_seqs, _ = x.ne
    expect_shape(x, f"convolution in layer {il}", window.spec.n_embd // (d_conv - 1), inp.sizes.n_seq_tokens, inp.sizes.n_seqs)
    old = g.name(window.read(g, inp), "conv_states", il)
    old = g.name(g.reshape_3d(old, d_conv - 1, channels, n_seqs), "conv_states_reshaped", il)
    if _goes_by_rows(g, inp, d_conv):
        return _rows(g, inp, window, old, x, il)
    if g.options.conv_in_parts and n_seqs == 1:
        columns = g.name(_concat_in_parts(g, old, x), "conv_input", il)
    else:
        x = g.name(g.transpose(x), "qkv_mixed_transposed", il)  # [T, channels, n_seqs]
        columns = g.name(g.concat(old, x, 0), "conv_input", il)

    nb0, nb1, nb2, _ = columns.nb
    for i, t in enumerate(inp.sizes.kept):
        last = g.view_3d(columns, d_conv - 1, channels, n_seqs, nb1, nb2, t * nb0)
        window.write(g, inp, g.name(last, "conv_state_last", il), i * n_seqs, "conv_state_update")
    return columns


def _goes_by_rows(g: GraphBuilder, inp: Inputs, d_conv: int) -> bool:
    """Say whether a ubatch does: one of many tokens, in which no window is kept but the last."""
    T, n_seqs = inp.sizes.n_seq_tokens, inp.sizes.n_seqs
    many = T >= max(MANY_TOKENS, d_conv) and inp.sizes.kept == (T,)
    # of several sequences the result has gaps, which a patch may not expect
    return g.options.conv_by_rows and many and (n_seqs == 1 or not g.is_patched)


def _concat_in_parts(g: GraphBuilder, old: ggml.Tensor, x: ggml.Tensor) -> ggml.Tensor:
    """Put old [n_old, channels] before x [channels, T] → [n_old + T, channels, 1], cut so that threads have parts to share."""
    n_old, (channels, T, _, _) = old.ne[0], x.ne
    n = gcd(channels, PARTS)
    x = g.permute(g.reshape_3d(x, channels // n, n, T), 1, 2, 0, 3)  # [T, channels / n, n]
    columns = g.concat(g.reshape_3d(old, n_old, channels // n, n), x, 0)
    return g.reshape_3d(columns, n_old + T, channels, 1)


def _rows(g: GraphBuilder, inp: Inputs, window: RecurrentState, old: ggml.Tensor, x: ggml.Tensor, il: int) -> Rows:
    """Turn old [n_old, channels, n_seqs], which is little, instead of x [channels, T, n_seqs], and keep the window after T."""
    n_old, (channels, T, n_seqs, _) = old.ne[0], x.ne
    x = x if x.is_contiguous else g.cont(x)
    old = g.cont(g.transpose(old))
    # the window that is kept takes the place of the old one
    g.expand(old)
    _, nb1, nb2, _ = x.nb
    last = g.view_3d(x, channels, n_old, n_seqs, nb1, nb2, (T - n_old) * nb1)
    window.write(g, inp, g.name(g.transpose(last), "conv_state_last", il), 0, "conv_state_update")
    return Rows(old, x)


def conv_silu(g: GraphBuilder, columns: ggml.Tensor | Rows, kernel: ggml.Tensor, il: int) -> ggml.Tensor:
    """Convolve columns [d_conv − 1 + T, channels, n_seqs] or rows with kernel [d_conv, channels] → silu [channels, T, n_seqs]."""
    out = _convolve_rows(g, columns, kernel) if isinstance(columns, Rows) else g.ssm_conv(columns, kernel)
    return g.name(g.silu(g.name(out, "conv_output_raw", il)), "conv_output_silu", il)


def _convolve_rows(g: GraphBuilder, rows: Rows, kernel: ggml.Tensor) -> ggml.Tensor:
    """Convolve rows with kernel [d_conv, channels] → [channels, T, n_seqs]: the new ones, then the first of them anew behind the old."""
    (d_conv, channels, _, _), (_, T, n_seqs, _), n_old = kernel.ne, rows.new.ne, rows.old.ne[1]
    kernel = g.reshape_4d(g.cont(g.transpose(kernel)), 1, channels, 1, d_conv)
    kernel = g.permute(kernel, 2, 3, 0, 1)  # [1, d_conv, 1, channels]
    _, nb1, nb2, _ = rows.new.nb
    first = g.concat(rows.old, g.view_3d(rows.new, channels, n_old, n_seqs, nb1, nb2, 0), 1)  # [channels, 2·n_old, n_seqs]
    out = _depthwise(g, rows.new, kernel, n_old)  # [channels, T + n_old, n_seqs]
    _, nb1, nb2, nb3 = out.nb
    out = g.set_inplace(out, _depthwise(g, first, kernel, 0), nb1, nb2, nb3, 0)
    # with the stride of the rows that are wanted, those of one sequence count as contiguous
    return g.view_3d(out, channels, T, n_seqs, nb1, nb2 if n_seqs > 1 else T * nb1, 0)


def _depthwise(g: GraphBuilder, x: ggml.Tensor, kernel: ggml.Tensor, pad: int) -> ggml.Tensor:
    """Convolve x [channels, n, n_seqs], between `pad` rows of 0, with kernel [1, d_conv, 1, channels] → [channels, n_out, n_seqs]."""
    (channels, n, n_seqs, _), (size, nb1, nb2, _) = x.ne, x.nb
    # an image with one column; the step from column to column is never made, but must lie between those of channels and rows
    x = g.permute(g.view_4d(x, channels, 1, n, n_seqs, 2 * size, nb1, nb2, 0), 2, 0, 1, 3)  # [1, n, channels, n_seqs]
    out = g.conv_2d_dw_direct(kernel, x, 1, 1, 0, pad, 1, 1)  # [1, n_out, channels, n_seqs], channels adjacent
    return g.reshape_3d(g.permute(out, 1, 2, 0, 3), channels, out.ne[1], n_seqs)
