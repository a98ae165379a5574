// What table.c, guard.c and step.c add: the only names here that are not ggml's.

// table.c
bool         q_open(const char * path);
int          q_n_entries(void);
const char * q_entry_name(int i);
bool         q_entry_required(int i);
const char * q_entry_file(int i);
const char * q_file_of(const void * address);
bool         q_has(const char * name);

// guard.c
void         q_watch_aborts(void);
void         q_set_log_level(int level);
const char * q_failure(void);
int          q_count_types(ggml_context * ctx);
ggml_tensor * q_clamp(ggml_context * ctx, ggml_tensor * a, float min, float max);
ggml_cgraph * q_new_graph(ggml_context * ctx, size_t size);
bool         q_expand(ggml_cgraph * graph, ggml_tensor * tensor);
bool         q_into(ggml_tensor * node, ggml_tensor * owner, size_t offset);
void         q_name(ggml_tensor * tensor, const char * name, int il);
void         q_close_context(ggml_context * ctx);
bool         q_is_open(const ggml_tensor * tensor);
bool         q_place(ggml_backend_buffer * buffer, ggml_tensor * tensor, void * address);
void         q_to_float(int type, const void * x, float * y, int64_t row_size, int64_t n_per_row, int64_t n_rows);

// checks.c, support.c
bool          q_indices_fit(const ggml_tensor * tensor, const void * data, size_t size);
ggml_tensor * q_unsupported(ggml_cgraph * graph, ggml_backend_device * device);

// step.c
#define Q_REFUSED   100
#define Q_BAD_INDEX 101
#define Q_LEAVING   102
struct q_stop {
    int       wanted;
    bool      running;
    long long next_look;
};
struct q_copy {
    ggml_tensor * tensor;
    void *        array;
    size_t        size;
    bool          queued;
};
struct q_step {
    ggml_backend *       backend;
    ggml_backend_sched * sched;
    ggml_cgraph *        graph;
    struct q_stop *      stop;
    struct q_copy *      inputs;
    struct q_copy *      outputs;
    int                  n_inputs;
    int                  n_outputs;
    long long            compute_ns;
};
extern "Python" int q_let_python_run(void);
bool   q_install_stop(ggml_backend * backend, struct q_stop * stop);
void * q_keep_threads(ggml_backend * backend, int n_threads);
void   q_drop_threads(ggml_backend_device * device, void * threads);
bool   q_set_n_threads(ggml_backend * backend, int n_threads);
int    q_run(struct q_step * step);
int    q_n_running(void);
long long q_epoch(void);
void   q_stop_all(void);
void   q_forget_buffer(ggml_context * ctx, ggml_backend_buffer * buffer);
ggml_backend_buffer * q_alloc_tensors(ggml_context * ctx, ggml_backend_buffer_type * type);
void   q_unbind(ggml_context * ctx);
bool   q_gallocr_reserve(ggml_gallocr * galloc, ggml_cgraph * graph);
bool   q_gallocr_alloc(ggml_gallocr * galloc, ggml_cgraph * graph);
void   q_save_sources(ggml_cgraph * graph, ggml_tensor ** sources);
void   q_restore_sources(ggml_cgraph * graph, ggml_tensor ** sources);
bool   q_sched_reserve(ggml_backend_sched * sched, ggml_cgraph * graph);
bool   q_sched_alloc(ggml_backend_sched * sched, ggml_cgraph * graph);
ggml_backend_buffer_type ** q_extra_buffer_types(ggml_backend_device * device);
struct ggml_backend_feature * q_features(ggml_backend_reg * reg);
