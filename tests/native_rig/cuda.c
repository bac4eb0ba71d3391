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

#ifndef RUNTIME
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

int cuCtxGetCurrent(void **c) { *c = current(); return 0; }
int cuCtxSetCurrent(void *c)
{
	if (c && ((struct context *)c)->destroyed)
		stub_dead_uses++;
	depth = c ? (depth ? depth : 1) : 0;
	if (c)
		stack[depth - 1] = c;
	return 0;
}
int cuCtxPushCurrent_v2(void *c)
{
	if (((struct context *)c)->destroyed)
		stub_dead_uses++;
	stack[depth++] = c;
	return 0;
}
int cuCtxPopCurrent_v2(void **c)
{
	if (!depth)
		return 201;
	*c = stack[--depth];
	return 0;
}
int cuCtxGetDevice(int *d)
{
	if (!current())
		return 201;
	*d = current()->device;
	return 0;
}
int cuCtxGetId(void *c, unsigned long long *id) { *id = ((struct context *)c)->id; return ((struct context *)c)->destroyed ? 709 : 0; }
int cuDeviceGetCount(int *n) { *n = 8; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *active) { *f = 0; *active = contexts[d].active; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = stub_context(d); return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; return 0; }
int cuCtxCreate_v2(void **c, unsigned flags, int device) { (void)flags, (void)device; return cuCtxPushCurrent_v2(*c = stub_context(7)); }
int cuCtxDestroy_v2(void *c) { return current() == c ? cuCtxPopCurrent_v2(&c) : 1; }
int cuPointerGetAttribute(void *out, int attribute, ptr p)
{
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
int cuPointerSetAttribute(const void *value, int attribute, ptr p) { (void)value, (void)attribute, (void)p; return current() ? 0 : 201; }
int cuMemGetAddressRange_v2(ptr *base, size_t *size, ptr p)
{
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

/* Streams: one copy deep, done when waited for; copies within a stream's own context only. */
struct stream { struct context *owner; void *to; const void *from; size_t n; };
struct event { struct context *owner; struct stream *stream; };
int stub_streams;
int cuStreamCreate(void **s, unsigned flags)
{
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
int cuStreamDestroy_v2(void *s) { free(s); stub_streams--; return 0; }
int cuStreamSynchronize(void *v)
{
	struct stream *s = v;
	if (s && s->n)
		memcpy(s->to, s->from, s->n), s->n = 0;
	return 0;
}
int cuStreamQuery(void *s)
{
	static atomic_int asked;
	return ((struct stream *)s)->n && atomic_fetch_add(&asked, 1) % 3 < 2 ? 600 : cuStreamSynchronize(s);
}
int cuMemcpyDtoDAsync_v2(ptr to, ptr from, size_t n, void *v)
{
	struct stream *s = v;
	if (s->owner != current() || find(to)->owner != current() || find(from)->owner != current())
		return 400;
	cuStreamSynchronize(s);
	s->to = (void *)to, s->from = (const void *)from, s->n = n;
	return 0;
}
int cuEventCreate(void **e, unsigned flags)
{
	struct event *n;
	(void)flags;
	if (!current())
		return 201;
	n = calloc(1, sizeof *n);
	n->owner = current();
	*e = n;
	return 0;
}
int cuEventDestroy_v2(void *e) { free(e); return 0; }
int cuEventRecord(void *v, void *s)
{
	struct event *e = v;
	if (e->owner != ((struct stream *)s)->owner)
		return 400;
	e->stream = s;
	return 0;
}
int cuEventQuery(void *v) { return ((struct event *)v)->stream ? cuStreamQuery(((struct event *)v)->stream) : 0; }
int cuEventSynchronize(void *v) { return ((struct event *)v)->stream ? cuStreamSynchronize(((struct event *)v)->stream) : 0; }
#else
int cuCtxGetCurrent(void **), cuCtxSetCurrent(void *), cuPointerGetAttribute(void *, int, ptr), cuMemcpyDtoDAsync_v2(ptr, ptr, size_t, void *);
int stub_handle(handle *, ptr), stub_open(void **, handle *), stub_close(ptr);
void *stub_context(int);
int stub_strays;

/* As the runtime does: a thread without a context gets device 0's. */
static void need(void)
{
	void *c = NULL;
	cuCtxGetCurrent(&c);
	if (!c)
		cuCtxSetCurrent(stub_context(0)), stub_strays++;
}
int cudaSetDevice(int d) { return cuCtxSetCurrent(stub_context(d)); }
int cudaIpcGetMemHandle(handle *h, void *p) { need(); return stub_handle(h, (ptr)p); }
int cudaIpcOpenMemHandle(void **p, handle h, unsigned f) { (void)f; need(); return stub_open(p, &h); }
int cudaIpcCloseMemHandle(void *p) { need(); return stub_close((ptr)p); }
int cudaHostRegister(void *p, size_t n, unsigned f) { (void)p, (void)n, (void)f; need(); return 0; }
int cudaDeviceSynchronize(void) { need(); return 0; }
static struct { void *to; const void *from; size_t n; } unfinished;
void stub_finish(void) { if (unfinished.n) memcpy(unfinished.to, unfinished.from, unfinished.n); unfinished.n = 0; }
/* Between two device addresses: returns before the copy has ended. */
int cudaMemcpy(void *to, const void *from, size_t n, int kind)
{
	unsigned t;
	(void)kind;
	need();
	if (cuPointerGetAttribute(&t, 2, (ptr)to) || cuPointerGetAttribute(&t, 2, (ptr)from)) {
		memcpy(to, from, n);
	} else {
		stub_finish();
		unfinished.to = to, unfinished.from = from, unfinished.n = n;
	}
	return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *s) { (void)kind; need(); return cuMemcpyDtoDAsync_v2((ptr)to, (ptr)from, n, s); }
#endif
