// What a CPU backend would only find out in a compute thread, where a failed assertion ends the process: element types and layouts
// its code is written for, and operands without memory. Looked at once for each graph, before it runs.

enum { ANY = 0, F32 = 1, F16 = 2, BF16 = 4, I32 = 8, PACKED = 16, FLOATS = F32 | F16 | BF16 };
enum { LOOSE = 1, ROWS = 2, WHOLE = 3 }; // elements of a row adjacent; the same even for rows of one; all elements adjacent

static const struct rule {
    const char * op;
    int          types;   // of the first operand
    int          layout;  // of the first operand
    int          types1;  // of the second operand
    int          layout1; // of the second operand
} rules[] = {
    { "ADD",            FLOATS | PACKED,       ROWS,  FLOATS, 0 },
    { "SUB",            FLOATS,                ROWS,  FLOATS, 0 },
    { "MUL",            FLOATS,                ROWS,  FLOATS, 0 },
    { "DIV",            FLOATS,                ROWS,  FLOATS, 0 },
    { "ADD_ID",         F32,                   ROWS,  F32,    ROWS },
    { "SQR",            FLOATS,                ROWS,  ANY,    0 },
    { "SQRT",           FLOATS,                ROWS,  ANY,    0 },
    { "LOG",            FLOATS,                ROWS,  ANY,    0 },
    { "SIN",            FLOATS,                ROWS,  ANY,    0 },
    { "COS",            FLOATS,                ROWS,  ANY,    0 },
    { "UNARY",          FLOATS,                ROWS,  ANY,    0 },
    { "GLU",            FLOATS,                LOOSE, FLOATS, ROWS },
    { "SCALE",          F32 | BF16,            WHOLE, ANY,    0 },
    { "CLAMP",          F32 | F16,             ROWS,  ANY,    0 },
    { "NORM",           F32,                   LOOSE, ANY,    0 },
    { "RMS_NORM",       F32,                   ROWS,  ANY,    0 },
    { "L2_NORM",        F32,                   LOOSE, ANY,    0 },
    { "GROUP_NORM",     F32,                   ROWS,  ANY,    0 },
    { "SUM",            FLOATS,                LOOSE, ANY,    0 },
    { "SUM_ROWS",       F32,                   ROWS,  ANY,    0 },
    { "MEAN",           F32,                   LOOSE, ANY,    0 },
    { "CUMSUM",         F32,                   ROWS,  ANY,    0 },
    { "ARGMAX",         F32,                   LOOSE, ANY,    0 },
    { "ARGSORT",        F32,                   LOOSE, ANY,    0 },
    { "TOP_K",          F32,                   LOOSE, ANY,    0 },
    { "SOFT_MAX",       F32,                   LOOSE, ANY,    0 },
    { "DIAG",           F32,                   ROWS,  ANY,    0 },
    { "DIAG_MASK_INF",  F32,                   WHOLE, ANY,    0 },
    { "DIAG_MASK_ZERO", F32,                   WHOLE, ANY,    0 },
    { "REPEAT",         FLOATS | I32,          ROWS,  ANY,    0 },
    { "PAD",            F32,                   LOOSE, ANY,    0 },
    { "ROLL",           F32,                   LOOSE, ANY,    0 },
    { "ACC",            F32,                   WHOLE, F32,    ROWS },
    { "SET",            F32 | I32,             WHOLE, F32 | I32, ROWS },
    { "GET_ROWS",       FLOATS | I32 | PACKED, LOOSE, ANY,    0 },
    { "SET_ROWS",       F32 | F16,             LOOSE, ANY,    0 },
    { "MUL_MAT",        ANY,                   ROWS,  ANY,    ROWS },
    { "MUL_MAT_ID",     ANY,                   ROWS,  F32,    ROWS },
    { "ROPE",           F32 | F16,             ROWS,  ANY,    0 },
    { "SSM_CONV",       F32,                   ROWS,  F32,    ROWS },
    { "FLASH_ATTN_EXT", ANY,                   ROWS,  ANY,    ROWS },
};

static int kind_of(const ggml_tensor * t) {
    switch (t->type) {
        case 0:  return F32;
        case 1:  return F16;
        case 30: return BF16;
        case 26: return I32;
        default: return T.ggml_get_type_traits(t->type)->is_quantized ? PACKED : 0;
    }
}

static bool suits(const ggml_tensor * t, const char * which, int types, int layout) {
    const struct ggml_type_traits * traits = T.ggml_get_type_traits(t->type);
    if (types && !(kind_of(t) & types)) {
        return refuse("the CPU has no code for %s of type %s", which, traits->type_name);
    }
    const bool one_block = layout == LOOSE && t->ne[0] <= traits->blck_size;
    if ((layout == ROWS || layout == LOOSE) && !one_block && t->nb[0] != traits->type_size) {
        return refuse("the CPU needs the elements of each row of %s side by side: cont it first", which);
    }
    return layout != WHOLE || T.ggml_is_contiguous(t) || refuse("the CPU needs %s in adjacent memory: cont it first", which);
}

static const struct rule * rule_of(int op) {
    static const struct rule * found[256];
    static bool                looked[256];
    if (op >= 256) {
        return NULL;
    }
    if (!looked[op]) {
        looked[op] = true;
        for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
            if (strcmp(rules[i].op, T.ggml_op_name(op)) == 0) {
                found[op] = &rules[i];
            }
        }
    }
    return found[op];
}

// a quantised tensor is copied to f32, or as it is; nothing else is written
static bool copy_suits(const ggml_tensor * node) {
    const ggml_tensor * a = node->src[0];
    const bool packed = kind_of(a) == PACKED, as_is = a->type == node->type;
    if (packed && !as_is && node->type != 0) {
        return refuse("the CPU copies %s to f32 or as it is, not to %s", T.ggml_get_type_traits(a->type)->type_name, T.ggml_get_type_traits(node->type)->type_name);
    }
    return as_is || kind_of(a) != 0 || refuse("the CPU cannot convert %s", T.ggml_get_type_traits(a->type)->type_name);
}

static bool same_kind(const ggml_tensor * node) {
    const ggml_tensor * a = node->src[0], * b = node->src[1];
    return a->type == b->type || b->type == 0 || refuse("the CPU combines %s only with itself or f32", T.ggml_get_type_traits(a->type)->type_name);
}

static bool cpu_suits(const ggml_tensor * node) {
    const char * name = T.ggml_op_name(node->op);
    if (!strcmp(name, "CPY") || !strcmp(name, "CONT") || !strcmp(name, "DUP")) {
        return copy_suits(node);
    }
    const struct rule * rule = rule_of(node->op);
    if (!rule) {
        return true;
    }
    if (!suits(node->src[0], "the first operand", rule->types, rule->layout)) {
        return false;
    }
    if (node->src[1] && !suits(node->src[1], "the second operand", rule->types1, rule->layout1)) {
        return false;
    }
    return rule->types1 != FLOATS || !node->src[1] || same_kind(node);
}

static bool has_memory(const ggml_tensor * t, const char * which) {
    if (!operand(which, t)) {
        return false;
    }
    return t->data || T.ggml_nbytes(t) == 0 || refuse("%s (%s) has no memory: it was not placed, or its buffer has moved or was closed", which, t->name);
}

// returns the first node a device cannot run, or NULL; device NULL: only look for memory
static ggml_tensor * q_unsupported(ggml_cgraph * graph, ggml_backend_device * device) {
    ggml_tensor ** nodes = T.ggml_graph_nodes(graph);
    const int n_nodes = T.ggml_graph_n_nodes(graph);
    const bool cpu = device && T.ggml_backend_dev_type(device) == 0;
    for (int i = 0; i < n_nodes; i++) {
        bool good = has_memory(nodes[i], "the node");
        for (int j = 0; good && j < 10; j++) {
            good = !nodes[i]->src[j] || has_memory(nodes[i]->src[j], "an operand");
        }
        if (good && device && !T.ggml_backend_dev_supports_op(device, nodes[i])) {
            good = refuse("device %s has no code for these types and shapes", T.ggml_backend_dev_name(device));
        }
        if (!good || (cpu && T.ggml_nbytes(nodes[i]) > 0 && !cpu_suits(nodes[i]))) {
            return nodes[i];
        }
    }
    return NULL;
}
