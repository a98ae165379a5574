// Running graphs: one decode step in one call with the GIL released, the stop flag a computation looks at between nodes, and
// what lets an allocator or scheduler place the same graph twice.

#include <time.h>

static int q_let_python_run(void);

static long long now_ms(void) {
    struct timespec now;
#ifdef CLOCK_MONOTONIC_COARSE
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
#else
    clock_gettime(CLOCK_MONOTONIC, &now);
#endif
    return now.tv_sec * 1000ll + now.tv_nsec / 1000000;
}

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static int stop_all; // the interpreter is ending

static void q_stop_all(void) {
    __atomic_store_n(&stop_all, 1, __ATOMIC_RELAXED);
}

// asked by the calling thread after each node; ten times a second Python's signal handlers get a chance to raise
static bool stop_wanted(void * data) {
    struct q_stop * stop = data;
    if (__atomic_load_n(&stop_all, __ATOMIC_RELAXED)) {
        return true;
    }
    if (!__atomic_load_n(&stop->wanted, __ATOMIC_RELAXED) && now_ms() >= stop->next_look) {
        stop->next_look = now_ms() + 100;
        if (q_let_python_run() != 0) {
            __atomic_store_n(&stop->wanted, 1, __ATOMIC_RELAXED);
        }
    }
    return __atomic_load_n(&stop->wanted, __ATOMIC_RELAXED);
}

static void * of_registry(ggml_backend_device * device, const char * name) {
    return T.ggml_backend_reg_get_proc_address(T.ggml_backend_dev_backend_reg(device), name);
}

static bool q_install_stop(ggml_backend * backend, struct q_stop * stop) {
    void (* install)(ggml_backend *, bool (*)(void *), void *) = of_registry(T.ggml_backend_get_device(backend), "ggml_backend_set_abort_callback");
    if (install) {
        install(backend, stop_wanted, stop);
    }
    return install != NULL;
}

static bool q_set_n_threads(ggml_backend * backend, int n_threads) {
    void (* set)(ggml_backend *, int) = of_registry(T.ggml_backend_get_device(backend), "ggml_backend_set_n_threads");
    if (set) {
        set(backend, n_threads);
    }
    return set != NULL;
}

// gives the backend threads that wait for its next graph instead of being made for each; NULL: it has no such thing
static void * q_keep_threads(ggml_backend * backend, int n_threads) {
    ggml_backend_device * device = T.ggml_backend_get_device(backend);
    void * (* make)(struct ggml_threadpool_params *) = of_registry(device, "ggml_threadpool_new");
    void (* give)(ggml_backend *, void *) = of_registry(device, "ggml_backend_cpu_set_threadpool");
    if (!make || !give || !T.ggml_threadpool_params_default) {
        return NULL;
    }
    struct ggml_threadpool_params params = T.ggml_threadpool_params_default(n_threads);
    void * threads = make(&params);
    if (threads) {
        give(backend, threads);
    }
    return threads;
}

static void q_drop_threads(ggml_backend_device * device, void * threads) {
    void (* drop)(void *) = of_registry(device, "ggml_threadpool_free");
    drop(threads);
}

static ggml_backend_buffer_type ** q_extra_buffer_types(ggml_backend_device * device) {
    ggml_backend_buffer_type ** (* get)(ggml_backend_device *) = of_registry(device, "ggml_backend_dev_get_extra_bufts");
    return get ? get(device) : NULL;
}

static struct ggml_backend_feature * q_features(ggml_backend_reg * reg) {
    struct ggml_backend_feature * (* get)(ggml_backend_reg *) = T.ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    return get ? get(reg) : NULL;
}

static int run(struct q_step * s) {
    return s->sched ? T.ggml_backend_sched_graph_compute_async(s->sched, s->graph) : T.ggml_backend_graph_compute_async(s->backend, s->graph);
}

static void wait_for(struct q_step * s) {
    if (s->sched) {
        T.ggml_backend_sched_synchronize(s->sched);
    } else {
        T.ggml_backend_synchronize(s->backend);
    }
}

static void fill(struct q_step * s) {
    for (int i = 0; i < s->n_inputs; i++) {
        const struct q_copy * c = &s->inputs[i];
        if (c->queued) {
            T.ggml_backend_tensor_set_async(s->backend, c->tensor, c->array, 0, c->size);
        } else {
            T.ggml_backend_tensor_set(c->tensor, c->array, 0, c->size);
        }
    }
}

static void fetch(struct q_step * s, bool queued) {
    for (int i = 0; i < s->n_outputs; i++) {
        const struct q_copy * c = &s->outputs[i];
        if (c->queued && queued) {
            T.ggml_backend_tensor_get_async(s->backend, c->tensor, c->array, 0, c->size);
        } else if (!c->queued && !queued) {
            T.ggml_backend_tensor_get(c->tensor, c->array, 0, c->size);
        }
    }
}

static int n_running;

static int q_n_running(void) {
    return n_running;
}

// returns a status of ggml, or one of ours: the message is in q_failure() then
static int q_run(struct q_step * s) {
    if (s->stop->running) {
        refuse("it is computing in another thread");
        return Q_REFUSED;
    }
    for (int i = 0; i < s->n_inputs; i++) {
        if (!q_indices_fit(s->inputs[i].tensor, s->inputs[i].array, s->inputs[i].size)) {
            return Q_BAD_INDEX;
        }
    }
    s->stop->running   = true;
    s->stop->wanted    = 0;
    s->stop->next_look = now_ms() + 100;
    n_running++;
    PyThreadState * python = PyEval_SaveThread();
    fill(s);
    const long long start = now_ns();
    const int status = run(s);
    if (status == 0) {
        fetch(s, true);
    }
    wait_for(s);
    s->compute_ns = now_ns() - start;
    if (status == 0) {
        fetch(s, false);
    }
    PyEval_RestoreThread(python);
    n_running--;
    s->stop->running = false;
    return stop_all ? Q_LEAVING : status;
}

static ggml_backend_buffer * q_alloc_tensors(ggml_context * ctx, ggml_backend_buffer_type * type) {
    ggml_backend_buffer * buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, type);
    for (ggml_tensor * t = T.ggml_get_first_tensor(ctx); buffer && t; t = T.ggml_get_next_tensor(ctx, t)) {
        if (t->buffer == buffer) {
            note_of(t)->fixed = true;
        }
    }
    return buffer;
}

// when a buffer goes, its tensors have no data any more: whoever uses them next is told so
static void q_forget_buffer(ggml_context * ctx, ggml_backend_buffer * buffer) {
    epoch++;
    for (ggml_tensor * t = T.ggml_get_first_tensor(ctx); t; t = T.ggml_get_next_tensor(ctx, t)) {
        if (t->buffer == buffer) {
            t->buffer = NULL;
            t->data   = NULL;
            note_of(t)->fixed = false;
        }
    }
}

// takes back what allocators gave to a context's tensors. ggml leaves a tensor that has data where it is, even when the memory
// under it has moved, so this comes before every placement and after every loss
static void q_unbind(ggml_context * ctx) {
    epoch++;
    for (ggml_tensor * t = T.ggml_get_first_tensor(ctx); t; t = T.ggml_get_next_tensor(ctx, t)) {
        if (!note_of(t)->fixed) {
            t->buffer = NULL;
            t->data   = NULL;
            t->extra  = NULL;
        }
    }
}

static bool q_gallocr_reserve(ggml_gallocr * galloc, ggml_cgraph * graph) {
    volatile bool done = false;
    failure[0] = 0;
    GUARDED(done = T.ggml_gallocr_reserve(galloc, graph));
    return done;
}

static bool q_gallocr_alloc(ggml_gallocr * galloc, ggml_cgraph * graph) {
    volatile bool done = false;
    failure[0] = 0;
    GUARDED(done = T.ggml_gallocr_alloc_graph(galloc, graph));
    return done;
}

// splitting a graph redirects sources to copies on other devices; a second split must start from the sources as built
static void q_save_sources(ggml_cgraph * graph, ggml_tensor ** sources) {
    ggml_tensor ** nodes = T.ggml_graph_nodes(graph);
    for (int i = 0; i < T.ggml_graph_n_nodes(graph); i++) {
        memcpy(sources + 10 * i, nodes[i]->src, sizeof(nodes[i]->src));
    }
}

static void q_restore_sources(ggml_cgraph * graph, ggml_tensor ** sources) {
    ggml_tensor ** nodes = T.ggml_graph_nodes(graph);
    for (int i = 0; i < T.ggml_graph_n_nodes(graph); i++) {
        memcpy(nodes[i]->src, sources + 10 * i, sizeof(nodes[i]->src));
    }
}

// a scheduler jumped out of leaks what its split owned and must be thrown away by the caller
static bool q_sched_reserve(ggml_backend_sched * sched, ggml_cgraph * graph) {
    volatile bool done = false;
    failure[0] = 0;
    GUARDED(done = T.ggml_backend_sched_reserve(sched, graph));
    return done;
}

static bool q_sched_alloc(ggml_backend_sched * sched, ggml_cgraph * graph) {
    volatile bool done = false;
    failure[0] = 0;
    GUARDED(done = T.ggml_backend_sched_alloc_graph(sched, graph));
    return done;
}
