// Turns a failing GGML_ASSERT into an error return. ggml calls its abort callback before abort(); ours jumps back to the call
// that armed the guard. Only graph building, allocation and the scheduler's split are guarded: C frames on the calling thread
// that own nothing. Anywhere else the message is printed and ggml ends the process.

#include <setjmp.h>

static _Thread_local jmp_buf landing;
static _Thread_local bool    armed;

static int n_types; // ids below are types ggml knows

// runs one statement; what it assigns must be volatile and start out as the failure
#define GUARDED(statement)      \
    armed = true;               \
    if (setjmp(landing) == 0) { \
        statement;              \
        armed = false;          \
    }

static void on_abort(const char * message) {
    if (armed) {
        armed = false;
        snprintf(failure, sizeof(failure), "%s", message);
        longjmp(landing, 1);
    }
    fprintf(stderr, "ggml gave up: %s\n", message);
}

static void q_watch_aborts(void) {
    T.ggml_set_abort_callback(on_abort);
}

static int log_level;

static void on_log(int level, const char * text, void * user_data) {
    (void) user_data;
    // level 5 continues the line before it, which was shown only if everything is
    if (level >= log_level && (level != 5 || log_level <= 1)) {
        fputs(text, stderr);
    }
}

static void q_set_log_level(int level) {
    log_level = level;
    T.ggml_log_set(on_log, NULL);
}

// an open context is one that allocates no data; q_close_context takes the mark away
static bool open_context(ggml_context * ctx) {
    return (ctx && T.ggml_get_no_alloc(ctx)) || refuse("the context is closed");
}

static bool operand(const char * name, const ggml_tensor * t) {
    if (!t) {
        return refuse("%s is missing", name);
    }
    return (unsigned) t->type < (unsigned) n_types || refuse("%s belongs to a closed context", name);
}

static bool q_is_open(const ggml_tensor * t) {
    return operand("tensor", t);
}

// what this package notes about a tensor, in the padding that ggml leaves alone
struct note {
    uint32_t limit; // indices written to it must be below; 0: it is not known to hold any
    uint32_t fixed; // it was given memory of its own, which no allocator takes away
};

static struct note * note_of(const ggml_tensor * t) {
    return (struct note *) t->padding;
}

// a step is checked once; it is checked again when anything it may rest on was closed or has moved
static long long epoch;

static long long q_epoch(void) {
    return epoch;
}

// tensor structs live on while somebody holds a handle; a type nobody knows makes every later use a readable error
static void q_close_context(ggml_context * ctx) {
    for (ggml_tensor * t = T.ggml_get_first_tensor(ctx); t; t = T.ggml_get_next_tensor(ctx, t)) {
        t->type = -1;
    }
    T.ggml_set_no_alloc(ctx, false);
    epoch++;
}

// ggml_new_tensor looks at the type before the number of dimensions: no dimension at all tells whether it liked the type
static int q_count_types(ggml_context * ctx) {
    for (n_types = 0; n_types < 1000; n_types++) {
        GUARDED(T.ggml_new_tensor(ctx, n_types, 0, NULL));
        if (!strstr(failure, "n_dims")) {
            break;
        }
    }
    return n_types;
}
