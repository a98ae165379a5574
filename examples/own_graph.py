"""A graph of one's own, no model: the gated delta rule's fused op against its definition in numpy."""

import numpy as np

import qwen3next_ggml as q

S, H, T = 32, 3, 7
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((1, T, H, S)).astype(np.float32) for _ in range(3))
key /= np.linalg.norm(key, axis=-1, keepdims=True)
gate = -rng.random((1, T, H, 1)).astype(np.float32)
beta = rng.random((1, T, H, 1)).astype(np.float32)

with q.Graph() as g:
    state = g.tensor(np.zeros((1, H, S, S), np.float32))  # [S_k, S_v, H, n_seqs] in ggml order
    both = g.gated_delta_net(*(g.tensor(x) for x in (query, key, value, gate, beta)), state, 1)
    out = g.compute(both).reshape(-1)[: T * H * S].reshape(T, H, S)

S_t, expected = np.zeros((H, S, S)), np.empty((T, H, S))  # [H, S_v, S_k]
for t in range(T):
    q_t, k_t, v_t = query[0, t], key[0, t], value[0, t]
    S_t *= np.exp(gate[0, t])[..., None]
    delta = beta[0, t] * (v_t - np.einsum("hvk,hk->hv", S_t, k_t))
    S_t += np.einsum("hv,hk->hvk", delta, k_t)
    expected[t] = np.einsum("hvk,hk->hv", S_t, q_t) / np.sqrt(S)

print(f"largest difference {np.abs(out - expected).max():.1e}")
