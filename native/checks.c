// What ggml does not check while building and would only show as garbage, or as an abort in a compute thread. build_ffi.py calls
// check_<op> with the operands of <op>, without the context, before ggml sees them.

// a view must end inside its source: ggml looks at the packed size, not at the strides
static bool check_view(const ggml_tensor * a, const int64_t ne[4], size_t nb1, size_t nb2, size_t nb3, size_t offset) {
    const struct ggml_type_traits * traits = T.ggml_get_type_traits(a->type);
    const int64_t block = traits->blck_size;
    if (ne[0] < 0 || ne[1] < 0 || ne[2] < 0 || ne[3] < 0) {
        return refuse("a view of [%lld, %lld, %lld, %lld]", (long long) ne[0], (long long) ne[1], (long long) ne[2], (long long) ne[3]);
    }
    if (ne[0] % block != 0 || offset % traits->type_size != 0) {
        return refuse("a view of %s must start and end at blocks of %lld", traits->type_name, (long long) block);
    }
    if (ne[0] == 0 || ne[1] == 0 || ne[2] == 0 || ne[3] == 0) {
        return true;
    }
    const size_t size = ne[0] / block * traits->type_size + (ne[1] - 1) * nb1 + (ne[2] - 1) * nb2 + (ne[3] - 1) * nb3;
    const size_t room = T.ggml_nbytes(a);
    return (offset <= room && size <= room - offset)
        || refuse("the view ends at byte %zu, its source has %zu", offset + size, room);
}

static bool check_ggml_view_1d(const ggml_tensor * a, int64_t ne0, size_t offset) {
    return check_view(a, (int64_t[]) { ne0, 1, 1, 1 }, 0, 0, 0, offset);
}

static bool check_ggml_view_2d(const ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1, size_t offset) {
    return check_view(a, (int64_t[]) { ne0, ne1, 1, 1 }, nb1, 0, 0, offset);
}

static bool check_ggml_view_3d(const ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1, size_t nb2, size_t offset) {
    return check_view(a, (int64_t[]) { ne0, ne1, ne2, 1 }, nb1, nb2, 0, offset);
}

static bool check_ggml_view_4d(const ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, size_t nb1, size_t nb2, size_t nb3, size_t offset) {
    return check_view(a, (int64_t[]) { ne0, ne1, ne2, ne3 }, nb1, nb2, nb3, offset);
}

static bool check_ggml_set(const ggml_tensor * a, const ggml_tensor * b, size_t nb1, size_t nb2, size_t nb3, size_t offset) {
    return (a->type == b->type || refuse("operands of different types"))
        && check_view(a, b->ne, nb1, nb2, nb3, offset);
}

#define check_ggml_set_inplace check_ggml_set
#define check_ggml_acc         check_ggml_set

// q, k [S_k, H_k, n_tokens, n_seqs], v [S_v, H_v, n_tokens, n_seqs], gate [1 or S_v, H_v, …], beta [1, H_v, …]
static bool check_ggml_gated_delta_net(const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v, const ggml_tensor * g, const ggml_tensor * beta,
        const ggml_tensor * state, int64_t K) {
    (void) state;
    const int64_t S = v->ne[0], H = v->ne[1], n_tokens = v->ne[2], n_seqs = v->ne[3];
    if (q->ne[0] != S || k->ne[0] != S) {
        return refuse("q and k need the head width of v, %lld", (long long) S);
    }
    if (q->ne[1] != k->ne[1] || q->ne[1] == 0 || H % q->ne[1] != 0) {
        return refuse("%lld value heads cannot share %lld query and %lld key heads", (long long) H, (long long) q->ne[1], (long long) k->ne[1]);
    }
    if (q->ne[2] != n_tokens || k->ne[2] != n_tokens || g->ne[2] != n_tokens || beta->ne[2] != n_tokens) {
        return refuse("q, k, g and beta need the %lld tokens of v", (long long) n_tokens);
    }
    if (q->ne[3] != n_seqs || k->ne[3] != n_seqs || g->ne[3] != n_seqs || beta->ne[3] != n_seqs) {
        return refuse("q, k, g and beta need the %lld sequences of v", (long long) n_seqs);
    }
    if (g->ne[1] != H || beta->ne[1] != H) {
        return refuse("g and beta need one value for each of %lld heads", (long long) H);
    }
    return K <= INT32_MAX || refuse("K is %lld", (long long) K);
}
