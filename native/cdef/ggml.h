// What is used of ggml.h. The first word says how build_ffi.py wraps a function:
//   CORE      every provider has it; called as it is
//   SLOW      the same, but other Python threads run meanwhile
//   OPTIONAL  some providers have it; ask q_has() first
//   OP        builds a node: optional, guarded, operands checked; MAYBE marks an operand that may be NULL

typedef struct ggml_context ggml_context;
typedef struct ggml_cgraph  ggml_cgraph;
typedef struct ggml_tensor  ggml_tensor;

struct ggml_init_params {
    size_t mem_size;
    void * mem_buffer;
    bool   no_alloc;
};

struct ggml_tensor {
    int           type;
    struct ggml_backend_buffer * buffer;
    int64_t       ne[4];
    size_t        nb[4];
    int           op;
    int32_t       op_params[16];
    int32_t       flags;
    ggml_tensor * src[10];
    ggml_tensor * view_src;
    size_t        view_offs;
    void *        data;
    char          name[64];
    void *        extra;
    char          padding[8];
};

struct ggml_type_traits {
    const char * type_name;
    int64_t      blck_size;
    int64_t      blck_size_interleave;
    size_t       type_size;
    bool         is_quantized;
    void      (* to_float)(const void * x, float * y, int64_t k);
    void      (* from_float_ref)(const float * x, void * y, int64_t k);
};

// library
CORE     const char * ggml_version(void);
OPTIONAL const char * ggml_commit(void);
CORE     void   ggml_time_init(void);
CORE     void * ggml_set_abort_callback(void (* callback)(const char * message));
CORE     void   ggml_log_set(void (* callback)(int level, const char * text, void * user_data), void * user_data);
CORE     const char * ggml_status_to_string(int status);

// types
CORE     const struct ggml_type_traits * ggml_get_type_traits(int type);
CORE     bool   ggml_quantize_requires_imatrix(int type);
SLOW     void   ggml_quantize_init(int type);
SLOW     size_t ggml_quantize_chunk(int type, const float * src, void * dst, int64_t start, int64_t nrows, int64_t n_per_row, const float * imatrix);

// contexts and tensors
CORE     ggml_context * ggml_init(struct ggml_init_params params);
CORE     void   ggml_free(ggml_context * ctx);
CORE     size_t ggml_used_mem(const ggml_context * ctx);
CORE     bool   ggml_get_no_alloc(ggml_context * ctx);
CORE     void   ggml_set_no_alloc(ggml_context * ctx, bool no_alloc);
CORE     void * ggml_get_mem_buffer(const ggml_context * ctx);
CORE     size_t ggml_get_mem_size(const ggml_context * ctx);
CORE     ggml_tensor * ggml_get_first_tensor(const ggml_context * ctx);
CORE     ggml_tensor * ggml_get_next_tensor(const ggml_context * ctx, ggml_tensor * tensor);
CORE     size_t ggml_tensor_overhead(void);
CORE     size_t ggml_nbytes(const ggml_tensor * tensor);
CORE     int64_t ggml_nelements(const ggml_tensor * tensor);
CORE     int64_t ggml_nrows(const ggml_tensor * tensor);
CORE     bool   ggml_is_contiguous(const ggml_tensor * tensor);
CORE     const char * ggml_op_name(int op);
CORE     const char * ggml_op_desc(const ggml_tensor * tensor);
CORE     ggml_tensor * ggml_set_name(ggml_tensor * tensor, const char * name);
CORE     void   ggml_set_input(ggml_tensor * tensor);
CORE     void   ggml_set_output(ggml_tensor * tensor);

// threads that wait for the next graph, where OpenMP has none
struct ggml_threadpool_params {
    bool     cpumask[512];
    int      n_threads;
    int      prio;
    uint32_t poll;
    bool     strict_cpu;
    bool     paused;
};
OPTIONAL struct ggml_threadpool_params ggml_threadpool_params_default(int n_threads);

// graphs
CORE     size_t ggml_graph_overhead_custom(size_t size, bool grads);
CORE     void   ggml_graph_clear(ggml_cgraph * cgraph);
CORE     int    ggml_graph_size(ggml_cgraph * cgraph);
CORE     int    ggml_graph_n_nodes(ggml_cgraph * cgraph);
CORE     ggml_tensor ** ggml_graph_nodes(ggml_cgraph * cgraph);
CORE     ggml_cgraph * ggml_new_graph_custom(ggml_context * ctx, size_t size, bool grads);
CORE     void   ggml_build_forward_expand(ggml_cgraph * cgraph, ggml_tensor * tensor);

CORE     ggml_tensor * ggml_new_tensor(ggml_context * ctx, int type, int n_dims, const int64_t * ne);
OP ggml_tensor * ggml_new_tensor_4d(ggml_context * ctx, int type, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
OP ggml_tensor * ggml_dup_tensor(ggml_context * ctx, ggml_tensor * a);
OP ggml_tensor * ggml_view_tensor(ggml_context * ctx, ggml_tensor * a);
