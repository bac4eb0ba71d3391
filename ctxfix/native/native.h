/* SPDX-License-Identifier: Apache-2.0 */
/* What the C files of ctxfix.native share.
 *
 *   driver.c   the CUDA driver, if the process has loaded it, and contexts made current for one call
 *   slots.c    import slots of loaded objects: found, replaced, put back
 *   threads.c  threads started by an armed thread get a context; late binding
 *   fabric.c   libfabric's CUDA calls, each in the context of the memory it touches, counted
 *   log.c      libfabric's log, sorted and counted
 *   _native.c  the Python face
 *
 * Nothing here creates a context, initialises CUDA or loads a CUDA library. */
#ifndef CTXFIX_NATIVE_H
#define CTXFIX_NATIVE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__linux__) && defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))
#define CX_SUPPORTED 1
#else
#define CX_SUPPORTED 0
#endif

#define CX_MAX_DEVICES 64 /* ordinals counted one by one; all others, and none, share the last row */

typedef atomic_ulong cx_count;

/* Off: every hook is a plain call of what it replaced. Set after undo, and in a fork's child until it arms. */
extern atomic_bool cx_off;

/* ---- driver.c ------------------------------------------------------------------------------------------ */

typedef uint64_t cx_ptr; /* CUdeviceptr */

/* Numbers of the CUDA driver API (cuda.h); stable across its releases. */
enum {
	CX_OK = 0,
	CX_ERROR_INVALID_VALUE = 1,
	CX_ERROR_INVALID_CONTEXT = 201,
	CX_ERROR_NOT_READY = 600,
	CX_ERROR_CONTEXT_IS_DESTROYED = 709,
	CX_ERROR_UNKNOWN = 999,
	CX_ATTRIBUTE_CONTEXT = 1,
	CX_ATTRIBUTE_MEMORY_TYPE = 2,
	CX_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CX_MEMORY_DEVICE = 2,
	CX_STREAM_NON_BLOCKING = 1,
};

struct cx_driver {
	int (*ctx_get)(void **);
	int (*ctx_set)(void *);
	int (*ctx_push)(void *);
	int (*ctx_pop)(void **);
	int (*ctx_device)(int *);
	int (*pointer_attribute)(void *, int, cx_ptr);
	/* The rest may be missing (NULL) in a driver too old, or in a stand-in. */
	int (*pointer_attributes)(unsigned, const int *, void **, cx_ptr);
	int (*ctx_id)(void *, unsigned long long *);
	int (*device_count)(int *);
	int (*primary_state)(int, unsigned *, int *);
	int (*primary_retain)(void **, int);
	int (*primary_release)(int);
	int (*range)(cx_ptr *, size_t *, cx_ptr);
	int (*copy_async)(cx_ptr, cx_ptr, size_t, void *);
	int (*stream_create)(void **, unsigned);
	int (*stream_destroy)(void *);
	int (*stream_sync)(void *);
	int (*stream_query)(void *);
	int (*event_create)(void **, unsigned);
	int (*event_destroy)(void *);
	int (*event_record)(void *, void *);
	int (*event_sync)(void *);
	int (*event_query)(void *);
};

/* The driver's functions, or NULL while no libcuda.so.1 is in the process. */
const struct cx_driver *cx_driver(void);
void cx_driver_forked(void);

/* The context that owns the memory at p: the recorded one; for memory without one (VMM, pools) the primary
 * context of its device if that is active; else NULL, which is also the answer for plain host memory. */
void *cx_owner(const struct cx_driver *d, cx_ptr p);

/* What p is, and its owner as above if it is device memory; one call of the driver's where it can. */
enum cx_memory { CX_HOST, CX_DEVICE, CX_UNTOLD };
enum cx_memory cx_look(const struct cx_driver *d, cx_ptr p, void **owner);

/* The primary context of the only device that has an active one, else NULL. */
void *cx_only_primary(const struct cx_driver *d);

/* An identity that a context made later at the same address does not share (0 where the driver cannot say). */
unsigned long long cx_context_id(const struct cx_driver *d, void *context);

/* The driver makes a destroyed context current without an error, and the process dies of it when the thread ends
 * (measured, driver 580); but a destroyed one has no id. */
bool cx_alive(const struct cx_driver *d, void *context);
/* Known to be destroyed: not the same as not known to be alive. */
bool cx_dead(const struct cx_driver *d, void *context);

struct cx_entry {
	void *pushed; /* the context that was pushed, NULL if none */
	int device; /* ordinal of the context now current, CX_MAX_DEVICES if none */
};

/* Make context current for one call (NULL, destroyed: leave the thread as it is), and give back what was there. */
struct cx_entry cx_enter(const struct cx_driver *d, void *context);
void cx_leave(const struct cx_driver *d, struct cx_entry entry);

/* ---- slots.c ------------------------------------------------------------------------------------------- */

/* Which objects a rule looks at. */
enum cx_where {
	CX_ANYWHERE,   /* every loaded object but the C library, the loader, NVIDIA's libraries, and us */
	CX_ELSEWHERE,  /* the same, without libfabric */
	CX_FABRIC,     /* file names that contain "libfabric" */
	CX_LATE,       /* file names that contain one of cx_set_late's words */
	CX_PLUGIN,     /* NIXL's libfabric plugin */
};

struct cx_rule {
	const char *symbol;
	enum cx_where where;
	/* The hook to put in a slot that now calls `current`; NULL leaves the slot alone. */
	void *(*hook_for)(struct cx_rule *, void *current);
	/* The call that the given hook stands for, or NULL if the value is no hook of this rule. */
	void *(*original_of)(struct cx_rule *, void *value);
	_Atomic(void *) original; /* what unresolved slots would have been bound to */
	void *hook;
};

/* Rules with one hook and one original: the commonest kind. */
void *cx_one_hook(struct cx_rule *, void *current);
void *cx_one_original(struct cx_rule *, void *value);

struct cx_slot_counts {
	cx_count scans, objects, patched, foreign, write_failures, protect_failures, restored, left;
	atomic_int last_errno;
};
extern struct cx_slot_counts cx_slot_counts;
extern atomic_int cx_fault_mprotect, cx_fault_malloc;

void cx_rules_add(struct cx_rule *rules, size_t n);
int cx_set_late(const char *const *words, size_t n);
/* Hook all objects that were loaded since the last call; next to nothing if there are none. */
void cx_scan(void);
/* Put back every slot that still holds a hook of ours. */
void cx_undo(void);
void cx_lock(void);
void cx_unlock(void);

/* ---- threads.c ----------------------------------------------------------------------------------------- */

struct cx_armed {
	bool on;
	void *context;
	unsigned group;
};

struct cx_thread_counts {
	cx_count created, bound, pending, late, failed, plain, held;
};
extern struct cx_thread_counts cx_thread_counts;

void cx_threads_init(void);
struct cx_armed cx_arm(struct cx_armed now);
struct cx_armed cx_armed_now(void);
unsigned cx_new_group(void);                            /* 0 when out of memory */
int cx_bind_group(unsigned group, void *context);       /* -1: no such group */
int cx_group_info(unsigned group, void **context, unsigned long *threads, unsigned long *bound, unsigned long *failed);
void *cx_thread_context(void);                          /* context of the calling thread's group, or NULL */
bool cx_hold(bool on);
void cx_threads_forked(void);

/* ---- fabric.c ------------------------------------------------------------------------------------------ */

enum cx_kind {
	CX_RANGE, CX_GET_HANDLE, CX_OPEN_HANDLE, CX_CLOSE_HANDLE,
	CX_COPY_DTOD, CX_COPY_HTOD, CX_COPY_DTOH, CX_COPY_OTHER, CX_COPY_ASYNC,
	CX_DMABUF, CX_SET_ATTRIBUTE, CX_RUNTIME, CX_KINDS
};
extern const char *const cx_kind_names[CX_KINDS];

struct cx_call_counts {
	cx_count calls, failures, bytes, rebinds;
};
extern struct cx_call_counts cx_calls[CX_MAX_DEVICES + 1][CX_KINDS];

struct cx_fabric_counts {
	cx_count answered, adopted, conflicts, unknown_async, translated, untranslated, own_stream, off_stream;
};
extern struct cx_fabric_counts cx_fabric_counts;
extern atomic_int cx_copy_mode;
/* ---- log.c --------------------------------------------------------------------------------------------- */

enum { CX_LOG_KINDS = 8, CX_LOG_LINES = 8, CX_LOG_LENGTH = 320 };
struct cx_log_kind { unsigned long count; char lines[CX_LOG_LINES][CX_LOG_LENGTH]; };
const char *cx_log_name(int kind);
void cx_log_read(int kind, struct cx_log_kind *out);
int cx_log_import(const char *path);
void cx_log_forked(void);

extern atomic_bool cx_observe; /* count libfabric's calls, and change nothing about them */

void cx_fabric_init(void);
void cx_fabric_forked(void);
void cx_fabric_adopt(void);                             /* after a scan met a libfabric that was in use already */
void cx_set_home(void *context);

#endif
