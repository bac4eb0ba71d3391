/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver, if the process has loaded it, and contexts made current for one call. */
#define _GNU_SOURCE
#include "native.h"

#if CX_SUPPORTED
#include <dlfcn.h>
#include <pthread.h>

static struct cx_driver table;
static pthread_mutex_t filling = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(const struct cx_driver *) ready;

const struct cx_driver *cx_driver(void)
{
	const struct cx_driver *d = atomic_load_explicit(&ready, memory_order_acquire);
	if (d)
		return d;
	/* NOLOAD: a process without CUDA stays one. The reference is kept, so the functions stay valid. */
	void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	if (!lib)
		return NULL;
	static const struct { const char *name; size_t at; } names[] = {
#define CALL(field, symbol) { symbol, offsetof(struct cx_driver, field) }
		CALL(ctx_get, "cuCtxGetCurrent"), CALL(ctx_set, "cuCtxSetCurrent"),
		CALL(ctx_push, "cuCtxPushCurrent_v2"), CALL(ctx_pop, "cuCtxPopCurrent_v2"),
		CALL(ctx_device, "cuCtxGetDevice"), CALL(pointer_attribute, "cuPointerGetAttribute"),
		CALL(pointer_attributes, "cuPointerGetAttributes"), CALL(ctx_id, "cuCtxGetId"), CALL(device_count, "cuDeviceGetCount"),
		CALL(primary_state, "cuDevicePrimaryCtxGetState"), CALL(primary_retain, "cuDevicePrimaryCtxRetain"),
		CALL(primary_release, "cuDevicePrimaryCtxRelease_v2"), CALL(range, "cuMemGetAddressRange_v2"),
		CALL(copy_async, "cuMemcpyDtoDAsync_v2"), CALL(stream_create, "cuStreamCreate"),
		CALL(stream_destroy, "cuStreamDestroy_v2"), CALL(stream_sync, "cuStreamSynchronize"),
		CALL(stream_query, "cuStreamQuery"), CALL(event_create, "cuEventCreate"),
		CALL(event_destroy, "cuEventDestroy_v2"), CALL(event_record, "cuEventRecord"),
		CALL(event_sync, "cuEventSynchronize"), CALL(event_query, "cuEventQuery"),
#undef CALL
	};
	void *found[sizeof names / sizeof *names];
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		found[i] = dlsym(lib, names[i].name); /* outside the lock: it takes the loader's */
	pthread_mutex_lock(&filling);
	d = atomic_load_explicit(&ready, memory_order_relaxed);
	if (!d) {
		for (size_t i = 0; i < sizeof names / sizeof *names; i++)
			*(void **)((char *)&table + names[i].at) = found[i];
		if (table.ctx_get && table.ctx_set && table.ctx_push && table.ctx_pop && table.ctx_device &&
		    table.pointer_attribute) {
			d = &table;
			atomic_store_explicit(&ready, d, memory_order_release);
		}
	}
	pthread_mutex_unlock(&filling);
	return d;
}

void cx_driver_forked(void) { pthread_mutex_init(&filling, NULL); }

static void *active_primary(const struct cx_driver *d, int device)
{
	unsigned flags;
	int active = 0;
	void *context = NULL;
	if (!d->primary_state || !d->primary_retain || !d->primary_release)
		return NULL;
	/* Retaining an inactive one would create it: ask first. The count goes back at once, since whoever made it
	 * active holds it. */
	if (d->primary_state(device, &flags, &active) != CX_OK || !active)
		return NULL;
	if (d->primary_retain(&context, device) != CX_OK)
		return NULL;
	d->primary_release(device);
	return context;
}

void *cx_owner(const struct cx_driver *d, cx_ptr p)
{
	void *context = NULL;
	int device = -1;
	if (d->pointer_attribute(&context, CX_ATTRIBUTE_CONTEXT, p) != CX_OK)
		return NULL;
	if (context)
		return context;
	if (d->pointer_attribute(&device, CX_ATTRIBUTE_DEVICE_ORDINAL, p) != CX_OK || device < 0)
		return NULL;
	return active_primary(d, device);
}

enum cx_memory cx_look(const struct cx_driver *d, cx_ptr p, void **owner)
{
	static const int attributes[] = { CX_ATTRIBUTE_CONTEXT, CX_ATTRIBUTE_MEMORY_TYPE };
	unsigned type = 0;
	void *context = NULL, *answers[] = { &context, &type };
	int r;
	*owner = NULL;
	if (d->pointer_attributes) {
		/* Says success and zeros for memory that it does not know. */
		if (d->pointer_attributes(2, attributes, answers, p) != CX_OK)
			return CX_UNTOLD;
	} else if ((r = d->pointer_attribute(&type, CX_ATTRIBUTE_MEMORY_TYPE, p)) != CX_OK) {
		return r == CX_ERROR_INVALID_VALUE ? CX_HOST : CX_UNTOLD;
	}
	if (type != CX_MEMORY_DEVICE)
		return CX_HOST;
	*owner = context ? context : cx_owner(d, p);
	return CX_DEVICE;
}

void *cx_only_primary(const struct cx_driver *d)
{
	int n = 0, found = -1;
	if (!d->device_count || !d->primary_state || d->device_count(&n) != CX_OK)
		return NULL;
	for (int i = 0; i < n; i++) {
		unsigned flags;
		int active = 0;
		if (d->primary_state(i, &flags, &active) != CX_OK || !active)
			continue;
		if (found >= 0)
			return NULL;
		found = i;
	}
	return found < 0 ? NULL : active_primary(d, found);
}

unsigned long long cx_context_id(const struct cx_driver *d, void *context)
{
	unsigned long long id = 0;
	if (!d->ctx_id || d->ctx_id(context, &id) != CX_OK)
		return 0;
	return id;
}

atomic_bool cx_observe;
bool cx_alive(const struct cx_driver *d, void *context) { return !d->ctx_id || cx_context_id(d, context) != 0; }

bool cx_dead(const struct cx_driver *d, void *context)
{
	unsigned long long id;
	int r = d->ctx_id ? d->ctx_id(context, &id) : CX_OK;
	return r == CX_ERROR_CONTEXT_IS_DESTROYED || r == CX_ERROR_INVALID_CONTEXT;
}

struct cx_entry cx_enter(const struct cx_driver *d, void *context)
{
	struct cx_entry entry = { NULL, CX_MAX_DEVICES };
	/* What device this thread's last context was of, for the counters: it is nearly always the same one. */
	static __thread struct { void *context; int device; } last;
	void *current = NULL;
	int device = -1;
	d->ctx_get(&current);
	bool observing = atomic_load_explicit(&cx_observe, memory_order_relaxed);
	if (context && current != context && !observing && cx_alive(d, context)) {
		if (d->ctx_push(context) == CX_OK)
			entry.pushed = current = context;
	}
	if (current && current == last.context) {
		entry.device = last.device;
	} else if (current && d->ctx_device(&device) == CX_OK && device >= 0 && device < CX_MAX_DEVICES) {
		entry.device = last.device = device;
		last.context = current;
	}
	return entry;
}

void cx_leave(const struct cx_driver *d, struct cx_entry entry)
{
	void *popped, *current = NULL;
	if (!entry.pushed || d->ctx_pop(&popped) == CX_OK)
		return;
	/* Any call may tell of an earlier failure, and have done its work or not. */
	if (d->ctx_get(&current) == CX_OK && current == entry.pushed)
		d->ctx_pop(&popped);
}
#endif
