// What ggml does not check while building and would only show as garbage, or as an abort in a compute thread. build_ffi.py calls
// check_<op> with the operands of <op>, without the context, before ggml sees them.

// indices are read in compute threads, so the limit travels with the tensor they will be written to
static void limit_indices(ggml_tensor * indices, int64_t n) {
    struct note * note = note_of(indices);
    if (indices->op == 0 && !indices->view_src && n <= UINT32_MAX && (note->limit == 0 || n < note->limit)) {
        note->limit = (uint32_t) n;
    }
}

// tells whether indices about to be written are below the limit of every node that was built on them
static bool q_indices_fit(const ggml_tensor * t, const void * data, size_t size) {
    const int64_t limit = note_of(t)->limit;
    const bool wide = T.ggml_get_type_traits(t->type)->type_size == 8;
    const size_t n = limit ? size / (wide ? 8 : 4) : 0;
    for (size_t i = 0; i < n; i++) {
        const int64_t index = wide ? ((const int64_t *) data)[i] : ((const int32_t *) data)[i];
        if (index < 0 || index >= limit) {
            return refuse("index %lld of %s at %zu is outside 0 … %lld", (long long) index, t->name, i, (long long) limit - 1);
        }
    }
    return true;
}

// weights are mapped from a file, read-only
static bool writable(const ggml_tensor * t) {
    const ggml_tensor * owner = t->view_src ? t->view_src : t;
    return !owner->buffer || T.ggml_backend_buffer_get_usage(owner->buffer) != 1 || refuse("%s holds weights, which are read-only", owner->name);
}

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

#define check_ggml_acc check_ggml_set

static bool check_ggml_set_inplace(const ggml_tensor * a, const ggml_tensor * b, size_t nb1, size_t nb2, size_t nb3, size_t offset) {
    return writable(a) && check_ggml_set(a, b, nb1, nb2, nb3, offset);
}

static bool check_ggml_add_inplace(const ggml_tensor * a, const ggml_tensor * b)       { (void) b; return writable(a); }
static bool check_ggml_mul_inplace(const ggml_tensor * a, const ggml_tensor * b)       { (void) b; return writable(a); }
static bool check_ggml_scale_inplace(const ggml_tensor * a, float s)                   { (void) s; return writable(a); }
static bool check_ggml_fill_inplace(const ggml_tensor * a, float c)                    { (void) c; return writable(a); }
static bool check_ggml_rms_norm_inplace(const ggml_tensor * a, float eps)              { (void) eps; return writable(a); }
static bool check_ggml_sigmoid_inplace(const ggml_tensor * a)                          { return writable(a); }
static bool check_ggml_silu_inplace(const ggml_tensor * a)                             { return writable(a); }
static bool check_ggml_soft_max_inplace(const ggml_tensor * a)                         { return writable(a); }
static bool check_ggml_cpy(const ggml_tensor * a, const ggml_tensor * b)               { (void) a; return writable(b); }

static bool check_ggml_get_rows(ggml_tensor * a, ggml_tensor * b) {
    limit_indices(b, a->ne[1]);
    return true;
}

static bool check_ggml_set_rows(ggml_tensor * a, ggml_tensor * b, ggml_tensor * c) {
    (void) b;
    limit_indices(c, a->ne[1]);
    const struct ggml_type_traits * traits = T.ggml_get_type_traits(a->type);
    if (a->type != 0 && !traits->from_float_ref) {
        return refuse("rows cannot be written as %s", traits->type_name);
    }
    return writable(a);
}

static bool check_ggml_mul_mat_id(ggml_tensor * as, ggml_tensor * b, ggml_tensor * ids) {
    (void) b;
    limit_indices(ids, as->ne[2]);
    return true;
}

static bool check_ggml_add_id(ggml_tensor * a, ggml_tensor * b, ggml_tensor * ids) {
    (void) a;
    limit_indices(ids, b->ne[1]);
    return true;
}

// a later ggml looks itself
static bool countable(int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    int64_t n = 64; // no element is larger
    return !(__builtin_mul_overflow(n, ne0, &n) || __builtin_mul_overflow(n, ne1, &n) || __builtin_mul_overflow(n, ne2, &n) || __builtin_mul_overflow(n, ne3, &n))
        || refuse("more elements than can be counted");
}

static bool check_ggml_new_tensor_4d(int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    (void) type;
    return countable(ne0, ne1, ne2, ne3);
}

static bool check_ggml_repeat_4d(const ggml_tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    (void) a;
    return countable(ne0, ne1, ne2, ne3);
}

static bool check_ggml_pad(const ggml_tensor * a, int p0, int p1, int p2, int p3) {
    (void) a;
    return (p0 >= 0 && p1 >= 0 && p2 >= 0 && p3 >= 0) || refuse("a negative amount of padding");
}

static bool check_ggml_pad_ext(const ggml_tensor * a, int lp0, int rp0, int lp1, int rp1, int lp2, int rp2, int lp3, int rp3) {
    return check_ggml_pad(a, lp0, lp1, lp2, lp3) && check_ggml_pad(a, rp0, rp1, rp2, rp3);
}

static bool check_ggml_top_k(const ggml_tensor * a, int k) {
    (void) a;
    return k > 0 || refuse("the %d largest", k);
}

#define check_ggml_argsort_top_k check_ggml_top_k

static bool check_ggml_argsort(const ggml_tensor * a, int order) {
    (void) a;
    return order == 0 || order == 1 || refuse("order %d is neither ascending (0) nor descending (1)", order);
}

static bool check_ggml_tri(const ggml_tensor * a, int kind) {
    (void) a;
    return (kind >= 0 && kind < 4) || refuse("kind %d is none of the four triangles", kind);
}

static bool check_ggml_cast(const ggml_tensor * a, int type) {
    if (type < 0 || type >= n_types || T.ggml_get_type_traits(type)->blck_size == 0) {
        return refuse("no type %d", type);
    }
    const struct ggml_type_traits * traits = T.ggml_get_type_traits(type);
    return a->ne[0] % traits->blck_size == 0
        || refuse("rows of %lld do not divide into %s blocks of %lld", (long long) a->ne[0], traits->type_name, (long long) traits->blck_size);
}

// rotated pairs come from the first n_dims elements of a head
static bool check_rope(const ggml_tensor * a, int n_dims, int mode) {
    const bool vision = mode == 24;
    const int64_t room = vision ? a->ne[0] / 2 : a->ne[0];
    return (n_dims > 0 && n_dims % 2 == 0 && n_dims <= room && (!vision || n_dims == room))
        || refuse("%d rotated dimensions of a head of %lld", n_dims, (long long) a->ne[0]);
}

static bool check_ggml_rope_ext(const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * c, int n_dims, int mode, int n_ctx_orig,
        float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    (void) b; (void) c; (void) n_ctx_orig; (void) freq_base; (void) freq_scale; (void) ext_factor; (void) attn_factor; (void) beta_fast; (void) beta_slow;
    return check_rope(a, n_dims, mode) && ((mode & 8) == 0 || refuse("several positions a token need rope_multi"));
}

static bool check_ggml_rope_ext_inplace(const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * c, int n_dims, int mode, int n_ctx_orig,
        float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    return writable(a) && check_ggml_rope_ext(a, b, c, n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow);
}

static bool check_ggml_rope_multi(const ggml_tensor * a, const ggml_tensor * b, const ggml_tensor * c, int n_dims, int * sections, int mode, int n_ctx_orig,
        float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast, float beta_slow) {
    (void) b; (void) c; (void) n_ctx_orig; (void) freq_base; (void) freq_scale; (void) ext_factor; (void) attn_factor; (void) beta_fast; (void) beta_slow;
    if ((mode & 8) == 0) {
        return refuse("mode %d has one position a token: use rope_ext", mode);
    }
    return check_rope(a, n_dims, mode) && (sections[0] > 0 || sections[1] > 0 || sections[2] > 0 || refuse("the first three sections are empty"));
}

// q [d, n_tokens, n_head, n_seqs], k [d, n_kv, n_head_kv, n_seqs], v [d_v, n_kv, n_head_kv, n_seqs], mask [n_kv, >= n_tokens, ...]
static bool check_ggml_flash_attn_ext(const ggml_tensor * q, const ggml_tensor * k, const ggml_tensor * v, const ggml_tensor * mask,
        float scale, float max_bias, float logit_softcap) {
    (void) scale; (void) max_bias; (void) logit_softcap;
    if (k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2]) {
        return refuse("k and v need the same cells and heads");
    }
    if (k->ne[2] == 0 || q->ne[2] % k->ne[2] != 0) {
        return refuse("%lld query heads cannot share %lld key heads", (long long) q->ne[2], (long long) k->ne[2]);
    }
    return !mask || (mask->ne[0] == k->ne[1] && mask->ne[1] >= q->ne[1]) || refuse("the mask needs a row of n_kv for each query");
}

static bool check_ggml_ssm_conv(const ggml_tensor * sx, const ggml_tensor * c) {
    if (sx->nb[1] != sx->ne[0] * sx->nb[0]) {
        return refuse("the columns of sx must be adjacent");
    }
    return sx->ne[0] >= c->ne[0] || refuse("%lld columns are fewer than the kernel's %lld", (long long) sx->ne[0], (long long) c->ne[0]);
}

// a [KW, KH, 1, C], b [W, H, C, N]: kernels read both as packed, dimension by dimension or with channels innermost
static bool check_ggml_conv_2d_dw_direct(const ggml_tensor * a, const ggml_tensor * b, int stride0, int stride1, int pad0, int pad1, int dilation0, int dilation1) {
    if (stride0 < 1 || stride1 < 1 || dilation0 < 1 || dilation1 < 1 || pad0 < 0 || pad1 < 0) {
        return refuse("strides and dilations start at 1, padding at 0");
    }
    if (a->type != 0 || b->type != 0) {
        return refuse("a and b must be f32");
    }
    if (b->ne[0] + 2 * pad0 <= dilation0 * (a->ne[0] - 1) || b->ne[1] + 2 * pad1 <= dilation1 * (a->ne[1] - 1)) {
        return refuse("the kernel is larger than the padded input");
    }
    const bool inner = b->nb[2] == 4 && b->nb[2] < b->nb[0] && b->nb[0] < b->nb[1];
    if (T.ggml_is_contiguous(b) && !inner) {
        return T.ggml_is_contiguous(a) || refuse("a must be packed as b is");
    }
    const size_t column = b->ne[2] * b->nb[2], row = b->ne[0] * column, image = b->ne[1] * row;
    // a single column and row of b would be read as packed and written with channels innermost
    if (!inner || T.ggml_is_contiguous(b) || (b->ne[0] > 1 && b->nb[0] != column) || (b->ne[1] > 1 && b->nb[1] != row) || (b->ne[3] > 1 && b->nb[3] != image)) {
        return refuse("b must be packed, or with its channels innermost");
    }
    const size_t tap = a->ne[3] * a->nb[3];
    return (a->nb[3] == 4 && a->nb[2] <= a->nb[0] && a->nb[0] <= a->nb[1] && (a->ne[0] == 1 || a->nb[0] == tap) && (a->ne[1] == 1 || a->nb[1] == a->ne[0] * tap))
        || refuse("a must have its channels innermost as b has");
}

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
    if (g->ne[3] != n_seqs || beta->ne[3] != n_seqs) {
        return refuse("g and beta need the %lld sequences of v", (long long) n_seqs);
    }
    if (q->ne[3] != k->ne[3] || q->ne[3] == 0 || n_seqs % q->ne[3] != 0) {
        return refuse("%lld sequences of v cannot share %lld of q and %lld of k", (long long) n_seqs, (long long) q->ne[3], (long long) k->ne[3]);
    }
    if (g->ne[1] != H || beta->ne[1] != H) {
        return refuse("g and beta need one value for each of %lld heads", (long long) H);
    }
    return K <= INT32_MAX || refuse("K is %lld", (long long) K);
}
