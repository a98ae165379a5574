"""The formulas against closed forms and definitions written another way."""

import math

import numpy as np
import pytest

from qwen3next_ggml.reference import Rope, kit
from tests.kit import max_abs

rng = np.random.default_rng


def delta_inputs(T, *, per_channel, H=3, S=5, seed=0):
    r = rng(seed)
    q, k = (kit.l2_norm(r.normal(size=(T, H, S)), 1e-6) for _ in range(2))
    g = -r.exponential(0.3, size=(T, H, S) if per_channel else (T, H))
    return r.normal(size=(H, S, S)), q, k, r.normal(size=(T, H, S)), g, r.uniform(size=(T, H))


def walk(state, *streams, step=kit.delta_step):
    outs = []
    for token in zip(*streams):
        out, state = step(state, *token)
        outs.append(out)
    return np.stack(outs), state


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_chunked_rule_equals_the_walk(T, per_channel):
    inputs = delta_inputs(T, per_channel=per_channel)
    for got, want in zip(kit.delta_chunked(*inputs), walk(*inputs)):
        assert max_abs(got, want) < 1e-11


def test_decay_on_the_value_axis_is_seen():
    def wrong(state, q, k, v, g, beta):
        out, state = kit.delta_step(state * np.exp(g)[:, :, None], q, k, v, np.zeros_like(g), beta)
        return out, state

    inputs = delta_inputs(20, per_channel=True)
    assert max_abs(walk(*inputs, step=wrong)[0], kit.delta_chunked(*inputs)[0]) > 1e-2


@pytest.mark.parametrize("per_channel", [False, True])
def test_delta_step_is_the_papers_formula(per_channel):
    state, *streams = delta_inputs(1, per_channel=per_channel)
    q, k, v, g, beta = (x[0] for x in streams)
    out, new = kit.delta_step(state, q, k, v, g, beta)
    for h in range(len(k)):
        S = state[h].T  # keys down, values across
        forget = np.diag(np.exp(g[h])) if per_channel else np.exp(g[h]) * np.eye(5)
        want = (np.eye(5) - beta[h] * np.outer(k[h], k[h])) @ forget @ S + beta[h] * np.outer(k[h], v[h])
        assert max_abs(new[h].T, want) < 1e-14
        assert max_abs(out[h], q[h] @ want / math.sqrt(5)) < 1e-14


@pytest.mark.parametrize("pairing, want", [("interleaved", [0, 0, 0, 1, 1, 1]), ("tiled", [0, 1, 0, 1, 0, 1])])
def test_pair_heads(pairing, want):
    assert kit.pair_heads(np.array([[0.0], [1.0]]), 6, pairing).ravel().tolist() == want


def test_conv_steps_equal_one_convolution():
    r = rng(1)
    x, kernel, window = r.normal(size=(9, 4)), r.normal(size=(4, 3)), r.normal(size=(4, 2))
    got, state = walk(window, x, step=lambda window, x: kit.conv_step(window, x, kernel))
    whole = np.concatenate([window.T, x])
    want = np.stack([np.convolve(whole[:, c], kernel[c, ::-1], "valid") for c in range(4)], axis=1)
    assert max_abs(got, want) < 1e-14
    assert max_abs(state, whole[-2:].T) == 0.0


def test_norms():
    x = rng(2).normal(size=(3, 8))
    assert np.allclose(np.mean(kit.rms_norm(x, 1.0, 0.0) ** 2, axis=1), 1.0)
    assert np.allclose(np.linalg.norm(kit.l2_norm(x, 0.0), axis=1), 1.0)
    tiny = np.full((1, 4), 1e-4)
    assert kit.l2_norm(tiny, 1e-6)[0, 0] == pytest.approx(1e-4 / math.sqrt(4e-8 + 1e-6))


def rope(**given):
    plain = dict(freq_base=1e7, freq_scale=1.0, n_ctx_orig=4096, ext_factor=0.0, attn_factor=1.0)
    return Rope(**plain | given)


@pytest.mark.parametrize("pos", [0, 1, 700, 2355, 100000])
def test_partial_rope_is_transformers_definition(pos):
    n_rot, x = 64, rng(3).normal(size=(2, 256))
    inv_freq = 1.0 / 1e7 ** (np.arange(0, n_rot, 2) / n_rot)
    angle = np.concatenate([pos * inv_freq] * 2)
    turned = np.concatenate([-x[:, n_rot // 2 : n_rot], x[:, : n_rot // 2]], axis=1)
    got = kit.rope_neox(x, pos, rope(), n_rot=n_rot)
    assert max_abs(got[:, :n_rot], x[:, :n_rot] * np.cos(angle) + turned * np.sin(angle)) < 1e-9
    assert np.array_equal(got[:, n_rot:], x[:, n_rot:])
    over_the_head = kit.rope_neox(x, pos, rope(), n_rot=256)
    assert pos == 0 or max_abs(got, over_the_head) > 1e-2


def test_linear_scaling_divides_positions():
    cos, _ = kit.rope_angles(1000, rope(freq_scale=0.25), n_rot=8)
    assert max_abs(cos, kit.rope_angles(250, rope(), n_rot=8)[0]) < 1e-12


def test_attend_groups_query_heads():
    r = rng(4)
    q, keys, values = r.normal(size=(6, 4)), r.normal(size=(5, 2, 4)), r.normal(size=(5, 2, 4))
    got = kit.attend(q, keys, values, scale=0.3)
    for h in range(6):
        weights = np.exp(0.3 * keys[:, h // 3] @ q[h])
        assert max_abs(got[h], weights @ values[:, h // 3] / weights.sum()) < 1e-14


def test_route():
    probs, order, weights = kit.route(np.log([0.1, 0.4, 0.2, 0.3]), 2)
    assert order.tolist() == [1, 3, 2, 0] and np.allclose(probs, [0.1, 0.4, 0.2, 0.3]) and np.allclose(weights, [4 / 7, 3 / 7])
    flat = kit.route(np.zeros(1 << 17), 1)
    assert flat[2][0] == pytest.approx(2.0**-17 / 2.0**-14)
