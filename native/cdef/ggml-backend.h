// What is used of ggml-backend.h and ggml-alloc.h. Markers: see ggml.h here.

typedef struct ggml_backend_buffer      ggml_backend_buffer;
typedef struct ggml_backend_buffer_type ggml_backend_buffer_type;
typedef struct ggml_backend             ggml_backend;
typedef struct ggml_backend_device      ggml_backend_device;
typedef struct ggml_backend_reg         ggml_backend_reg;
typedef struct ggml_backend_sched       ggml_backend_sched;
typedef struct ggml_gallocr             ggml_gallocr;

struct ggml_backend_feature {
    const char * name;
    const char * value;
};

// a later ggml may append to the capabilities, so room is left behind them
struct ggml_backend_dev_props {
    const char * name;
    const char * description;
    size_t       memory_free;
    size_t       memory_total;
    int          type;
    const char * device_id;
    bool         async;
    bool         host_buffer;
    bool         buffer_from_host_ptr;
    bool         events;
    char         later[256];
};

// buffer types and buffers
CORE const char * ggml_backend_buft_name(ggml_backend_buffer_type * buft);
SLOW ggml_backend_buffer * ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type * buft, size_t size);
CORE size_t ggml_backend_buft_get_alignment(ggml_backend_buffer_type * buft);
CORE size_t ggml_backend_buft_get_max_size(ggml_backend_buffer_type * buft);
CORE size_t ggml_backend_buft_get_alloc_size(ggml_backend_buffer_type * buft, const ggml_tensor * tensor);
CORE bool   ggml_backend_buft_is_host(ggml_backend_buffer_type * buft);
SLOW void   ggml_backend_buffer_free(ggml_backend_buffer * buffer);
CORE void * ggml_backend_buffer_get_base(ggml_backend_buffer * buffer);
CORE size_t ggml_backend_buffer_get_size(ggml_backend_buffer * buffer);
SLOW void   ggml_backend_buffer_clear(ggml_backend_buffer * buffer, uint8_t value);
CORE bool   ggml_backend_buffer_is_host(ggml_backend_buffer * buffer);
CORE void   ggml_backend_buffer_set_usage(ggml_backend_buffer * buffer, int usage);
CORE int    ggml_backend_buffer_get_usage(ggml_backend_buffer * buffer);
CORE ggml_backend_buffer_type * ggml_backend_buffer_get_type(ggml_backend_buffer * buffer);
CORE size_t ggml_backend_buffer_get_alloc_size(ggml_backend_buffer * buffer, const ggml_tensor * tensor);
CORE int    ggml_backend_tensor_alloc(ggml_backend_buffer * buffer, ggml_tensor * tensor, void * addr);
CORE int    ggml_backend_view_init(ggml_tensor * tensor);
SLOW ggml_backend_buffer * ggml_backend_alloc_ctx_tensors_from_buft(ggml_context * ctx, ggml_backend_buffer_type * buft);

// tensor data
SLOW void ggml_backend_tensor_set(ggml_tensor * tensor, const void * data, size_t offset, size_t size);
SLOW void ggml_backend_tensor_get(const ggml_tensor * tensor, void * data, size_t offset, size_t size);
SLOW void ggml_backend_tensor_memset(ggml_tensor * tensor, uint8_t value, size_t offset, size_t size);
CORE void ggml_backend_tensor_set_async(ggml_backend * backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size);
CORE void ggml_backend_tensor_get_async(ggml_backend * backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size);

// devices and backends
CORE size_t ggml_backend_reg_count(void);
CORE ggml_backend_reg * ggml_backend_reg_get(size_t index);
CORE const char * ggml_backend_reg_name(ggml_backend_reg * reg);
CORE void * ggml_backend_reg_get_proc_address(ggml_backend_reg * reg, const char * name);
SLOW ggml_backend_reg * ggml_backend_load(const char * path);
OPTIONAL void ggml_backend_load_all_from_path(const char * dir_path);
SLOW size_t ggml_backend_dev_count(void);
CORE ggml_backend_device * ggml_backend_dev_get(size_t index);
CORE const char * ggml_backend_dev_name(ggml_backend_device * device);
CORE const char * ggml_backend_dev_description(ggml_backend_device * device);
CORE void   ggml_backend_dev_memory(ggml_backend_device * device, size_t * free, size_t * total);
CORE int    ggml_backend_dev_type(ggml_backend_device * device);
CORE void   ggml_backend_dev_get_props(ggml_backend_device * device, struct ggml_backend_dev_props * props);
CORE ggml_backend_reg * ggml_backend_dev_backend_reg(ggml_backend_device * device);
SLOW ggml_backend * ggml_backend_dev_init(ggml_backend_device * device, const char * params);
CORE ggml_backend_buffer_type * ggml_backend_dev_buffer_type(ggml_backend_device * device);
CORE ggml_backend_buffer_type * ggml_backend_dev_host_buffer_type(ggml_backend_device * device);
SLOW ggml_backend_buffer * ggml_backend_dev_buffer_from_host_ptr(ggml_backend_device * device, void * ptr, size_t size, size_t max_tensor_size);
CORE bool   ggml_backend_dev_supports_op(ggml_backend_device * device, const ggml_tensor * op);
CORE bool   ggml_backend_dev_supports_buft(ggml_backend_device * device, ggml_backend_buffer_type * buft);
CORE bool   ggml_backend_dev_offload_op(ggml_backend_device * device, const ggml_tensor * op);
CORE ggml_backend_device * ggml_backend_get_device(ggml_backend * backend);
CORE const char * ggml_backend_name(ggml_backend * backend);
SLOW void   ggml_backend_free(ggml_backend * backend);
SLOW void   ggml_backend_synchronize(ggml_backend * backend);
CORE ggml_backend_buffer_type * ggml_backend_get_default_buffer_type(ggml_backend * backend);
SLOW int    ggml_backend_graph_compute(ggml_backend * backend, ggml_cgraph * cgraph);
CORE int    ggml_backend_graph_compute_async(ggml_backend * backend, ggml_cgraph * cgraph);

// graph allocator
CORE ggml_gallocr * ggml_gallocr_new(ggml_backend_buffer_type * buft);
SLOW void   ggml_gallocr_free(ggml_gallocr * galloc);
CORE bool   ggml_gallocr_reserve(ggml_gallocr * galloc, ggml_cgraph * graph);
CORE bool   ggml_gallocr_alloc_graph(ggml_gallocr * galloc, ggml_cgraph * graph);
CORE size_t ggml_gallocr_get_buffer_size(ggml_gallocr * galloc, int buffer_id);

// scheduler
CORE ggml_backend_sched * ggml_backend_sched_new(ggml_backend ** backends, ggml_backend_buffer_type ** bufts, int n_backends, size_t graph_size, bool parallel, bool op_offload);
SLOW void   ggml_backend_sched_free(ggml_backend_sched * sched);
CORE bool   ggml_backend_sched_reserve(ggml_backend_sched * sched, ggml_cgraph * graph);
CORE bool   ggml_backend_sched_alloc_graph(ggml_backend_sched * sched, ggml_cgraph * graph);
CORE int    ggml_backend_sched_graph_compute_async(ggml_backend_sched * sched, ggml_cgraph * graph);
SLOW void   ggml_backend_sched_synchronize(ggml_backend_sched * sched);
CORE void   ggml_backend_sched_reset(ggml_backend_sched * sched);
CORE int    ggml_backend_sched_get_n_splits(ggml_backend_sched * sched);
CORE size_t ggml_backend_sched_get_buffer_size(ggml_backend_sched * sched, ggml_backend * backend);
CORE void   ggml_backend_sched_set_tensor_backend(ggml_backend_sched * sched, ggml_tensor * node, ggml_backend * backend);
CORE ggml_backend * ggml_backend_sched_get_tensor_backend(ggml_backend_sched * sched, ggml_tensor * node);
