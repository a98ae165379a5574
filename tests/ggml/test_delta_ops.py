"""The operations of the linear-attention layers against float64, walked token by token."""

import numpy as np
import pytest

from tests.kit import nmse


def delta_rule(q, k, v, gate, beta, state):
    """Run the gated delta rule; q, k, v [T, H, S], gate [T, H, 1 or S], beta [T, H], state [H, S_v, S_k] -> outputs [T, H, S], states after each token.

    A gate per channel decays the key axis.
    """
    outputs, states = [], []
    for t in range(len(q)):
        state = state * np.exp(gate[t])[:, None, :]
        error = v[t] - np.einsum("hvk,hk->hv", state, k[t])
        state = state + beta[t][:, None, None] * error[:, :, None] * k[t][:, None, :]
        outputs.append(np.einsum("hvk,hk->hv", state, q[t]) / np.sqrt(q.shape[-1]))
        states.append(state)
    return np.stack(outputs), np.stack(states)


def operands(rng, S, H, H_k, T, n_seqs, per_channel):
    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    q, k = (unit(rng.standard_normal((n_seqs, T, H_k, S))).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((n_seqs, T, H, S)).astype(np.float32)
    gate = -np.exp(rng.standard_normal((n_seqs, T, H, S if per_channel else 1)) - 1).astype(np.float32)
    beta = rng.random((n_seqs, T, H, 1)).astype(np.float32)
    state = rng.standard_normal((n_seqs, H, S, S)).astype(np.float32)
    return q, k, v, gate, beta, state


def split(result, S, H, T, n_seqs, K):
    """Take outputs [n_seqs, T, H, S] and states [K, n_seqs, H, S, S] apart."""
    flat = result.reshape(-1)
    n = S * H * T * n_seqs
    return flat[:n].reshape(n_seqs, T, H, S), flat[n:].reshape(K, n_seqs, H, S, S)


@pytest.mark.parametrize("per_channel", [False, True], ids=["scalar", "per_channel"])
@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("T", [1, 3, 9])
def test_gated_delta_net(bench, rng, per_channel, K, T):
    S, H, H_k, n_seqs = 16, 6, 3, 2
    given = operands(rng, S, H, H_k, T, n_seqs, per_channel)
    got = bench.run(bench.g.gated_delta_net(*(bench.tensor(x) for x in given), K))
    outputs, states = split(got, S, H, T, n_seqs, K)
    for s in range(n_seqs):
        q, k, v, gate, beta, state = (x[s].astype(np.float64) for x in given)
        # value head h reads key head h % H_k
        q, k = np.tile(q, (1, H // H_k, 1)), np.tile(k, (1, H // H_k, 1))
        want, after = delta_rule(q, k, v, gate, beta[..., 0], state)
        assert nmse(outputs[s], want) <= 1e-7
        for slot in range(min(T, K)):
            assert nmse(states[slot, s], after[T - 1 - slot]) <= 1e-7, f"slot {slot} is the state {slot} tokens back"
        # formulas that are nearly right
        wrong_axis, _ = delta_rule(q, k, v, gate.mean(-1, keepdims=True), beta[..., 0], state)
        no_decay, _ = delta_rule(q, k, v, 0 * gate, beta[..., 0], state)
        assert nmse(outputs[s], no_decay) > 1e-3
        assert not per_channel or nmse(outputs[s], wrong_axis) > 1e-4


def test_gated_delta_net_pairs_heads_tiled(bench, rng):
    S, H, H_k, T = 16, 6, 3, 2
    given = operands(rng, S, H, H_k, T, 1, False)
    outputs, _ = split(bench.run(bench.g.gated_delta_net(*(bench.tensor(x) for x in given), 1)), S, H, T, 1, 1)
    q, k, v, gate, beta, state = (x[0].astype(np.float64) for x in given)
    interleaved, _ = delta_rule(q.repeat(2, 1), k.repeat(2, 1), v, gate, beta[..., 0], state)
    assert nmse(outputs[0], interleaved) > 1e-2


@pytest.mark.parametrize("n_tokens, n_seqs", [(1, 1), (5, 1), (3, 2)])
def test_ssm_conv(bench, rng, n_tokens, n_seqs):
    d_conv, d_inner = 4, 13
    x, kernel = rng.standard_normal((n_seqs, d_inner, d_conv - 1 + n_tokens)), rng.standard_normal((d_inner, d_conv))
    got = bench.run(bench.g.ssm_conv(bench.tensor(x), bench.tensor(kernel)))
    windows = np.lib.stride_tricks.sliding_window_view(x, d_conv, axis=-1)
    want = np.einsum("sctk,ck->stc", windows, kernel)
    assert nmse(got.reshape(want.shape), want) <= 1e-7
    assert nmse(got.reshape(want.shape), np.einsum("sctk,ck->stc", windows, kernel[:, ::-1])) > 1e-2


@pytest.mark.parametrize("width, n_images", [(1, 1), (3, 2)])
@pytest.mark.parametrize("inner", [False, True], ids=["packed", "channels innermost"])
def test_conv_2d_dw_direct(bench, rng, inner, width, n_images):
    height, channels = 9, 13
    x, kernel = rng.standard_normal((n_images, channels, height, width)), rng.standard_normal((channels, 1, 4, width))
    if inner:
        size, row, image = 4, 4 * channels * width, 4 * channels * width * height
        column = 4 * channels if width > 1 else 8
        b = bench.g.view_4d(bench.tensor(x.transpose(0, 2, 3, 1)), channels, width, height, n_images, column, row, image, 0)
        a = bench.g.permute(bench.tensor(kernel.transpose(2, 3, 0, 1)), 2, 3, 0, 1)
        assert (b.nb[0], a.nb[3]) == (size, size)
        out = bench.g.conv_2d_dw_direct(a, bench.g.permute(b, 2, 0, 1, 3), 1, 1, 0, 3, 1, 1)
    else:
        out = bench.g.conv_2d_dw_direct(bench.tensor(kernel), bench.tensor(x), 1, 1, 0, 3, 1, 1)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (3, 3), (0, 0))), (4, width), axis=(2, 3))
    want = np.einsum("nchwyx,czyx->nchw", windows, kernel)
    got = bench.run(bench.g.cont(out))
    assert nmse(got.reshape(want.shape), want) <= 1e-7
    assert nmse(got.reshape(want.shape), np.einsum("nchwyx,czyx->nchw", windows, kernel[:, :, ::-1])) > 1e-2


@pytest.mark.parametrize("n, m", [(1, 3), (16, 16), (64, 7)])
def test_solve_tri(bench, rng, n, m):
    lower = np.tril(rng.standard_normal((2, 3, n, n)) * 0.3, -1) + np.eye(n) * 1.5
    b = rng.standard_normal((2, 3, n, m))
    got = bench.run(bench.g.solve_tri(bench.tensor(lower), bench.tensor(b), True, True, False))
    assert nmse(got, np.linalg.solve(lower, b)) <= 1e-7
    assert n == 1 or nmse(got, np.linalg.solve(lower.swapaxes(-1, -2), b)) > 1e-2


def test_the_chunk_recipe_of_cumsum_and_tri(bench, rng):
    """Pairwise decays as the chunked path builds them: exp(g_i - g_j) below the diagonal."""
    n = 16
    gate = -np.abs(rng.standard_normal((2, 1, n)))
    g, a = bench.g, bench.tensor(gate)
    total = g.cumsum(a)
    rows = g.repeat_4d(g.reshape_4d(total, n, 1, 2, 1), n, n, 2, 1)
    columns = g.repeat_4d(g.reshape_4d(total, 1, n, 2, 1), n, n, 2, 1)
    got = bench.run(g.tri(g.exp(g.sub(columns, rows)), 2))
    sums = gate[:, 0].cumsum(-1)
    want = np.tril(np.exp(sums[:, :, None] - sums[:, None, :]))
    assert nmse(got, want) <= 1e-7
    assert nmse(got, np.tril(want, -1)) > 1e-3
