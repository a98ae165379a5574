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

// asked by the calling thread after each node; ten times a second Python's signal handlers get a chance to raise
static bool stop_wanted(void * data) {
    struct q_stop * stop = data;
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

static ggml_backend_buffer_type ** q_extra_buffer_types(ggml_backend_device * device) {
    ggml_backend_buffer_type ** (* get)(ggml_backend_device *) = of_registry(device, "ggml_backend_dev_get_extra_bufts");
    return get ? get(device) : NULL;
}

static struct ggml_backend_feature * q_features(ggml_backend_reg * reg) {
    struct ggml_backend_feature * (* get)(ggml_backend_reg *) = T.ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    return get ? get(reg) : NULL;
}

static int run(ggml_backend * backend, ggml_backend_sched * sched, ggml_cgraph * graph) {
    return sched ? T.ggml_backend_sched_graph_compute_async(sched, graph) : T.ggml_backend_graph_compute_async(backend, graph);
}

static void wait_for(ggml_backend * backend, ggml_backend_sched * sched) {
    if (sched) {
        T.ggml_backend_sched_synchronize(sched);
    } else {
        T.ggml_backend_synchronize(backend);
    }
}

static int q_step(ggml_backend * backend, ggml_backend_sched * sched, ggml_cgraph * graph, struct q_stop * stop,
        struct q_copy * inputs, int n_inputs, void ** in, struct q_copy * outputs, int n_outputs, void ** out) {
    stop->wanted    = 0;
    stop->next_look = now_ms() + 100;
    PyThreadState * python = PyEval_SaveThread();
    for (int i = 0; i < n_inputs; i++) {
        if (inputs[i].async) {
            T.ggml_backend_tensor_set_async(backend, inputs[i].tensor, in[i], 0, inputs[i].size);
        } else {
            T.ggml_backend_tensor_set(inputs[i].tensor, in[i], 0, inputs[i].size);
        }
    }
    int status = run(backend, sched, graph);
    for (int i = 0; status == 0 && i < n_outputs; i++) {
        if (outputs[i].async) {
            T.ggml_backend_tensor_get_async(backend, outputs[i].tensor, out[i], 0, outputs[i].size);
        }
    }
    wait_for(backend, sched);
    for (int i = 0; status == 0 && i < n_outputs; i++) {
        if (!outputs[i].async) {
            T.ggml_backend_tensor_get(outputs[i].tensor, out[i], 0, outputs[i].size);
        }
    }
    PyEval_RestoreThread(python);
    return status;
}

static int q_compute(ggml_backend * backend, ggml_backend_sched * sched, ggml_cgraph * graph, struct q_stop * stop) {
    return q_step(backend, sched, graph, stop, NULL, 0, NULL, NULL, 0, NULL);
}

// a tensor without data, or a view not yet in a buffer: what an allocator will place. Returns how many there are
static size_t q_collect_floating(ggml_context * ctx, ggml_tensor ** floating, size_t n) {
    size_t found = 0;
    for (ggml_tensor * t = T.ggml_get_first_tensor(ctx); t; t = T.ggml_get_next_tensor(ctx, t)) {
        if (t->view_src ? !t->buffer : !t->data) {
            if (found < n) {
                floating[found] = t;
            }
            found++;
        }
    }
    return found;
}

// ggml's allocators leave a tensor that has data where it is, even when the memory under it has moved
static void q_unbind(ggml_tensor ** floating, size_t n) {
    for (size_t i = 0; i < n; i++) {
        floating[i]->buffer = NULL;
        floating[i]->data   = NULL;
        floating[i]->extra  = NULL;
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
