"""The causal depthwise convolution in front of the delta rule, and its window state (level 5)."""

from math import gcd

from .. import ggml
from .builder import GraphBuilder, expect_shape
from .inputs import Inputs
from .state import RecurrentState

PARTS = 16


def conv_input(
    g: GraphBuilder, inp: Inputs, window: RecurrentState, x: ggml.Tensor, d_conv: int, il: int
) -> ggml.Tensor:
    """Put the last d_conv − 1 columns before x and keep the windows wanted → [d_conv − 1 + T, channels, n_seqs].

    x [channels, T, n_seqs]. Mirrors llama.cpp's `build_conv_state`.
    """
    channels, T, n_seqs, _ = x.ne
    expect_shape(x, f"convolution in layer {il}", window.spec.n_embd // (d_conv - 1), inp.sizes.n_seq_tokens, inp.sizes.n_seqs)
    old = g.name(window.read(g, inp), "conv_states", il)
    old = g.name(g.reshape_3d(old, d_conv - 1, channels, n_seqs), "conv_states_reshaped", il)
    if g.options.conv_in_parts and n_seqs == 1:
        columns = g.name(_concat_in_parts(g, old, x), "conv_input", il)
    else:
        x = g.name(g.transpose(x), "qkv_mixed_transposed", il)  # [T, channels, n_seqs]
        columns = g.name(g.concat(old, x, 0), "conv_input", il)

    nb0, nb1, nb2, _ = columns.nb
    target = window.target(g, inp)
    for i, t in enumerate(inp.sizes.kept):
        last = g.view_3d(columns, d_conv - 1, channels, n_seqs, nb1, nb2, t * nb0)
        last = g.name(last, "conv_state_last", il)
        if target is None:
            window.scatter(g, inp, last, i * n_seqs)
        else:
            g.expand(g.cpy(last, g.name(target, "conv_state_update", il)))
    return columns


def _concat_in_parts(g: GraphBuilder, old: ggml.Tensor, x: ggml.Tensor) -> ggml.Tensor:
    """Put old [n_old, channels] before x [channels, T] → [n_old + T, channels, 1], cut so that threads have parts to share."""
    n_old, (channels, T, _, _) = old.ne[0], x.ne
    n = gcd(channels, PARTS)
    x = g.permute(g.reshape_3d(x, channels // n, n, T), 1, 2, 0, 3)  # [T, channels / n, n]
    columns = g.concat(g.reshape_3d(old, n_old, channels // n, n), x, 0)
    return g.reshape_3d(columns, n_old + T, channels, 1)


def conv_silu(g: GraphBuilder, columns: ggml.Tensor, kernel: ggml.Tensor, il: int) -> ggml.Tensor:
    """Convolve columns [d_conv − 1 + T, channels, n_seqs] with kernel [d_conv, channels] → silu [channels, T, n_seqs]."""
    out = g.name(g.ssm_conv(columns, kernel), "conv_output_raw", il)
    return g.name(g.silu(out), "conv_output_silu", il)
