"""The gated delta rule in three forms with one signature (level 5).

Per head, with state S [S_k, S_v], decay exp(gate) on the key axis and step size beta:
S ← exp(gate)·S;  S ← S + k ⊗ beta·(v − Sᵀk);  o = Sᵀq/√S_k      (Gated Delta Networks, arXiv:2412.06464; KDA, arXiv:2510.26692)
A gate is scalar [1, H_v, T, n_seqs] or per key channel [S_k, H_v, T, n_seqs].
"""

from .. import ggml
from ..ggml.ops import TRI_LOWER, TRI_LOWER_DIAG
from .builder import GraphBuilder, expect_shape

CHUNK = 64
CHUNK_PER_CHANNEL = 16  # the per-channel form holds a [S_k, chunk, chunk] decay for every chunk and head


def delta_net(
    g: GraphBuilder, q: ggml.Tensor, k: ggml.Tensor, v: ggml.Tensor, gate: ggml.Tensor, beta: ggml.Tensor,
    state: ggml.Tensor, il: int, *, kept: tuple[int, ...] | None = None, pairing: str = "tiled",
) -> tuple[ggml.Tensor, list[ggml.Tensor]]:  # fmt: skip
    """Run the delta rule → output [S_v, H_v, T, n_seqs] and the states after `kept` token counts (newest first).

    q, k [S_k, H_k, T, n_seqs], v [S_v, H_v, T, n_seqs], beta [1, H_v, T, n_seqs]; for H_k < H_v only the fused form takes
    unrepeated heads, "tiled" (see `pair_heads`), or "interleaved" those of one sequence. Each returned tensor
    [S_k, S_v, H_v, n_seqs·m] holds m states, all of one before the next. Mirrors the choice of llama.cpp's `build_delta_net`.
    """
    S_k, H_k, T, _ = q.ne
    S_v, H_v, _, n_seqs = v.ne
    where = f"delta net in layer {il}"
    expect_shape(k, where, *q.ne)
    expect_shape(v, where, S_k, H_v, T, n_seqs)
    expect_shape(gate, where, 0, H_v, T, n_seqs)
    expect_shape(beta, where, 1, H_v, T, n_seqs)
    expect_shape(state, where, S_k, S_v, H_v, n_seqs)
    if g.options.delta_net != "fused":
        expect_shape(q, where, S_k, H_v, T, n_seqs)
    if H_k != H_v and pairing == "interleaved":
        expect_shape(q, where, S_k, H_k, T, 1)
        return _shared_keys(g, q, k, v, gate, beta, state, il, kept or (T,))
    segments = _segments(kept or (T,), fused=g.options.delta_net == "fused")
    if len(segments) == 1:
        out, new = _one_segment(g, q, k, v, gate, beta, state, il, segments[0][1])
        return out, [new]

    outs, states, start = [], [], 0
    for end, n_keep in segments:
        part = (_tokens(g, x, start, end) for x in (q, k, v, gate, beta))
        out, new = _one_segment(g, *part, state, il, n_keep)
        outs.append(out)
        states.append(new)
        state = g.view_4d(new, S_k, S_v, H_v, n_seqs, *new.nb[1:], 0)
        start = end
    out = outs[0]
    for part in outs[1:]:
        out = g.concat(out, part, 2)
    return out, states[::-1]


def pairs_by_itself(g: GraphBuilder, T: int, n_seqs: int, S: int) -> bool:
    """Say whether `delta_net` gets interleaved heads unrepeated: it copies a state then, which is less than T repeated heads."""
    return g.options.heads_as_seqs and g.options.delta_net == "fused" and n_seqs == 1 and 2 * T > S


def _shared_keys(g, q, k, v, gate, beta, state, il, kept):
    """Run value head h with key head h // r, r = H_v / H_k, of one sequence.

    The op pairs head h of a sequence with key head h mod H_k, and shares q and k among sequences where those have fewer: value
    heads h mod r = j become sequence j.
    """
    S, H_k, T, _ = q.ne
    H_v = v.ne[1]
    r = H_v // H_k
    _, nb1, nb2, _ = v.nb
    v = g.view_4d(v, S, H_k, T, r, r * nb1, nb2, nb1, 0)
    gate, beta = (_by_remainder(g, x, r, H_k, T) for x in (gate, beta))
    state = g.cont(g.permute(g.reshape_3d(state, S * S, r, H_k), 0, 2, 1, 3))  # [S·S, H_k, r]
    state = g.reshape_4d(state, S, S, H_k, r)
    out, states = delta_net(g, q, k, v, gate, beta, state, il, kept=kept)  # [S, H_k, T, r]
    out = g.permute(out, 0, 2, 3, 1)  # [S, r, H_k, T]
    return out, [g.permute(g.reshape_4d(x, S * S, H_k, r, x.ne[3] // r), 0, 2, 1, 3) for x in states]  # [S·S, r, H_k, m]


def _by_remainder(g, x, r, H_k, T):
    n = x.ne[0]
    x = g.permute(g.reshape_4d(x, n, r, H_k, T), 0, 3, 1, 2)  # [n, H_k, T, r]
    return g.cont(x)


def _segments(kept: tuple[int, ...], *, fused: bool) -> list[tuple[int, int]]:
    """Return (end, states wanted up to there) of each piece the tokens are run in.

    The fused op returns the states after its last tokens, so consecutive counts are one piece; other forms return the
    last state only.
    """
    segments: list[tuple[int, int]] = []
    for t in sorted(kept):
        if fused and segments and segments[-1][0] == t - 1:
            segments[-1] = (t, segments[-1][1] + 1)
        else:
            segments.append((t, 1))
    return segments


def _one_segment(g, q, k, v, gate, beta, state, il, n_keep):
    if g.options.delta_net == "fused":
        return fused(g, q, k, v, gate, beta, state, n_keep)
    form = autoregressive if q.ne[2] == 1 else chunked
    out, new = form(g, q, k, v, gate, beta, state, il)
    # the caller may write the new state over the old one: whatever still reads the old one comes first
    g.expand(out)
    return out, new


def _tokens(g, x, start, end):
    n, H, _, n_seqs = x.ne
    _, nb1, nb2, nb3 = x.nb
    if n_seqs == 1:
        # with the stride of the piece, not of the whole, it counts as contiguous
        return g.view_4d(x, n, H, end - start, 1, nb1, nb2, nb2 * (end - start), start * nb2)
    return g.cont(g.view_4d(x, n, H, end - start, n_seqs, nb1, nb2, nb3, start * nb2))


def pair_heads(g: GraphBuilder, x: ggml.Tensor, H_v: int, pairing: str) -> ggml.Tensor:
    """Repeat the key heads of x [S, H_k, T, n_seqs] to H_v heads.

    "interleaved": value head h uses key head h // r (Qwen3-Next); "tiled": h mod H_k (Qwen3.5).
    """
    S, H_k, T, n_seqs = x.ne
    if H_k == H_v:
        return x
    r = H_v // H_k
    if pairing == "interleaved":
        x = g.repeat_4d(g.reshape_4d(x, S, 1, H_k, T * n_seqs), S, r, H_k, T * n_seqs)
    elif pairing == "tiled":
        x = g.repeat_4d(g.reshape_4d(x, S, H_k, 1, T * n_seqs), S, H_k, r, T * n_seqs)
    else:
        raise ValueError(f"pairing is interleaved or tiled, got {pairing!r}")
    return g.reshape_4d(x, S, H_v, T, n_seqs)


def fused(g, q, k, v, gate, beta, state, n_keep: int = 1) -> tuple[ggml.Tensor, ggml.Tensor]:
    """Run the delta rule as one op whose result holds the output and, behind it, the last n_keep ≤ T states."""
    S_v, H_v, T, n_seqs = v.ne
    both = g.gated_delta_net(q, k, v, gate, beta, state, n_keep)
    size = both.type.row_size
    out = g.view_4d(both, S_v, H_v, T, n_seqs, size(S_v), size(S_v * H_v), size(S_v * H_v * T), 0)
    new = g.view_4d(
        both, S_v, S_v, H_v, n_seqs * n_keep,
        size(S_v), size(S_v * S_v), size(S_v * S_v * H_v), size(S_v * H_v * T * n_seqs),
    )  # fmt: skip
    return out, new


def autoregressive(g, q, k, v, gate, beta, state, il) -> tuple[ggml.Tensor, ggml.Tensor]:
    """Run the delta rule for one token (T = 1) from elementwise ops."""
    S_k, H, _, n_seqs = q.ne
    S_v = v.ne[0]
    q = g.scale(q, S_k**-0.5)
    q, k, v, beta, gate = _named_inputs(g, q, k, v, beta, gate, il)

    decay = g.exp(g.reshape_4d(gate, gate.ne[0], 1, H, n_seqs))  # [1 or S_k, 1, H, n_seqs]: the key axis
    q = g.reshape_4d(q, S_k, 1, H, n_seqs)
    k = g.reshape_4d(k, S_k, 1, H, n_seqs)
    v = g.permute(v, 0, 2, 1, 3)  # [S_v, 1, H, n_seqs]: a strided view when there are several sequences
    beta = g.reshape_4d(beta, 1, 1, H, n_seqs)

    state = g.mul(state, decay)  # [S_k, S_v, H, n_seqs]
    known = g.sum_rows(g.mul(state, k))  # [1, S_v, H, n_seqs]
    delta = g.mul(g.sub(v, g.reshape_4d(known, S_v, 1, H, n_seqs)), beta)  # [S_v, 1, H, n_seqs]
    step = g.mul(g.repeat_4d(k, S_k, S_v, H, n_seqs), g.reshape_4d(delta, 1, S_v, H, n_seqs))
    state = g.name(g.add(state, step), "dnet_add_ar_state", il)
    out = g.sum_rows(g.mul(state, q))  # [1, S_v, H, n_seqs]
    return g.reshape_4d(out, S_v, H, 1, n_seqs), state


def chunked(g, q, k, v, gate, beta, state, il) -> tuple[ggml.Tensor, ggml.Tensor]:
    """Run the delta rule chunk by chunk: inside a chunk a triangular solve, between chunks the recurrence.

    With G the running sum of gates inside a chunk, D_ij = exp(G_i − G_j) for j ≤ i and
    A = tril(beta_i k_i·k_j D_ij, −1): T = (I + A)⁻¹, U = T(beta v), W = T(beta k e^G), then per chunk
    v' = U − W S;  o = (q e^G) S + tril(q kᵀ D) v';  S ← e^G_last S + (k e^(G_last − G))ᵀ v'.
    """
    S_k, H, T, n_seqs = q.ne
    S_v, n_g = v.ne[0], gate.ne[0]
    C = CHUNK if n_g == 1 else CHUNK_PER_CHANNEL
    n_chunks = -(-T // C)
    B = H * n_seqs
    q = g.scale(q, S_k**-0.5)
    q, k, v, beta, gate = _named_inputs(g, q, k, v, beta, gate, il)
    # padded tokens change nothing: their beta is 0 and their gate is 0, so decay is 1 and the update is 0
    q, k, v, gate, beta = (_cut(g, x, n_chunks, C) for x in (q, k, v, gate, beta))  # [·, C, n_chunks, B]
    v_b = g.name(g.mul(v, beta), "v_b", il)
    k_b = g.name(g.mul(k, beta), "k_b", il)

    G = _running_gate(g, gate, C, n_chunks, B, il)  # [n_g, C, n_chunks, B]
    kk, kq = (_scalar_scores if n_g == 1 else _channel_scores)(g, q, k, k_b, G, C, n_chunks, B, il)
    kq = g.name(g.tri(kq, TRI_LOWER_DIAG), "kq", il)  # [j, i, n_chunks, B]
    solved = _solve(g, g.name(g.tri(kk, TRI_LOWER), "attn", il), C, il)  # T: [j, i, n_chunks, B]

    e_G = g.exp(G)
    U_t = g.mul_mat(solved, _t(g, v_b))  # [C, S_v, n_chunks, B]
    W = g.name(g.mul_mat(_t(g, g.mul(k_b, e_G)), solved), "k_cumdecay", il)  # [S_k, C, n_chunks, B]
    q_e = g.mul(q, e_G)
    G_last = g.cont(g.view_4d(G, n_g, 1, n_chunks, B, *G.nb[1:], (C - 1) * G.nb[1]))
    k_left_t = g.name(_t(g, g.mul(k, g.exp(g.neg(g.sub(G, G_last))))), "key_gdiff_t", il)  # [C, S_k, n_chunks, B]
    e_last = g.name(g.exp(G_last), "g_last_exp", il)  # [n_g, 1, n_chunks, B]

    S = g.reshape_4d(state, S_k, S_v, 1, B)
    # v_b has been read for the last time above, and has the shape of the output
    out = v_b
    for c in range(n_chunks):
        W_c, U_c, kq_c, q_c, k_c, e_c = (_slice(g, x, c) for x in (W, U_t, kq, q_e, k_left_t, e_last))
        new_t = g.name(g.sub(U_c, g.mul_mat(W_c, S)), "v_t_new", il)  # [C, S_v, 1, B]
        o = g.add(g.mul_mat(S, q_c), g.mul_mat(new_t, kq_c))  # [S_v, C, 1, B]
        out = g.set_inplace(out, g.name(o, "dnet_add_ch_attn_out", il), *out.nb[1:], c * out.nb[2])
        S = g.add(g.mul(S, e_c), g.mul_mat(k_c, new_t))  # [S_k, S_v, 1, B]
        g.name(S, "dnet_add_ch_state", il)

    size = out.type.row_size
    row = S_v * C * n_chunks
    out = g.view_4d(out, S_v, T, H, n_seqs, size(S_v), size(row), size(row * H), 0)
    return g.permute(out, 0, 2, 1, 3), g.reshape_4d(S, S_k, S_v, H, n_seqs)


def _named_inputs(g, q, k, v, beta, gate, il):
    pairs = ((q, "q_in"), (k, "k_in"), (v, "v_in"), (beta, "b_in"), (gate, "g_in"))
    return tuple(g.name(x, name, il) for x, name in pairs)


def _cut(g, x, n_chunks, C):
    n, H, T, n_seqs = x.ne
    x = g.permute(x, 0, 2, 1, 3)  # [n, T, H, n_seqs]
    pad = n_chunks * C - T
    x = g.pad(x, 0, pad, 0, 0) if pad else g.cont(x)
    return g.reshape_4d(x, n, C, n_chunks, H * n_seqs)


def _t(g, x):
    return g.cont(g.transpose(x))


def _slice(g, x, c):
    n0, n1, _, B = x.ne
    return g.view_4d(x, n0, n1, 1, B, *x.nb[1:], c * x.nb[2])


def _running_gate(g, gate, C, n_chunks, B, il):
    n_g = gate.ne[0]
    tokens_first = g.reshape_4d(gate, C, 1, n_chunks, B) if n_g == 1 else _t(g, gate)  # [C, n_g, n_chunks, B]
    G = g.name(g.cumsum(tokens_first), "g_cs", il)
    return g.reshape_4d(G, 1, C, n_chunks, B) if n_g == 1 else _t(g, G)


def _scalar_scores(g, q, k, k_b, G, C, n_chunks, B, il):
    """Return k_i·k_j beta_i D_ij and k_j·q_i D_ij as [j, i, n_chunks, B]; only j ≤ i means anything."""
    G_j = g.reshape_4d(G, C, 1, n_chunks, B)
    D = g.sub(g.repeat_4d(G, C, C, n_chunks, B), G_j)  # [j, i, n_chunks, B]
    # masked before exp: above the diagonal the difference is positive and may overflow
    D = g.name(g.exp(g.tri(D, TRI_LOWER_DIAG)), "decay_mask", il)
    return g.mul(g.mul_mat(k, k_b), D), g.mul(g.mul_mat(k, q), D)


def _channel_scores(g, q, k, k_b, G, C, n_chunks, B, il):
    """Return the same scores when every key channel decays on its own: the sum over channels comes after D."""
    S_k, CB = q.ne[0], n_chunks * B
    G_i = g.repeat_4d(g.reshape_4d(G, S_k, C, 1, CB), S_k, C, C, CB)
    D = g.sub(G_i, g.reshape_4d(G, S_k, 1, C, CB))  # [S_k, i, j, CB]
    # j > i may overflow here; those entries are cut away by the triangle taken of the scores
    D = g.name(g.exp(D), "decay_mask", il)
    k_j = g.reshape_4d(k, S_k, 1, C, CB)

    def scores(x):
        x_i = g.reshape_4d(x, S_k, C, 1, CB)
        ij = g.mul_mat(g.mul(D, x_i), k_j)  # [i, 1, j, CB]
        return _t(g, g.reshape_4d(ij, C, C, n_chunks, B))  # [j, i, n_chunks, B]

    return scores(k_b), scores(q)


def _solve(g, A, C, il):
    """Return (I + A)⁻¹ for strictly lower A [j, i, n_chunks, B], as I + (I + A)⁻¹(−A)."""
    identity = g.diag(g.fill(g.view_1d(A, C, 0), 1.0))  # [C, C]
    lhs = g.name(g.add(A, identity), "dnet_add_ch_lhs", il)
    solved = g.solve_tri(lhs, g.name(g.neg(A), "attn_pre_solve", il), True, True, False)
    return g.name(g.add(solved, identity), "dnet_add_ch_attn_solved", il)
