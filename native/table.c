// The function table: every ggml call goes through a pointer taken with dlsym from one provider, so nothing is linked and one
// compiled module serves every provider. build_ffi.py turns cdef/*.h into `struct table` and its list of entries.

#include <dlfcn.h>

#ifndef RTLD_DEEPBIND
#define RTLD_DEEPBIND 0
#endif
#ifdef __SANITIZE_ADDRESS__
// the address sanitizer refuses libraries that prefer their own symbols
#undef RTLD_DEEPBIND
#define RTLD_DEEPBIND 0
#endif

static const struct entry {
    const char * name;
    void **      slot;
    bool         required;
} entries[] = {
    TABLE_ENTRIES
};

static _Thread_local char failure[2048];

static bool refuse(const char * format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(failure, sizeof(failure), format, args);
    va_end(args);
    return false;
}

static const char * q_failure(void) {
    return failure;
}

static int q_n_entries(void) {
    return (int) (sizeof(entries) / sizeof(entries[0]));
}

static const char * q_entry_name(int i) {
    return entries[i].name;
}

static bool q_entry_required(int i) {
    return entries[i].required;
}

static const char * q_file_of(const void * address) {
    Dl_info info;
    return address && dladdr(address, &info) ? info.dli_fname : NULL;
}

static const char * q_entry_file(int i) {
    return q_file_of(*entries[i].slot);
}

static bool q_has(const char * name) {
    for (int i = 0; i < q_n_entries(); i++) {
        if (strcmp(entries[i].name, name) == 0) {
            return *entries[i].slot != NULL;
        }
    }
    return false;
}

// opens a library and fills the table from it and its dependencies; never closed, threads of its own may be inside
static bool q_open(const char * path) {
    void * handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!handle) {
        return refuse("%s", dlerror());
    }
    if (!dlsym(handle, "ggml_init") || !dlsym(handle, "ggml_backend_dev_count")) {
        return refuse("%s exports no ggml backend registry", path);
    }
    for (int i = 0; i < q_n_entries(); i++) {
        *entries[i].slot = dlsym(handle, entries[i].name);
    }
    return true;
}
