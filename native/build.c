// Guarded calls beside the ops: graphs, placing tensors, and the one op whose meaning differs between versions.

// ggml 0.15's clamp writes into its operand: the node it made is turned into one with a result of its own
static ggml_tensor * q_clamp(ggml_context * ctx, ggml_tensor * a, float min, float max) {
    ggml_tensor * made = ggml_clamp(ctx, a, min, max);
    if (!made || !made->view_src) {
        return made;
    }
    ggml_tensor * result = ggml_dup_tensor(ctx, a);
    if (result) {
        result->op     = made->op;
        result->src[0] = a;
        memcpy(result->op_params, made->op_params, sizeof(made->op_params));
    }
    return result;
}

static ggml_cgraph * q_new_graph(ggml_context * ctx, size_t size) {
    if (!open_context(ctx)) {
        return NULL;
    }
    const size_t left = T.ggml_get_mem_size(ctx) - T.ggml_used_mem(ctx);
    // ggml writes through NULL when the graph does not fit
    if (T.ggml_graph_overhead_custom(size, false) > left) {
        refuse("the context has no room for a graph of %zu nodes", size);
        return NULL;
    }
    ggml_cgraph * volatile made = NULL;
    GUARDED(made = T.ggml_new_graph_custom(ctx, size, false));
    return made;
}

static bool q_expand(ggml_cgraph * graph, ggml_tensor * tensor) {
    if (!operand("node", tensor)) {
        return false;
    }
    volatile bool done = false;
    GUARDED(T.ggml_build_forward_expand(graph, tensor); done = true);
    return done;
}

// lets a node's result lie inside another tensor, as the in-place ops do: whoever places the graph follows the view
static bool q_into(ggml_tensor * node, ggml_tensor * owner, size_t offset) {
    if (!operand("node", node) || !operand("owner", owner) || !writable(owner)) {
        return false;
    }
    if (node->op == 0 || node->view_src || node->data || owner->view_src) {
        return refuse("a fresh node goes into a tensor that is no view, got %s into %s", T.ggml_op_desc(node), T.ggml_op_desc(owner));
    }
    const size_t size = T.ggml_nbytes(node), room = T.ggml_nbytes(owner);
    if (offset > room || size > room - offset) {
        return refuse("it ends at byte %zu, its owner has %zu", offset + size, room);
    }
    node->view_src  = owner;
    node->view_offs = offset;
    return true;
}

// names are given to thousands of nodes: "name", or "name-il" inside a layer
static void q_name(ggml_tensor * tensor, const char * name, int il) {
    if (il < 0) {
        T.ggml_set_name(tensor, name);
    } else {
        snprintf(tensor->name, sizeof(tensor->name), "%s-%d", name, il);
    }
}

static bool q_place(ggml_backend_buffer * buffer, ggml_tensor * tensor, void * address) {
    volatile bool done = false;
    GUARDED(done = T.ggml_backend_tensor_alloc(buffer, tensor, address) == 0);
    note_of(tensor)->fixed = done;
    return done;
}

static void q_to_float(int type, const void * x, float * y, int64_t row_size, int64_t n_per_row, int64_t n_rows) {
    PyThreadState * python = PyEval_SaveThread();
    for (int64_t i = 0; i < n_rows; i++) {
        T.ggml_get_type_traits(type)->to_float((const char *) x + i * row_size, y + i * n_per_row, n_per_row);
    }
    PyEval_RestoreThread(python);
}
