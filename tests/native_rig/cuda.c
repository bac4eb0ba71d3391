/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA driver and runtime in a few lines, for tests of ctxfix.native: contexts per thread, memory with an owner, IPC
 * mappings, streams whose copies end when they are waited for. Built twice: as libcuda.so.1 and, with RUNTIME, as a
 * libcudart. Not thread-safe where the tests do not need it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t ptr;
typedef struct { char bytes[64]; } handle;

/* Failures on demand: `error` from the calls of `name` after the first `after`, `times` of them (0: all). */
int stub_failing(const char *name);
#define CAN_FAIL do { int error = stub_failing(__func__); if (error) return error; } while (0)

#ifndef RUNTIME
static struct { char name[64]; int error, after, times; } fault;
static atomic_int stub_calls;
int stub_fail(const char *name, int error, int after, int times)
{
	strncpy(fault.name, name, sizeof fault.name - 1);
	fault.error = error, fault.after = after, fault.times = times;
	return atomic_exchange(&stub_calls, 0);
}
int stub_failing(const char *name)
{
	if (strcmp(name, fault.name))
		return 0;
	int nth = atomic_fetch_add(&stub_calls, 1);
	return nth >= fault.after && (!fault.times || nth < fault.after + fault.times) ? fault.error : 0;
}

struct context { int device, destroyed, active; unsigned long long id; };
static struct context contexts[8];
static struct memory { ptr base; size_t size; struct context *owner; int fd, mapping; } memories[256];
static int nmemories;
static __thread struct context *stack[16];
static __thread int depth;
static struct context *current(void) { return depth ? stack[depth - 1] : NULL; }

void *stub_context(int device)
{
	if (!contexts[device].active) {
		contexts[device].device = device;
		contexts[device].id = (unsigned)device + 1;
		contexts[device].active = 1;
	}
	return &contexts[device];
}
/* A true driver takes a destroyed context, and the process dies later. */
int stub_dead_uses;
void stub_destroy(int device) { contexts[device].destroyed = 1; contexts[device].active = 0; }
int stub_current(void) { return current() ? current()->device : -1; }
int stub_depth(void) { return depth; }

static ptr add(int fd, size_t size, struct context *owner, int mapping)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	memories[nmemories++] = (struct memory){ (ptr)p, size, owner, fd, mapping };
	return (ptr)p;
}
static struct memory *find(ptr p)
{
	for (int i = 0; i < nmemories; i++)
		if (p >= memories[i].base && p < memories[i].base + memories[i].size)
			return &memories[i];
	return NULL;
}
/* vmm: no recorded context, as memory of an expandable segment */
ptr stub_memory(int device, size_t size, int vmm)
{
	int fd = memfd_create("stub", 0);
	if (ftruncate(fd, (long)size))
		return 0;
	ptr p = add(fd, size, stub_context(device), 0);
	if (vmm)
		find(p)->mapping = -1 - device;
	return p;
}
int stub_device_of(ptr p) { return find(p) ? find(p)->owner->device : -1; }

void stub_bind(int device) { stack[0] = stub_context(device), depth = 1; }

int cuCtxGetCurrent(void **c) { CAN_FAIL; *c = current(); return 0; }
int cuCtxSetCurrent(void *c)
{ CAN_FAIL;
	if (c && ((struct context *)c)->destroyed)
		stub_dead_uses++;
	depth = c ? (depth ? depth : 1) : 0;
	if (c)
		stack[depth - 1] = c;
	return 0;
}
int cuCtxPushCurrent_v2(void *c)
{ CAN_FAIL;
	if (((struct context *)c)->destroyed)
		stub_dead_uses++;
	stack[depth++] = c;
	return 0;
}
int cuCtxPopCurrent_v2(void **c)
{ CAN_FAIL;
	if (!depth)
		return 201;
	*c = stack[--depth];
	return 0;
}
int cuCtxGetDevice(int *d)
{ CAN_FAIL;
	if (!current())
		return 201;
	*d = current()->device;
	return 0;
}
int cuCtxGetId(void *c, unsigned long long *id) { CAN_FAIL; *id = ((struct context *)c)->id; return ((struct context *)c)->destroyed ? 709 : 0; }
int cuDeviceGetCount(int *n) { CAN_FAIL; *n = 8; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { CAN_FAIL; *f = 0; *active = contexts[d].active; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { CAN_FAIL; *c = stub_context(d); return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { CAN_FAIL; (void)d; return 0; }
int cuCtxCreate_v2(void **c, unsigned flags, int device) { CAN_FAIL; (void)flags, (void)device; return cuCtxPushCurrent_v2(*c = stub_context(7)); }
int cuCtxDestroy_v2(void *c) { CAN_FAIL; return current() == c ? cuCtxPopCurrent_v2(&c) : 1; }
int cuPointerGetAttribute(void *out, int attribute, ptr p)
{ CAN_FAIL;
	struct memory *m = find(p);
	if (!m)
		return 1;
	if (attribute == 1)
		*(void **)out = m->mapping < 0 ? NULL : m->owner;
	else if (attribute == 2)
		*(unsigned *)out = 2;
	else if (attribute == 9)
		*(int *)out = m->owner->device;
	return 0;
}
/* Says success and zeros for memory that it does not know. */
int cuPointerGetAttributes(unsigned n, const int *attributes, void **data, ptr p)
{ CAN_FAIL;
	struct memory *m = find(p);
	for (unsigned i = 0; i < n; i++) {
		if (attributes[i] == 1)
			*(void **)data[i] = !m || m->mapping < 0 ? NULL : m->owner;
		else if (attributes[i] == 2)
			*(unsigned *)data[i] = m ? 2 : 0;
	}
	return 0;
}
int cuPointerSetAttribute(const void *value, int attribute, ptr p) { CAN_FAIL; (void)value, (void)attribute, (void)p; return current() ? 0 : 201; }
int cuMemGetAddressRange_v2(ptr *base, size_t *size, ptr p)
{ CAN_FAIL;
	struct memory *m = find(p);
	if (!current())
		return 201;
	if (!m || m->owner != current())
		return 500;
	*base = m->base;
	*size = m->size;
	return 0;
}
int stub_handle(handle *h, ptr p)
{
	struct memory *m = find(p);
	if (!m || m->owner != current())
		return 1;
	memset(h, 0, sizeof *h);
	memcpy(h, m, sizeof *m);
	return 0;
}
int stub_open(void **out, handle *h)
{
	struct memory m;
	memcpy(&m, h, sizeof m);
	*out = (void *)add(m.fd, m.size, current(), 1);
	return 0;
}
int stub_close(ptr p)
{
	struct memory *m = find(p);
	if (!m || m->mapping != 1 || m->owner != current())
		return 1;
	munmap((void *)m->base, m->size);
	*m = memories[--nmemories];
	return 0;
}

/* What cudaMemcpy has left unfinished on the default stream. */
static struct { void *to; const void *from; size_t n; } unfinished;
void stub_finish(void) { if (unfinished.n) memcpy(unfinished.to, unfinished.from, unfinished.n); unfinished.n = 0; }
void stub_later(void *to, const void *from, size_t n) { stub_finish(); unfinished.to = to, unfinished.from = from, unfinished.n = n; }

/* Streams: one copy deep, done when waited for; copies within a stream's own context only. */
struct stream { struct context *owner; void *to; const void *from; size_t n; };
struct event { struct context *owner; struct stream *stream; };
int stub_streams;
int cuStreamCreate(void **s, unsigned flags)
{ CAN_FAIL;
	struct stream *n;
	(void)flags;
	if (!current())
		return 201;
	n = calloc(1, sizeof *n);
	n->owner = current();
	stub_streams++;
	*s = n;
	return 0;
}
int cuStreamDestroy_v2(void *s) { CAN_FAIL; free(s); stub_streams--; return 0; }
int cuStreamSynchronize(void *v)
{ CAN_FAIL;
	struct stream *s = v;
	if (!s)
		stub_finish();
	else if (s->n)
		memcpy(s->to, s->from, s->n), s->n = 0;
	return 0;
}
int cuStreamQuery(void *s)
{ CAN_FAIL;
	static atomic_int asked;
	return ((struct stream *)s)->n && atomic_fetch_add(&asked, 1) % 3 < 2 ? 600 : cuStreamSynchronize(s);
}
int cuMemcpyDtoDAsync_v2(ptr to, ptr from, size_t n, void *v)
{ CAN_FAIL;
	struct stream *s = v;
	if (!s)
		return stub_later((void *)to, (const void *)from, n), 0;
	if (s->owner != current() || find(to)->owner != current() || find(from)->owner != current())
		return 400;
	cuStreamSynchronize(s);
	s->to = (void *)to, s->from = (const void *)from, s->n = n;
	return 0;
}
int cuEventCreate(void **e, unsigned flags)
{ CAN_FAIL;
	struct event *n;
	(void)flags;
	if (!current())
		return 201;
	n = calloc(1, sizeof *n);
	n->owner = current();
	*e = n;
	return 0;
}
int cuEventDestroy_v2(void *e) { CAN_FAIL; free(e); return 0; }
int cuEventRecord(void *v, void *s)
{ CAN_FAIL;
	struct event *e = v;
	if (e->owner != ((struct stream *)s)->owner)
		return 400;
	e->stream = s;
	return 0;
}
int cuEventQuery(void *v) { CAN_FAIL; return ((struct event *)v)->stream ? cuStreamQuery(((struct event *)v)->stream) : 0; }
int cuEventSynchronize(void *v) { CAN_FAIL; return ((struct event *)v)->stream ? cuStreamSynchronize(((struct event *)v)->stream) : 0; }
#else
int stub_current(void), stub_device_of(ptr), cuCtxSetCurrent(void *), cuMemcpyDtoDAsync_v2(ptr, ptr, size_t, void *);
int stub_handle(handle *, ptr), stub_open(void **, handle *), stub_close(ptr);
void *stub_context(int), stub_bind(int);
int stub_strays;

/* As the runtime does: a thread without a context gets device 0's. */
static void need(void)
{
	if (stub_current() < 0)
		stub_bind(0), stub_strays++;
}
int cudaSetDevice(int d) { CAN_FAIL; return cuCtxSetCurrent(stub_context(d)); }
int cudaIpcGetMemHandle(handle *h, void *p) { CAN_FAIL; need(); return stub_handle(h, (ptr)p); }
int cudaIpcOpenMemHandle(void **p, handle h, unsigned f) { CAN_FAIL; (void)f; need(); return stub_open(p, &h); }
int cudaIpcCloseMemHandle(void *p) { CAN_FAIL; need(); return stub_close((ptr)p); }
int cudaHostRegister(void *p, size_t n, unsigned f) { CAN_FAIL; (void)p, (void)n, (void)f; need(); return 0; }
int cudaDeviceSynchronize(void) { CAN_FAIL; need(); return 0; }
void stub_later(void *, const void *, size_t);
/* Between two device addresses: returns before the copy has ended. */
int cudaMemcpy(void *to, const void *from, size_t n, int kind)
{ CAN_FAIL;
	(void)kind;
	need();
	if (stub_device_of((ptr)to) < 0 || stub_device_of((ptr)from) < 0) {
		memcpy(to, from, n);
	} else {
		stub_later(to, from, n);
	}
	return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *s) { CAN_FAIL; (void)kind; need(); return cuMemcpyDtoDAsync_v2((ptr)to, (ptr)from, n, s); }
#endif
