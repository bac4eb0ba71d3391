/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA driver (libcuda.so.1) for machines without a GPU. It models what decides on which GPU a transfer
 * runs: context stacks per thread, primary and created contexts, who owns an address, and the error codes
 * the real driver gives (driver_checks.py holds both to the same table). Device memory is a memfd, so any
 * process on the machine can map it and the kernel frees it when its owner dies.
 *
 * Environment, read once: FAKECUDA_NDEV (GPUs in the machine, default 4), FAKECUDA_PEERS=0 (no peer access:
 * libfabric then never selects CUDA IPC, and says nothing), CUDA_VISIBLE_DEVICES (numbers
 * only), FAKECUDA_FAIL (see fakecuda.h), FAKECUDA_LOG (a file that gets one line per call).
 */
#define _GNU_SOURCE
#include "fakecuda.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

enum { MAX_DEVICES = 16, MAX_STACK = 64, MAX_RULES = 32, MAX_NAMES = 256, NO_DEVICE = -1 };
static const size_t PAGE = 4096, VMM_GRANULARITY = 2u << 20;

/* A handle comes back, as from the real driver: a device's primary context has the same one for ever, and that of
 * a destroyed context serves the next one made. The id never comes back. */
struct context {
    CUdevice device;
    bool primary, destroyed;
    unsigned long long id;
    struct context *peer[MAX_DEVICES]; /* whose memory it may reach, by device */
    struct context *next;
};

enum kind { ALLOCATED, IPC_OPENED, VMM_MAPPED, MANAGED, PINNED_HOST, STREAM_ORDERED };

/* One range of device addresses. */
struct range {
    CUdeviceptr base;
    size_t size, mapped;
    enum kind kind;
    struct context *owner; /* NULL for VMM and stream-ordered memory, as with the real driver */
    CUdevice device;
    unsigned access; /* VMM memory: the devices that cuMemSetAccess named, a bit each */
    int fd; /* -1 where this process did not make the memory */
    unsigned sync_memops;
    unsigned long long buffer_id; /* never reused: that is what tells two allocations apart */
    struct range *next;
};

/* Physical memory made by cuMemCreate. It lives until released and unmapped everywhere. */
struct physical {
    int fd;
    size_t size;
    CUdevice device;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool initialised, forked;
static int device_count, visible[MAX_DEVICES];
static struct {
    struct context *context; /* NULL before the first; `destroyed` while inactive */
    int retained;
} primary[MAX_DEVICES];
static struct context *contexts; /* never freed: a destroyed one must still be recognised */
static struct range *ranges;
static unsigned long long last_context_id, last_buffer_id;

static _Thread_local struct context *stack[MAX_STACK];
static _Thread_local int depth;
/* The real driver accepts a destroyed context, or anything that never was one, in cuCtxSetCurrent, and the process
 * dies of it later (measured, driver 580): when the thread ends, or sets another, or none. So does this one, unless
 * the handle has come back to life. */
static _Thread_local struct context *dead_set;
static pthread_key_t dead_key;

/* ---- counting, logging and failing on demand --------------------------------------------------------- */

static struct counter {
    char name[48];
    unsigned long calls;
} counters[MAX_NAMES];
static struct rule {
    char name[48];
    int error;
    unsigned skip, left;
    bool forever;
} rules[MAX_RULES];
static int counter_count, rule_count, log_fd = -1;

/* "cuMemAlloc_v2" -> "cuMemAlloc" */
static void plain_name(const char *name, char out[48])
{
    snprintf(out, 48, "%s", name);
    char *suffix = strrchr(out, '_');
    if (suffix && suffix[1] == 'v' && suffix[2] >= '0' && suffix[2] <= '9')
        *suffix = '\0';
}

/* The stack may hold anything that a program has set. */
static bool known(const struct context *context)
{
    const struct context *c = contexts;
    while (c && c != context)
        c = c->next;
    return c;
}

static int top_device(void)
{
    return depth && known(stack[depth - 1]) ? stack[depth - 1]->device : NO_DEVICE;
}

static void log_call(const char *name, CUresult injected)
{
    if (log_fd < 0)
        return;
    char line[160];
    pthread_mutex_lock(&lock);
    int device = top_device();
    pthread_mutex_unlock(&lock);
    int n = snprintf(line, sizeof line, "pid=%d tid=%ld current=%d %s%s\n", getpid(),
                     (long)syscall(SYS_gettid), device, name, injected ? " (failed on demand)" : "");
    if (write(log_fd, line, (size_t)n) < 0)
        return;
}

static struct counter *counter_of(const char *exported)
{
    char name[48];
    int i = 0;
    plain_name(exported, name);
    while (i < counter_count && strcmp(counters[i].name, name))
        i++;
    if (i == MAX_NAMES)
        abort();
    if (i == counter_count)
        snprintf(counters[counter_count++].name, sizeof name, "%s", name);
    return &counters[i];
}

/* Counts a call; returns the error that a test has asked for, or 0. */
static CUresult count_call(struct counter **counter, const char *exported)
{
    CUresult error = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!*counter)
        *counter = counter_of(exported);
    (*counter)->calls++;
    for (struct rule *r = rules; r < rules + rule_count && !error; r++) {
        if (strcmp(r->name, (*counter)->name))
            continue;
        if (r->skip) {
            r->skip--;
        } else if (r->forever || r->left) {
            error = r->error;
            r->left -= !r->forever;
        }
    }
    pthread_mutex_unlock(&lock);
    log_call(exported, error);
    return error;
}

/* First line of every driver function. CALL_ANYTIME is for the few that answer before cuInit. */
#define CALL_ANYTIME()                                          \
    do {                                                        \
        static struct counter *counter_;                        \
        CUresult injected_ = count_call(&counter_, __func__);   \
        if (injected_)                                          \
            return injected_;                                   \
    } while (0)
/* A forked child of an initialised process gets 3 for ever, as from the real driver. */
#define CALL()                                        \
    do {                                              \
        CALL_ANYTIME();                               \
        if (!initialised || forked)                   \
            return CUDA_ERROR_NOT_INITIALIZED;        \
    } while (0)

API int fakecuda_fail(const char *name, int error, unsigned after, unsigned times)
{
    pthread_mutex_lock(&lock);
    bool full = name && rule_count == MAX_RULES;
    if (!name) {
        rule_count = 0;
    } else if (!full) {
        struct rule *r = &rules[rule_count++];
        *r = (struct rule){.error = error, .skip = after, .left = times, .forever = !times};
        plain_name(name, r->name);
    }
    pthread_mutex_unlock(&lock);
    return full;
}

API unsigned long fakecuda_calls(const char *name)
{
    char wanted[48] = "";
    unsigned long calls = 0;
    if (name)
        plain_name(name, wanted);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < counter_count; i++)
        if (name ? !strcmp(counters[i].name, wanted) : strcmp(counters[i].name, "cuGetProcAddress") != 0)
            calls += counters[i].calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

API void fakecuda_reset_calls(void)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < counter_count; i++)
        counters[i].calls = 0;
    pthread_mutex_unlock(&lock);
}

/* ---- start-up ---------------------------------------------------------------------------------------- */

static void die(int signal_number, const char *why)
{
    fprintf(stderr, "fakecuda: %s: the real driver dies of this\n", why);
    signal(signal_number, SIG_DFL); /* Python's faulthandler is not to explain it */
    raise(signal_number);
}

/* Whether this thread has set or pushed a context that was dead then, has it current, and it still is dead. */
static bool dead_on_top(void)
{
    pthread_mutex_lock(&lock);
    bool dead = depth && dead_set && stack[depth - 1] == dead_set && (!known(dead_set) || dead_set->destroyed);
    pthread_mutex_unlock(&lock);
    return dead;
}

static void dead_thread_ends(void *context)
{
    (void)context;
    if (dead_on_top())
        die(SIGABRT, "a thread ends with a dead context");
}

/* Of the thread that ends the process only this is called. */
__attribute__((destructor)) static void end(void)
{
    dead_thread_ends(NULL);
}

static void after_fork(void)
{
    forked = initialised;
    depth = 0;
    pthread_mutex_init(&lock, NULL); /* another thread may have held it */
}

static void read_failures(void)
{
    const char *spec = getenv("FAKECUDA_FAIL");
    char *copy = spec ? strdup(spec) : NULL, *rest = copy, *item;
    while (rest && (item = strsep(&rest, ","))) {
        char name[48];
        int error;
        unsigned first = 1, times = 0;
        if (!*item)
            continue;
        if (sscanf(item, "%47[^:]:%d:%u:%u", name, &error, &first, &times) < 2 || !first) {
            fprintf(stderr, "fakecuda: FAKECUDA_FAIL: cannot read \"%s\" (name:error[:first[:times]])\n", item);
            abort();
        }
        fakecuda_fail(name, error, first - 1, times);
    }
    free(copy);
}

__attribute__((constructor)) static void start(void)
{
    const char *count = getenv("FAKECUDA_NDEV"), *shown = getenv("CUDA_VISIBLE_DEVICES");
    const char *log = getenv("FAKECUDA_LOG");
    int installed = count ? atoi(count) : 4;
    if (installed > MAX_DEVICES)
        installed = MAX_DEVICES;
    if (!shown) {
        for (; device_count < installed; device_count++)
            visible[device_count] = device_count;
    } else {
        char *end;
        for (; device_count < MAX_DEVICES; device_count++, shown = end + (*end == ',')) {
            long device = strtol(shown, &end, 10);
            if (end == shown || device < 0 || device >= installed)
                break; /* like the real driver: the list ends at the first bad entry */
            visible[device_count] = (int)device;
        }
    }
    if (log)
        log_fd = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    read_failures();
    pthread_atfork(NULL, NULL, after_fork);
    pthread_key_create(&dead_key, dead_thread_ends);
}

API CUresult cuInit(unsigned flags)
{
    CALL_ANYTIME();
    if (forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_count)
        return 100; /* NO_DEVICE */
    initialised = true;
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version)
{
    CALL_ANYTIME();
    *version = 13000;
    return CUDA_SUCCESS;
}

static const char *error_name(CUresult error)
{
    switch (error) {
    case CUDA_SUCCESS: return "CUDA_SUCCESS";
    case CUDA_ERROR_INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case CUDA_ERROR_OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case CUDA_ERROR_NOT_INITIALIZED: return "CUDA_ERROR_NOT_INITIALIZED";
    case CUDA_ERROR_INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
    case CUDA_ERROR_INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
    case CUDA_ERROR_INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
    case CUDA_ERROR_NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case CUDA_ERROR_ILLEGAL_ADDRESS: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: return "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED";
    case CUDA_ERROR_PEER_ACCESS_NOT_ENABLED: return "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED";
    case CUDA_ERROR_CONTEXT_IS_DESTROYED: return "CUDA_ERROR_CONTEXT_IS_DESTROYED";
    case CUDA_ERROR_NOT_SUPPORTED: return "CUDA_ERROR_NOT_SUPPORTED";
    case CUDA_ERROR_UNKNOWN: return "CUDA_ERROR_UNKNOWN";
    default: return NULL;
    }
}

API CUresult cuGetErrorName(CUresult error, const char **name)
{
    CALL_ANYTIME();
    *name = error_name(error);
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char **text)
{
    CALL_ANYTIME();
    *text = error_name(error);
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Symbols whose newer versions take other arguments, newest first; everything else is NAME_v2 or NAME. */
static const struct {
    const char *name;
    int since;
    const char *exported;
} versioned[] = {
    {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxCreate", 11040, "cuCtxCreate_v3"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuGetProcAddress", 0, "cuGetProcAddress"},
};

static void *find_symbol(const char *name, int version)
{
    static void *self;
    Dl_info info;
    char newer[96];
    if (!self && dladdr((void *)find_symbol, &info))
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    for (size_t i = 0; i < sizeof versioned / sizeof *versioned; i++)
        if (!strcmp(versioned[i].name, name) && version >= versioned[i].since)
            return dlsym(self, versioned[i].exported);
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *found = dlsym(self, newer);
    return found ? found : dlsym(self, name);
}

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    (void)flags;
    CALL_ANYTIME();
    *function = find_symbol(name, version);
    if (status)
        *status = *function ? 0 : 1; /* 1: symbol not found */
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* ---- devices ----------------------------------------------------------------------------------------- */

#define CALL_ON(device)                                     \
    do {                                                    \
        CALL();                                             \
        if ((device) < 0 || (device) >= device_count)       \
            return CUDA_ERROR_INVALID_DEVICE;               \
    } while (0)

API CUresult cuDeviceGetCount(int *count)
{
    CALL();
    *count = device_count;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CALL_ON(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CALL_ON(device);
    snprintf(name, (size_t)length, "Fake GPU %d", visible[device]);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    CALL_ON(device);
    memset(uuid, 0, sizeof *uuid);
    memcpy(uuid, "ctxfix-fake-gpu", 15);
    uuid->bytes[15] = (char)visible[device];
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid_v2(uuid, device);
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    CALL_ON(device);
    *value = attribute == CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING || attribute == CU_DEVICE_ATTRIBUTE_VMM_SUPPORTED;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CALL_ON(device);
    *bytes = (size_t)1 << 30;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    CALL_ON(device);
    const char *peers = getenv("FAKECUDA_PEERS");
    *can = device != peer && !(peers && !strcmp(peers, "0"));
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    CALL_ON(device);
    snprintf(text, (size_t)length, "0000:%02x:00.0", 0x10 + visible[device]); /* as in topo.xml */
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    unsigned bus;
    CALL();
    if (sscanf(text, "%*x:%x:00.0", &bus) != 1)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < device_count; i++)
        if (visible[i] + 0x10 == (int)bus) {
            *device = i;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

/* ---- contexts ---------------------------------------------------------------------------------------- */

/* Makes `again`, a destroyed context, a new one; or, if that is NULL, one with a handle of its own. */
static struct context *new_context(struct context *again, CUdevice device, bool is_primary)
{
    struct context *c = again ? again : calloc(1, sizeof *c);
    if (!c)
        abort();
    if (!again)
        c->next = contexts, contexts = c;
    c->device = device, c->primary = is_primary, c->destroyed = false, c->id = ++last_context_id;
    return c;
}

static struct context *free_handle(void)
{
    struct context *c = contexts;
    while (c && (c->primary || !c->destroyed))
        c = c->next;
    return c;
}

static CUresult usable(struct context *context)
{
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (known(context))
        return context->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
    (void)*(volatile char *)context; /* the real driver looks into the handle too: SIGSEGV where nothing is */
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static void drop_range(struct range **link)
{
    struct range *r = *link;
    munmap((void *)r->base, r->mapped);
    if (r->fd >= 0)
        close(r->fd);
    *link = r->next;
    free(r);
}

/* A context takes its memory with it. Its handle stays known, so that later use is told from nonsense. */
static void destroy(struct context *context)
{
    context->destroyed = true;
    memset(context->peer, 0, sizeof context->peer);
    for (struct context *c = contexts; c; c = c->next)
        if (c->peer[context->device] == context)
            c->peer[context->device] = NULL;
    for (struct range **link = &ranges; *link;) {
        if ((*link)->owner == context)
            drop_range(link);
        else
            link = &(*link)->next;
    }
}

/* Current context of this thread, if work can be done in it. */
static CUresult current(struct context **context)
{
    *context = depth ? stack[depth - 1] : NULL;
    return usable(*context);
}

static bool active(CUdevice device)
{
    return primary[device].context && !primary[device].context->destroyed;
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CALL_ON(device);
    pthread_mutex_lock(&lock);
    if (!active(device))
        primary[device].context = new_context(primary[device].context, device, true);
    primary[device].retained++;
    *context = primary[device].context;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static void deactivate(CUdevice device)
{
    if (active(device))
        destroy(primary[device].context);
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CALL_ON(device);
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!primary[device].retained)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (!--primary[device].retained)
        deactivate(device);
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    CALL_ON(device);
    pthread_mutex_lock(&lock);
    deactivate(device); /* whoever retained it still has to release it */
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active)
{
    CALL_ON(device);
    pthread_mutex_lock(&lock);
    *flags = 0;
    *is_active = active(device);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

API CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device)
{
    (void)flags;
    CALL_ON(device);
    if (depth == MAX_STACK)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *context = stack[depth++] = new_context(free_handle(), device, false);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

API CUresult cuCtxCreate_v3(CUcontext *context, void *affinity, int count, unsigned flags, CUdevice device)
{
    (void)affinity, (void)count;
    return cuCtxCreate_v2(context, flags, device);
}

API CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned flags, CUdevice device)
{
    (void)params;
    return cuCtxCreate_v2(context, flags, device);
}

API CUresult cuCtxDestroy_v2(CUcontext context)
{
    CALL();
    pthread_mutex_lock(&lock);
    CUresult result = usable(context);
    if (!result && context->primary)
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (!result)
        destroy(context);
    if (!result && depth && stack[depth - 1] == context)
        depth--; /* from the caller's own stack only: other threads keep the dead handle */
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
    CALL();
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

/* Remembers a context that is made current dead; the driver takes it without an error. */
static void remember_if_dead(struct context *context)
{
    pthread_mutex_lock(&lock);
    bool dead = !known(context) || context->destroyed;
    pthread_mutex_unlock(&lock);
    if (dead) {
        dead_set = context;
        pthread_setspecific(dead_key, context);
    }
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
    CALL();
    if (dead_on_top() && context != dead_set)
        die(SIGSEGV, "a dead context is replaced");
    if (!context) { /* NULL pops */
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    depth += !depth;
    stack[depth - 1] = context;
    remember_if_dead(context);
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    CALL();
    if (!context || depth == MAX_STACK)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    remember_if_dead(context);
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    CALL();
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

/* Runs the rest of the function, lock held, with the current context in `name`. */
#define CURRENT_OR_RETURN(name)                 \
    struct context *name;                       \
    pthread_mutex_lock(&lock);                  \
    CUresult current_ = current(&name);         \
    if (current_) {                             \
        pthread_mutex_unlock(&lock);            \
        return current_;                        \
    }

/* Answers under a dead context too. */
API CUresult cuCtxGetDevice(CUdevice *device)
{
    CALL();
    struct context *context;
    pthread_mutex_lock(&lock);
    CUresult result = current(&context);
    if (known(context)) {
        *device = context->device;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuCtxGetId(CUcontext context, unsigned long long *id)
{
    CALL();
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    result = context ? usable(context) : current(&context);
    if (!result)
        *id = context->id;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Says 201, not 709, of a dead context. */
API CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
    CALL();
    pthread_mutex_lock(&lock);
    CUresult result = context ? usable(context) : current(&context);
    pthread_mutex_unlock(&lock);
    if (result)
        return CUDA_ERROR_INVALID_CONTEXT;
    *version = 3020;
    return CUDA_SUCCESS;
}

/* The current context may reach the memory of `peer`. */
API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    CALL();
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    CURRENT_OR_RETURN(context);
    CUresult result = usable(peer);
    if (!result && peer->device == context->device)
        result = CUDA_ERROR_INVALID_DEVICE;
    if (!result && context->peer[peer->device] == peer)
        result = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    if (!result)
        context->peer[peer->device] = peer;
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    CALL();
    CURRENT_OR_RETURN(context);
    CUresult result = usable(peer);
    if (!result && context->peer[peer->device] != peer)
        result = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    if (!result)
        context->peer[peer->device] = NULL;
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuCtxGetFlags(unsigned *flags)
{
    CALL();
    CURRENT_OR_RETURN(context);
    *flags = 0;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
    CALL();
    CURRENT_OR_RETURN(context);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

API int fakecuda_contexts(int device)
{
    int count = 0;
    pthread_mutex_lock(&lock);
    for (struct context *c = contexts; c; c = c->next)
        count += c->device == device && !c->destroyed;
    pthread_mutex_unlock(&lock);
    return count;
}

API int fakecuda_retained(int device)
{
    pthread_mutex_lock(&lock);
    int count = device >= 0 && device < MAX_DEVICES ? primary[device].retained : 0;
    pthread_mutex_unlock(&lock);
    return count;
}

API int fakecuda_stack_depth(void)
{
    return depth;
}

/* ---- memory ------------------------------------------------------------------------------------------ */

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

static struct range *find(CUdeviceptr address)
{
    for (struct range *r = ranges; r; r = r->next)
        if (address >= r->base && address < r->base + r->size)
            return r;
    return NULL;
}

static struct range *add_range(struct range values)
{
    struct range *r = malloc(sizeof *r);
    if (!r)
        abort();
    *r = values;
    r->buffer_id = ++last_buffer_id;
    r->next = ranges, ranges = r;
    return r;
}

/* Removes the range of that kind that starts at `address`. */
static CUresult remove_range(CUdeviceptr address, enum kind kind)
{
    for (struct range **link = &ranges; *link; link = &(*link)->next)
        if ((*link)->base == address && (*link)->kind == kind) {
            drop_range(link);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

static int new_memory(size_t bytes)
{
    int fd = memfd_create("fakecuda", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Memory made under the current context. */
static CUresult allocate(CUdeviceptr *address, size_t bytes, enum kind kind)
{
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    CURRENT_OR_RETURN(context);
    size_t mapped = round_up(bytes, PAGE);
    int fd = new_memory(mapped);
    void *base = fd < 0 ? MAP_FAILED : mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base != MAP_FAILED)
        add_range((struct range){.base = *address = (CUdeviceptr)base, .size = bytes, .mapped = mapped, .kind = kind,
                                 .owner = kind == STREAM_ORDERED ? NULL : context, .device = context->device,
                                 .fd = fd});
    else if (fd >= 0)
        close(fd);
    pthread_mutex_unlock(&lock);
    return base == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
    CALL();
    return allocate(address, bytes, ALLOCATED);
}

API CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned flags)
{
    (void)flags;
    CALL();
    return allocate(address, bytes, MANAGED);
}

API CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags)
{
    (void)flags;
    CALL();
    return allocate((CUdeviceptr *)address, bytes, PINNED_HOST);
}

/* From the pool of the current context's device; there is but the default stream. */
API CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, void *stream)
{
    (void)stream;
    CALL();
    return allocate(address, bytes, STREAM_ORDERED);
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
    CALL();
    pthread_mutex_lock(&lock);
    CUresult result = remove_range(address, ALLOCATED);
    if (result)
        result = remove_range(address, MANAGED);
    if (result)
        result = remove_range(address, STREAM_ORDERED);
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuMemFreeHost(void *address)
{
    CALL();
    pthread_mutex_lock(&lock);
    CUresult result = remove_range((CUdeviceptr)address, PINNED_HOST);
    pthread_mutex_unlock(&lock);
    return result;
}

API CUresult cuMemFreeAsync(CUdeviceptr address, void *stream)
{
    (void)stream;
    CALL();
    CURRENT_OR_RETURN(context);
    CUresult result = remove_range(address, STREAM_ORDERED);
    pthread_mutex_unlock(&lock);
    return result;
}

/* Whether the memory is mapped for work in that context. */
static bool reaches(const struct context *context, const struct range *r)
{
    if (r->kind == MANAGED || r->kind == PINNED_HOST || r->device == context->device)
        return true;
    return r->owner ? context->peer[r->device] == r->owner : r->access >> context->device & 1;
}

/* The call libfabric makes for each descriptor: any context of the owner's device will do, and those of another
 * device only with peer access. */
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    CALL();
    CURRENT_OR_RETURN(context);
    struct range *r = find(address);
    CUresult result = r && reaches(context, r) ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    if (!result && base)
        *base = r->base;
    if (!result && bytes)
        *bytes = r->size;
    pthread_mutex_unlock(&lock);
    return result;
}

/* libfabric asks dlsym for the name without a suffix. */
API CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    return cuMemGetAddressRange_v2(base, bytes, address);
}

static unsigned memory_type(const struct range *r)
{
    return r->kind == PINNED_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
}

static bool takes_ipc(const struct range *r)
{
    return r->kind == ALLOCATED || r->kind == IPC_OPENED;
}

/* Writes one attribute; r is NULL for an address that is not CUDA's. */
static CUresult attribute(const struct range *r, CUdeviceptr address, int which, void *out)
{
    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = r ? r->owner : NULL; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = r ? memory_type(r) : 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = r ? address : 0; break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)out = r ? r->sync_memops : 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)out = r ? r->buffer_id : 0; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)out = r && r->kind == MANAGED; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = r ? r->device : -2; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *(int *)out = r && takes_ipc(r); break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)out = r ? r->base : 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)out = r ? r->size : 0; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(unsigned *)out = r != NULL; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

API CUresult cuPointerGetAttribute(void *out, int which, CUdeviceptr address)
{
    CALL();
    pthread_mutex_lock(&lock);
    struct range *r = find(address);
    CUresult result = r ? attribute(r, address, which, out) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Unlike the singular form it succeeds for any address, with empty answers. */
API CUresult cuPointerGetAttributes(unsigned count, const int *which, void **out, CUdeviceptr address)
{
    CALL();
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    struct range *r = find(address);
    for (unsigned i = 0; i < count && !result; i++)
        result = attribute(r, address, which[i], out[i]);
    pthread_mutex_unlock(&lock);
    return result;
}

/* No context needed. Memory without one refuses it. */
API CUresult cuPointerSetAttribute(const void *value, int which, CUdeviceptr address)
{
    CALL();
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    struct range *r = find(address);
    if (which != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS || (r && !r->owner))
        result = CUDA_ERROR_NOT_SUPPORTED;
    else if (!r)
        result = CUDA_ERROR_INVALID_VALUE;
    else
        r->sync_memops = *(const unsigned *)value;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Copies need a context only in that the real ones do; the bytes are ordinary memory here. */
static CUresult copy(void *to, const void *from, size_t bytes)
{
    CURRENT_OR_RETURN(context);
    pthread_mutex_unlock(&lock);
    memcpy(to, from, bytes);
    return CUDA_SUCCESS;
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes)
{
    CALL();
    return copy((void *)to, from, bytes);
}

API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes)
{
    CALL();
    return copy(to, (void *)from, bytes);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    CALL();
    return copy((void *)to, (void *)from, bytes);
}

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes)
{
    CALL();
    return copy((void *)to, (void *)from, bytes);
}

/* Copies here have ended when they return, so the default stream is always through; there is no other. */
API CUresult cuStreamSynchronize(void *stream)
{
    CALL();
    CURRENT_OR_RETURN(context);
    (void)context;
    pthread_mutex_unlock(&lock);
    return stream ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes)
{
    CALL();
    CURRENT_OR_RETURN(context);
    pthread_mutex_unlock(&lock);
    memset((void *)to, value, bytes);
    return CUDA_SUCCESS;
}

/* ---- VMM memory (what torch's expandable_segments uses) ----------------------------------------------- */

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option)
{
    (void)prop, (void)option;
    CALL();
    *bytes = VMM_GRANULARITY;
    return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                         unsigned long long flags)
{
    (void)flags;
    CALL_ON(prop->location.id);
    if (!bytes || bytes % VMM_GRANULARITY)
        return CUDA_ERROR_INVALID_VALUE;
    struct physical *p = malloc(sizeof *p);
    int fd = new_memory(bytes);
    if (!p || fd < 0) {
        free(p);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *p = (struct physical){.fd = fd, .size = bytes, .device = prop->location.id};
    *handle = (uintptr_t)p;
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    CALL();
    struct physical *p = (struct physical *)(uintptr_t)handle;
    close(p->fd); /* mappings keep the memory */
    free(p);
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint,
                                 unsigned long long flags)
{
    (void)alignment, (void)hint, (void)flags;
    CALL();
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (CUdeviceptr)base;
    return CUDA_SUCCESS;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    CALL();
    return munmap((void *)address, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    (void)flags;
    CALL();
    struct physical *p = (struct physical *)(uintptr_t)handle;
    if (offset + bytes > p->size)
        return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, p->fd, (off_t)offset) == MAP_FAILED)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    add_range((struct range){.base = address, .size = bytes, .mapped = bytes, .kind = VMM_MAPPED,
                             .device = p->device, .fd = -1});
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    CALL();
    if (!count || mprotect((void *)address, bytes, access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (struct range *r = ranges; r; r = r->next)
        for (size_t i = 0; r->base >= address && r->base < address + bytes && i < count; i++) {
            unsigned bit = 1u << access[i].location.id;
            r->access = access[i].flags ? r->access | bit : r->access & ~bit;
        }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    CALL();
    pthread_mutex_lock(&lock);
    CUresult result = remove_range(address, VMM_MAPPED);
    if (!result) /* the address range stays reserved */
        mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- IPC between processes --------------------------------------------------------------------------- */

struct ipc {
    int pid, fd;
    size_t size, mapped;
};

API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    CALL();
    CURRENT_OR_RETURN(context); /* any: it need not be the owner's */
    struct range *r = find(address);
    struct ipc ipc = {.pid = getpid(), .fd = -1};
    if (r && r->kind == ALLOCATED) /* no other memory has a legacy handle, nor has memory of others */
        ipc.fd = r->fd, ipc.size = r->size, ipc.mapped = r->mapped;
    pthread_mutex_unlock(&lock);
    if (ipc.fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ipc, sizeof ipc);
    return CUDA_SUCCESS;
}

/* The memory is mapped through, and belongs to, whatever context is current. */
API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
    (void)flags;
    CALL();
    struct ipc ipc;
    memcpy(&ipc, &handle, sizeof ipc);
    if (ipc.pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    CURRENT_OR_RETURN(context);
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ipc.pid, ipc.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    void *base = fd < 0 ? MAP_FAILED : mmap(NULL, ipc.mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (base != MAP_FAILED)
        add_range((struct range){.base = *address = (CUdeviceptr)base, .size = ipc.size, .mapped = ipc.mapped,
                                 .kind = IPC_OPENED, .owner = context, .device = context->device, .fd = -1});
    pthread_mutex_unlock(&lock);
    return base == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    CALL();
    pthread_mutex_lock(&lock);
    CUresult result = remove_range(address, IPC_OPENED);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- for the loopback fabric ------------------------------------------------------------------------- */

API void fakecuda_look(CUdeviceptr address, struct fakecuda_look *look)
{
    pthread_mutex_lock(&lock);
    struct range *r = find(address);
    struct context *top = depth ? stack[depth - 1] : NULL;
    look->owner = r ? r->device : NO_DEVICE;
    look->current = top_device();
    look->right = r && top && known(top) && !top->destroyed && (r->owner ? r->owner == top : r->device == top->device);
    pthread_mutex_unlock(&lock);
}

/* ---- names that UCX's CUDA modules must be able to resolve -------------------------------------------- */

/* They load all the same; UCX then finds no CUDA transport it can use and works with host memory. */
#define NOT_HERE(name)                      \
    API CUresult name(void)                 \
    {                                       \
        CALL();                             \
        return CUDA_ERROR_NOT_SUPPORTED;    \
    }
NOT_HERE(cuEventCreate)
NOT_HERE(cuEventDestroy_v2)
NOT_HERE(cuEventQuery)
NOT_HERE(cuEventRecord)
NOT_HERE(cuMemExportToShareableHandle)
NOT_HERE(cuMemGetAllocationPropertiesFromHandle)
NOT_HERE(cuMemGetHandleForAddressRange)
NOT_HERE(cuMemHostGetDevicePointer_v2)
NOT_HERE(cuMemHostRegister_v2)
NOT_HERE(cuMemHostUnregister)
NOT_HERE(cuMemImportFromShareableHandle)
NOT_HERE(cuMemPoolDestroy)
NOT_HERE(cuMemPoolExportPointer)
NOT_HERE(cuMemPoolExportToShareableHandle)
NOT_HERE(cuMemPoolImportFromShareableHandle)
NOT_HERE(cuMemPoolImportPointer)
NOT_HERE(cuMemPoolSetAccess)
NOT_HERE(cuMemRangeGetAttribute)
NOT_HERE(cuMemRetainAllocationHandle)
NOT_HERE(cuMemcpyAsync)
NOT_HERE(cuMemcpyDtoDAsync_v2)
NOT_HERE(cuStreamAddCallback)
NOT_HERE(cuStreamCreate)
NOT_HERE(cuStreamDestroy_v2)
