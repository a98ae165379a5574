"""What a graph over several tokens at once names besides: conv windows, attention scores, chunks (level 0).

A walk goes token by token and has none of these; they follow from what it noted and from where the tokens were cut.
Arrays are in numpy order, that is, ggml's shape reversed.
"""

import numpy as np

from .kit import softmax

CHUNK = 64


def ubatch_values(model, trace, *, n_kv, delta_net="fused", seq=0):
    """Return name to value for the tokens of the last `model.decode(tokens, seq=seq, trace=trace)`, run as one ubatch.

    Attention looks at n_kv cells, those of the sequence first, the others zero. delta_net: "fused", "chunked" or "autoregressive".
    Where a name repeats within a layer, the last value has the name, those before it "#0", "#1" … behind theirs.
    """
    hp, found = model.hp, {}
    for il in range(hp.n_layer):
        state, noted = model.state(il, seq=seq), {name.removesuffix(f"-{il}"): x for name, x in trace.items() if name.endswith(f"-{il}")}
        if "s" in state:
            values = windows(noted["linear_attn_qkv_mixed"], noted["conv_states"])
            values |= {"fused": lambda _: {}, "chunked": chunks, "autoregressive": one_token}[delta_net](noted)
        else:
            values = scores(noted["Qcur"], state["k"], state["v"], hp.f_attention_scale or hp.n_embd_head_k**-0.5, n_kv)
        for name, value in values.items():
            base, _, number = name.partition("#")
            found[f"{base}-{il}#{number}" if number else f"{base}-{il}"] = value
    return found


def windows(qkv, before):
    """Lay the columns of qkv [T, n_channel] behind the window [n_channel, d_conv - 1] before them."""
    return {
        "conv_states_reshaped": before, "conv_state_update": before, "qkv_mixed_transposed": qkv.T,
        "conv_input": np.concatenate([before, qkv.T], axis=1),
    }  # fmt: skip


def scores(q, keys, values, scale, n_kv):
    """Attend with q [T, H, S], the last tokens of keys and values [n_past, H_kv, S], which later ones in the ubatch must not show."""
    T, H, S = q.shape
    n_past, H_kv, _ = keys.shape
    cells = [np.concatenate([x, np.zeros((n_kv - n_past, H_kv, S))]).repeat(H // H_kv, axis=1) for x in (keys, values)]
    kq = np.einsum("ths,nhs->htn", q, cells[0])
    seen = np.arange(n_kv) <= np.arange(n_past - T, n_past)[:, None]
    weights = softmax(np.where(seen, kq * scale, -np.inf))
    return {"kq": kq, "kq_soft_max": weights, "kqv": np.einsum("htn,nhs->hts", weights, cells[1])}


def delta_inputs(noted):
    """Return what the unfused forms take, each [T, H, S] or [T, H, 1]."""
    q, k, v = (noted[f"{x}_conv_predelta"] for x in "qkv")
    return {"q_in": q / np.sqrt(q.shape[-1]), "k_in": k, "v_in": v, "b_in": noted["beta"][..., None], "g_in": noted["gate"][..., None]}


def one_token(noted):
    """Return the values of the form for one token."""
    return delta_inputs(noted) | {"dnet_add_ar_state": noted["new_state"]}


def chunks(noted):
    """Run the delta rule over chunks of 64, the last one filled up with zeros: `kit.delta_chunked`, every step of it named.

    A head's values are [H, n_chunks, C, ...]; i is the token that looks, j the one looked at.
    """
    given = delta_inputs(noted)
    q, k, v, beta, g = (_cut(x) for x in given.values())
    G = np.cumsum(g, axis=2)  # [H, n_chunks, C, 1]
    lower = np.tril(np.ones((CHUNK, CHUNK)))
    D = np.exp(np.where(lower, G - G.swapaxes(2, 3), 0.0))
    v_b, k_b, G_last = v * beta, k * beta, G[:, :, -1:]
    A = np.tril(k_b @ k.swapaxes(2, 3) * D, -1)
    kq = np.tril(q @ k.swapaxes(2, 3) * D)
    solved = np.linalg.inv(np.eye(CHUNK) + A)
    W = solved @ (k_b * np.exp(G))
    k_left = k * np.exp(G_last - G)
    whole = {
        "v_b": v_b, "k_b": k_b, "g_cs": G.swapaxes(2, 3), "decay_mask": D, "attn": A, "kq": kq, "attn_pre_solve": -A,
        "dnet_add_ch_lhs": np.eye(CHUNK) + A, "dnet_add_ch_attn_solved": solved, "k_cumdecay": W,
        "key_gdiff_t": k_left.swapaxes(2, 3), "g_last_exp": np.exp(G_last),
    }  # fmt: skip
    return given | whole | _recurrence(noted["state_predelta"], q * np.exp(G), solved @ v_b, W, kq, k_left, np.exp(G_last))


def _recurrence(state, q_e, U, W, kq, k_left, e_last):
    """Go from chunk to chunk; state [H, S_v, S_k]."""
    found, n_chunks = {}, q_e.shape[1]
    for c in range(n_chunks):
        new = U[:, c] - W[:, c] @ state.swapaxes(1, 2)  # [H, C, S_v]
        out = q_e[:, c] @ state.swapaxes(1, 2) + kq[:, c] @ new
        state = state * e_last[:, c] + new.swapaxes(1, 2) @ k_left[:, c]
        number = f"#{c}" if c + 1 < n_chunks else ""
        for name, value in (("v_t_new", new.swapaxes(1, 2)), ("dnet_add_ch_attn_out", out), ("dnet_add_ch_state", state)):
            found[name + number] = value
    return found


def _cut(x):
    """Turn [T, H, n] into [H, n_chunks, C, n]."""
    T, H, n = x.shape
    filled = np.concatenate([x, np.zeros((-T % CHUNK, H, n))])
    return filled.swapaxes(0, 1).reshape(H, -1, CHUNK, n)
