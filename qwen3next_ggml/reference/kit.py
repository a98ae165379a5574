"""Formulas of the hybrid models in float64 numpy (level 0): norms, rope, conv, delta rule, attention, experts.

Arrays are in numpy order, that is, ggml's shape reversed: a state [S_k, S_v, H] of ggml is [H, S_v, S_k] here.
Knows one token, or one sequence for the chunked rule; no weights by name, no state between calls.
"""

import numpy as np

# the smallest normal float16: upstream never divides the experts' weights by less
WEIGHT_SUM_MIN = 2.0**-14


def sigmoid(x):
    """Squash to (0, 1)."""
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x):
    """Weigh x by its own sigmoid."""
    return x * sigmoid(x)


def softplus(x):
    """Compute log(1 + e^x) without overflow."""
    return np.logaddexp(0.0, x)


def softmax(x):
    """Normalise the last axis to probabilities."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def rms_norm(x, weight, eps):
    """Scale the last axis to unit mean square, then by weight (the file's weight is final: nothing is added to it)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def l2_norm(x, eps):
    """Scale the last axis to unit length, eps inside the root: x / sqrt(sum x^2 + eps).

    `ggml_l2_norm` clamps the root at eps instead; llama.cpp's `build_gdn_l2_norm` and transformers do what this does.
    """
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)


def rope_angles(pos, rope, *, n_rot):
    """Return cos and sin [n_rot / 2] at a position, scaled as `ggml_rope_ext` does (linear or YaRN).

    `rope` has freq_base, freq_scale, n_ctx_orig, ext_factor, attn_factor, beta_fast, beta_slow.
    """
    pair = np.arange(n_rot // 2)
    extrapolated = pos * rope.freq_base ** (-2.0 * pair / n_rot)
    interpolated = rope.freq_scale * extrapolated
    theta, magnitude = interpolated, rope.attn_factor
    if rope.ext_factor != 0.0:
        low, high = _yarn_range(rope, n_rot)
        ramp = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
        mix = ramp * rope.ext_factor
        theta = interpolated * (1.0 - mix) + extrapolated * mix
        magnitude = magnitude * (1.0 + 0.1 * np.log(1.0 / rope.freq_scale))
    return np.cos(theta) * magnitude, np.sin(theta) * magnitude


def _yarn_range(rope, n_rot):
    def dim(n_turns):
        return n_rot * np.log(rope.n_ctx_orig / (n_turns * 2.0 * np.pi)) / (2.0 * np.log(rope.freq_base))

    return max(0.0, np.floor(dim(rope.beta_fast))), min(n_rot - 1.0, np.ceil(dim(rope.beta_slow)))


def rope_neox(x, pos, rope, *, n_rot):
    """Rotate the first n_rot of x [n_head, head_dim], pairing i with i + n_rot / 2; the rest stays untouched."""
    cos, sin = rope_angles(pos, rope, n_rot=n_rot)
    half = n_rot // 2
    lo, hi = x[:, :half], x[:, half:n_rot]
    return np.concatenate([lo * cos - hi * sin, lo * sin + hi * cos, x[:, n_rot:]], axis=1)


def conv_step(window, x, kernel):
    """Run a causal depthwise convolution for one token.

    window [n_channel, d_conv - 1] (oldest first), x [n_channel], kernel [n_channel, d_conv]; returns out [n_channel] and the next window.
    """
    seen = np.concatenate([window, x[:, None]], axis=1)
    return np.sum(seen * kernel, axis=1), seen[:, 1:]


def pair_heads(x, n_v, pairing):
    """Repeat key heads x [n_k, S] to one per value head [n_v, S].

    "interleaved": value head h reads key head h // (n_v / n_k), as in Qwen3-Next; "tiled": h % n_k, as in Qwen3.5.
    """
    n_k = len(x)
    head = np.arange(n_v)
    return x[{"interleaved": head // (n_v // n_k), "tiled": head % n_k}[pairing]]


def delta_step(state, q, k, v, g, beta):
    """Advance the gated delta rule by one token.

    state [H, S_v, S_k], q and k [H, S_k], v [H, S_v], beta [H]; g, the log of the decay, is [H], or [H, S_k] in KDA,
    where each key channel decays by itself. Returns out [H, S_v] and the new state. Mirrors `ggml_gated_delta_net`.
    """
    S_k = k.shape[-1]
    decay = np.exp(g)[:, None, None] if g.ndim == 1 else np.exp(g)[:, None, :]
    state = state * decay
    surprise = (v - np.einsum("hvk,hk->hv", state, k)) * beta[:, None]
    state = state + surprise[:, :, None] * k[:, None, :]
    return np.einsum("hvk,hk->hv", state, q) / np.sqrt(S_k), state


def delta_chunked(state, q, k, v, g, beta, *, chunk=None):
    """Run the gated delta rule over a sequence in chunks: the closed form of `delta_step`, to test it against.

    Arguments as in `delta_step` with a leading token axis; chunk defaults to 64, 16 in KDA. Returns out [T, H, S_v] and the final state.
    Within a chunk the writes u solve (I + A) u = beta (v - k decayed state), A[i, j] = beta_i <k_i, decay_ij k_j> for j < i.
    """
    T, _, S_k = k.shape
    chunk = chunk or (64 if g.ndim == 2 else 16)
    g = np.broadcast_to(g if g.ndim == 3 else g[..., None], k.shape)
    outs = []
    for at in range(0, T, chunk):
        qc, kc, vc, gc, bc = (x[at : at + chunk].swapaxes(0, 1) for x in (q, k, v, g, beta))  # [H, C, ...]
        C = kc.shape[1]
        G = np.cumsum(gc, axis=1)
        past = np.tril(np.ones((C, C), bool))[..., None]
        decay = np.exp(np.where(past, G[:, :, None] - G[:, None], -np.inf))  # [H, C, C, S_k]
        kk = np.einsum("hik,hijk,hjk->hij", kc, decay, kc)
        qk = np.einsum("hik,hijk,hjk->hij", qc, decay, kc)
        A = np.tril(kk * bc[..., None], -1)
        seen = np.einsum("hik,hvk->hiv", kc * np.exp(G), state)
        u = np.linalg.solve(np.eye(C) + A, bc[..., None] * (vc - seen))  # [H, C, S_v]
        out = np.einsum("hik,hvk->hiv", qc * np.exp(G), state) + qk @ u
        outs.append(out.swapaxes(0, 1) / np.sqrt(S_k))
        state = state * np.exp(G[:, -1])[:, None, :] + np.einsum("hiv,hik->hvk", u, kc * np.exp(G[:, -1:] - G))
    return np.concatenate(outs), state


def attend(q, keys, values, *, scale):
    """Attend from one token to all cached ones, itself included.

    q [n_head, S], keys and values [n_past, n_head_kv, S]; query head h reads KV head h // (n_head / n_head_kv). Returns [n_head, S].
    """
    r = len(q) // keys.shape[1]
    keys, values = (np.repeat(x, r, axis=1) for x in (keys, values))
    return np.einsum("hp,phs->hs", softmax(np.einsum("hs,phs->hp", q, keys) * scale), values)


def route(logits, n_used):
    """Choose n_used experts: softmax over all of them, the largest first, weights made to sum to 1.

    Returns the probabilities [n_expert], the order of all experts, and the weights of its first n_used.
    """
    probs = softmax(logits)
    order = np.argsort(-probs, kind="stable")
    picked = probs[order[:n_used]]
    return probs, order, picked / max(picked.sum(), WEIGHT_SUM_MIN)
