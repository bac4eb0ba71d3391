/* SPDX-License-Identifier: Apache-2.0 */
/* libfabric's own CUDA calls: each made in the context of the memory it touches, on whatever thread, and counted.
 *
 * libfabric (read at 2.4.0, 2.6.0 and 2.7's development head, src/hmem_cuda.c) finds its calls by dlsym the first time it is
 * used, or links them. Both are import slots: the first is answered here, the second replaced (slots.c). A libfabric that
 * was in use before we came keeps the addresses it found in a table of its own; there the same words are exchanged.
 *
 * IPC. A receiver opens a sender's handle once and keeps it in a cache keyed by (peer, sender's address range, handle
 * bytes), one cache a domain. The receiver's own device is no part of the key: a peer that writes to two GPUs of this
 * process gets the mapping made for the first one for both. So each mapping is remembered with its handle, and where the
 * local end of a copy belongs to another context the handle is opened there as well (CUDA allows one opening per context
 * and device) and the copy goes through that one. If that opening is refused (no peer access), the first mapping is used:
 * the driver copies between any two contexts of a process, only slower; counted as `untranslated`.
 *
 * Copies. Up to 2.6.0 the receiver calls cudaMemcpy, which returns before a device-to-device copy has ended, and then
 * tells both sides at once, the sender by a word in shared memory. There is no place of libfabric's between the two,
 * and the sender is another process: the copy has to be whole before this call returns (copy mode 1 and 2).
 * The development head copies asynchronously, each copy on one of 128 streams made in the context that happened to be
 * current, and asks events. Its streams and events are answered by stand-ins here, which find a true stream and event in
 * each context as it is needed. */
#define _GNU_SOURCE
#include "native.h"

#if CX_SUPPORTED
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

const char *const cx_kind_names[CX_KINDS] = {
	"range", "get_handle", "open_handle", "close_handle", "copy_dtod", "copy_htod", "copy_dtoh", "copy_other",
	"copy_async", "dmabuf", "set_attribute", "runtime",
};

struct cx_call_counts cx_calls[CX_MAX_DEVICES + 1][CX_KINDS];
struct cx_fabric_counts cx_fabric_counts;
atomic_int cx_copy_mode = 1;

static _Atomic(void *) home; /* context of the memory this process registered last */
static __thread void *copied_in; /* context of this thread's last cudaMemcpy, for the synchronisation after it */

void cx_set_home(void *context) { atomic_store(&home, context); }

static void count(struct cx_entry e, enum cx_kind kind, int result, size_t bytes)
{
	struct cx_call_counts *c = &cx_calls[e.device][kind];
	atomic_fetch_add_explicit(&c->calls, 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&c->bytes, bytes, memory_order_relaxed);
	if (result)
		atomic_fetch_add_explicit(&c->failures, 1, memory_order_relaxed);
	if (e.pushed)
		atomic_fetch_add_explicit(&c->rebinds, 1, memory_order_relaxed);
}

/* Where to work when no memory says it: the thread's group, the process's home, the only active primary context. */
static void *somewhere(const struct cx_driver *d)
{
	void *context = cx_thread_context();
	if (!context || !cx_alive(d, context))
		context = atomic_load(&home);
	return context && cx_alive(d, context) ? context : cx_only_primary(d);
}

static void *somewhere_if_bare(const struct cx_driver *d)
{
	void *current = NULL;
	return d->ctx_get(&current) == CX_OK && !current ? somewhere(d) : NULL;
}

/* ---- what libfabric asks for ------------------------------------------------------------------------------ */

enum call {
	RANGE, RANGE_V2, GET_HANDLE, OPEN_HANDLE, CLOSE_HANDLE, MEMCPY, MEMCPY_ASYNC, DTOD_ASYNC, DTOD_ASYNC_V2, DMABUF,
	SET_ATTRIBUTE, HOST_REGISTER, HOST_UNREGISTER, HOST_ALLOC, HOST_FREE, MALLOC, FREE, DEVICE_SYNC, STREAM_CREATE,
	STREAM_DESTROY, STREAM_DESTROY_V2, STREAM_SYNC, EVENT_CREATE, EVENT_DESTROY, EVENT_DESTROY_V2, EVENT_RECORD,
	EVENT_SYNC, EVENT_QUERY, CTX_CREATE, CTX_DESTROY, CALLS
};
static struct cx_rule rules[CALLS + 1]; /* the last is dlsym */

/* The call that libfabric would have made. */
static void *real(enum call which)
{
	void *f = atomic_load_explicit(&rules[which].original, memory_order_acquire);
	return f ? f : dlsym(RTLD_DEFAULT, rules[which].symbol);
}
#define REAL(which, type) type *call = (type *)real(which); if (!call) return CX_ERROR_UNKNOWN

static const struct cx_driver *active(void) { return atomic_load(&cx_off) ? NULL : cx_driver(); }

/* The body of a hook that only makes the call, with the last arguments, in `context`, and counts it as `kind`. */
#define WITHIN(which, type, kind, context, ...)                                                                        \
	REAL(which, type);                                                                                             \
	const struct cx_driver *d = active();                                                                          \
	if (!d)                                                                                                        \
		return call(__VA_ARGS__);                                                                              \
	struct cx_entry e = cx_enter(d, context);                                                                      \
	int r = call(__VA_ARGS__);                                                                                     \
	count(e, kind, r, 0);                                                                                          \
	cx_leave(d, e);                                                                                                \
	return r

/* ---- addresses and handles -------------------------------------------------------------------------------- */

typedef int range_call(cx_ptr *, size_t *, cx_ptr);
static int range(enum call which, cx_ptr *base, size_t *size, cx_ptr p)
{
	WITHIN(which, range_call, CX_RANGE, cx_owner(d, p), base, size, p);
}
static int my_range(cx_ptr *b, size_t *s, cx_ptr p) { return range(RANGE, b, s, p); }
static int my_range_v2(cx_ptr *b, size_t *s, cx_ptr p) { return range(RANGE_V2, b, s, p); }

typedef struct { char bytes[64]; } handle; /* cudaIpcMemHandle_t, passed by value */

typedef int get_handle_call(handle *, void *);
static int my_get_handle(handle *h, void *p) { WITHIN(GET_HANDLE, get_handle_call, CX_GET_HANDLE, cx_owner(d, (cx_ptr)p), h, p); }

struct twin { struct twin *next; void *context, *base; }; /* base NULL: the opening was refused */
struct mapping {
	struct mapping *next;
	void *context, *base; /* as given to libfabric */
	size_t size;
	handle h;
	unsigned flags;
	struct twin *twins; /* the same memory, opened in other contexts of ours */
};
static struct mapping *mappings;
static pthread_mutex_t mappings_lock = PTHREAD_MUTEX_INITIALIZER;

typedef int open_handle_call(void **, handle, unsigned);
static int my_open_handle(void **out, handle h, unsigned flags)
{
	REAL(OPEN_HANDLE, open_handle_call);
	const struct cx_driver *d = active();
	if (!d)
		return call(out, h, flags);
	struct cx_entry e = cx_enter(d, somewhere(d));
	int r = call(out, h, flags);
	if (!r) {
		struct mapping *m = calloc(1, sizeof *m);
		cx_ptr base;
		if (m) {
			m->base = *out;
			m->h = h;
			m->flags = flags;
			d->ctx_get(&m->context);
			if (!d->range || d->range(&base, &m->size, (cx_ptr)*out))
				m->size = 0;
			pthread_mutex_lock(&mappings_lock);
			m->next = mappings;
			mappings = m;
			pthread_mutex_unlock(&mappings_lock);
		}
	}
	count(e, CX_OPEN_HANDLE, r, 0);
	cx_leave(d, e);
	return r;
}

typedef int close_handle_call(void *);
static int my_close_handle(void *base)
{
	REAL(CLOSE_HANDLE, close_handle_call);
	struct mapping **link, *m;
	/* Also while we are off: later there may be other memory at its address. */
	pthread_mutex_lock(&mappings_lock);
	for (link = &mappings; (m = *link) && m->base != base; link = &m->next)
		;
	if (m)
		*link = m->next;
	pthread_mutex_unlock(&mappings_lock);
	const struct cx_driver *d = m ? cx_driver() : active();
	if (!d)
		return call(base);
	for (struct twin *t = m ? m->twins : NULL, *next; t; t = next) {
		next = t->next;
		if (t->base) {
			struct cx_entry e = cx_enter(d, t->context);
			count(e, CX_CLOSE_HANDLE, call(t->base), 0);
			cx_leave(d, e);
		}
		free(t);
	}
	struct cx_entry e = cx_enter(d, m ? m->context : cx_owner(d, (cx_ptr)base));
	int r = call(base);
	count(e, CX_CLOSE_HANDLE, r, 0);
	cx_leave(d, e);
	free(m);
	return r;
}

/* The address by which `context` may reach mapped memory at p; p itself if it is no mapping of ours. */
static void *translated(const struct cx_driver *d, void *p, void *context)
{
	open_handle_call *open = (open_handle_call *)real(OPEN_HANDLE);
	pthread_mutex_lock(&mappings_lock);
	struct mapping *m = mappings;
	while (m && !((char *)p >= (char *)m->base && (char *)p < (char *)m->base + (m->size ? m->size : 1)))
		m = m->next;
	if (m && m->context != context && open) {
		struct twin *t = m->twins;
		while (t && t->context != context)
			t = t->next;
		if (!t && (t = calloc(1, sizeof *t))) {
			struct cx_entry e = cx_enter(d, context);
			int r = open(&t->base, m->h, m->flags);
			if (r)
				t->base = NULL;
			count(e, CX_OPEN_HANDLE, r, 0);
			cx_leave(d, e);
			t->context = context;
			t->next = m->twins;
			m->twins = t;
		}
		if (t && t->base) {
			p = (char *)t->base + ((char *)p - (char *)m->base);
			atomic_fetch_add(&cx_fabric_counts.translated, 1);
		} else {
			atomic_fetch_add(&cx_fabric_counts.untranslated, 1);
		}
	}
	pthread_mutex_unlock(&mappings_lock);
	return p;
}

/* The context that mapped memory at p was opened in for libfabric; NULL if p is no mapping of ours. */
static void *mapped_in(const void *p)
{
	void *context = NULL;
	pthread_mutex_lock(&mappings_lock);
	for (struct mapping **link = &mappings, *m; (m = *link); link = &m->next)
		if ((const char *)p >= (char *)m->base && (const char *)p < (char *)m->base + (m->size ? m->size : 1)) {
			*link = m->next; /* to the front: the next descriptor is likely in the same one */
			m->next = mappings;
			mappings = m;
			context = m->context;
			break;
		}
	pthread_mutex_unlock(&mappings_lock);
	return context;
}

/* ---- copies ----------------------------------------------------------------------------------------------- */

/* Streams of our own for whole copies: borrowed for one copy, never two copies at once in one. */
struct stream { void *context, *stream; unsigned long long id; bool busy; };
static struct stream streams[128];
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

static struct stream *borrow(const struct cx_driver *d, void *context)
{
	unsigned long long id = cx_context_id(d, context);
	struct stream *s = NULL, *empty = NULL;
	pthread_mutex_lock(&streams_lock);
	for (size_t i = 0; i < sizeof streams / sizeof *streams && !s; i++) {
		if (!streams[i].stream)
			empty = empty ? empty : &streams[i];
		else if (!streams[i].busy && streams[i].context == context && streams[i].id == id)
			s = &streams[i];
	}
	if (!s && empty && d->stream_create(&empty->stream, CX_STREAM_NON_BLOCKING) == CX_OK) {
		s = empty;
		s->context = context;
		s->id = id;
	}
	if (s)
		s->busy = true;
	pthread_mutex_unlock(&streams_lock);
	return s;
}

static void give_back(struct stream *s, bool broken)
{
	pthread_mutex_lock(&streams_lock);
	s->busy = false;
	if (broken)
		s->stream = NULL;
	pthread_mutex_unlock(&streams_lock);
}

static int whole_mode(void) { return atomic_load(&cx_observe) ? 0 : atomic_load(&cx_copy_mode); }

/* A device-to-device copy that has ended when this returns. False: nothing was started, do it another way. */
static bool whole_copy(const struct cx_driver *d, void *context, void *to, const void *from, size_t n, int *result)
{
	struct stream *s;
	int mode = whole_mode();
	if (!mode || !context || !d->copy_async || !d->stream_create || !d->stream_sync || !(s = borrow(d, context)))
		return false;
	bool started = d->copy_async((cx_ptr)to, (cx_ptr)from, n, s->stream) == CX_OK;
	if (started) {
		if (mode == 2 && d->stream_query) {
			while ((*result = d->stream_query(s->stream)) == CX_ERROR_NOT_READY)
				;
		} else {
			*result = d->stream_sync(s->stream);
		}
		atomic_fetch_add(&cx_fabric_counts.own_stream, 1);
	}
	give_back(s, !started || *result);
	return started;
}

struct copy { void *to; const void *from; void *context; enum cx_kind kind; bool untold; };

/* Whose memory is local, in which context to copy, and by which addresses. */
static struct copy plan(const struct cx_driver *d, void *to, const void *from)
{
	struct copy c = { to, from, NULL, CX_COPY_OTHER, false };
	enum cx_memory what;
	bool change = !atomic_load(&cx_observe);
	void *of_to = NULL, *of_from = mapped_in(from); /* a peer's memory, as in every RMA write by IPC */
	bool device_from = of_from != NULL;
	bool device_to = !device_from && (of_to = mapped_in(to)) != NULL; /* an RMA read */
	bool peer_from = device_from, peer_to = device_to;
	if (!device_to) {
		what = cx_look(d, (cx_ptr)to, &of_to);
		device_to = what == CX_DEVICE;
		c.untold |= what == CX_UNTOLD;
	}
	if (!device_from) {
		what = cx_look(d, (cx_ptr)from, &of_from);
		device_from = what == CX_DEVICE;
		c.untold |= what == CX_UNTOLD;
	}
	if (device_to && device_from) {
		c.kind = CX_COPY_DTOD;
		c.context = peer_to ? of_from : of_to;
		if (change && peer_from && of_to && of_from != of_to)
			c.from = translated(d, (void *)from, of_to);
		if (change && peer_to && of_from && of_from != of_to)
			c.to = translated(d, to, of_from);
	} else if (device_to) {
		c.kind = CX_COPY_HTOD;
		c.context = of_to;
	} else if (device_from) {
		c.kind = CX_COPY_DTOH;
		c.context = of_from;
	}
	return c;
}

typedef int memcpy_call(void *, const void *, size_t, int);
static int my_memcpy(void *to, const void *from, size_t n, int direction)
{
	REAL(MEMCPY, memcpy_call);
	const struct cx_driver *d = active();
	if (!d)
		return call(to, from, n, direction);
	struct copy c = plan(d, to, from);
	if (!c.context)
		c.context = somewhere_if_bare(d);
	struct cx_entry e = cx_enter(d, c.context);
	int r = 0;
	if (c.kind != CX_COPY_DTOD || !whole_copy(d, c.context, c.to, c.from, n, &r)) {
		r = call(c.to, c.from, n, direction);
		/* No stream of our own, or nobody says what the addresses are: cudaMemcpy works on the default stream. */
		if (!r && (c.kind == CX_COPY_DTOD || c.untold) && whole_mode() && d->stream_sync)
			r = d->stream_sync(NULL);
	}
	copied_in = c.context;
	count(e, c.kind, r, n);
	cx_leave(d, e);
	return r;
}

/* ---- calls that only need some context ---------------------------------------------------------------------- */

/* On a thread with no context these would make GPU 0's. */
#define SOME(which, type, context, ...) WITHIN(which, type, CX_RUNTIME, context, __VA_ARGS__)

typedef int host_register_call(void *, size_t, unsigned);
static int my_host_register(void *p, size_t n, unsigned f) { SOME(HOST_REGISTER, host_register_call, somewhere_if_bare(d), p, n, f); }
typedef int pointer_call(void *);
static int my_host_unregister(void *p) { SOME(HOST_UNREGISTER, pointer_call, somewhere_if_bare(d), p); }
static int my_host_free(void *p) { SOME(HOST_FREE, pointer_call, somewhere_if_bare(d), p); }
static int my_free(void *p) { SOME(FREE, pointer_call, cx_owner(d, (cx_ptr)p), p); }
typedef int host_alloc_call(void **, size_t, unsigned);
static int my_host_alloc(void **p, size_t n, unsigned f) { SOME(HOST_ALLOC, host_alloc_call, somewhere_if_bare(d), p, n, f); }
typedef int malloc_call(void **, size_t);
static int my_malloc(void **p, size_t n) { SOME(MALLOC, malloc_call, somewhere_if_bare(d), p, n); }
typedef int nothing_call(void);
/* libfabric waits after a copy whose host end CUDA does not know: for the copy's context, then. */
static int my_device_sync(void) { SOME(DEVICE_SYNC, nothing_call, copied_in ? copied_in : somewhere_if_bare(d)); }

/* efa's provider looks once whether the NIC can reach GPU memory; since 2.5 in a context that it makes for that on GPU 0
 * (efa_hmem.c), half a GiB for a moment in every rank. Any context will do: one that is there is lent. */
static char lent;
typedef int ctx_create_call(void **, unsigned, int);
static int my_ctx_create(void **out, unsigned flags, int device)
{
	REAL(CTX_CREATE, ctx_create_call);
	const struct cx_driver *d = active();
	void *context = NULL;
	if (d && d->ctx_get(&context) == CX_OK && !context)
		context = somewhere(d);
	if (context && d->ctx_push(context) == CX_OK) {
		*out = &lent;
		return CX_OK;
	}
	return call(out, flags, device);
}
static int my_ctx_destroy(void *context)
{
	REAL(CTX_DESTROY, pointer_call);
	const struct cx_driver *d = cx_driver();
	if (context != &lent || !d)
		return call(context);
	struct cx_entry e = { NULL, CX_MAX_DEVICES };
	if (d->ctx_get(&e.pushed) != CX_OK)
		return d->ctx_pop(&context);
	cx_leave(d, e);
	return CX_OK;
}

typedef int dmabuf_call(void *, cx_ptr, size_t, int, unsigned long long);
static int my_dmabuf(void *out, cx_ptr p, size_t n, int type, unsigned long long flags)
{
	WITHIN(DMABUF, dmabuf_call, CX_DMABUF, cx_owner(d, p), out, p, n, type, flags);
}

typedef int set_attribute_call(const void *, int, cx_ptr);
static int my_set_attribute(const void *value, int attribute, cx_ptr p)
{
	WITHIN(SET_ATTRIBUTE, set_attribute_call, CX_SET_ATTRIBUTE, cx_owner(d, p), value, attribute, p);
}

/* ---- streams and events that are at home in every context -------------------------------------------------- */

enum { PER = 16, STANDINS = 512 };
struct true_one { void *context, *it; unsigned long long id; };
struct standin {
	pthread_mutex_t lock;
	bool used;
	unsigned flags;
	int n;
	struct true_one at[PER];
};
static struct standin stream_standins[STANDINS], event_standins[STANDINS];
static pthread_mutex_t standins_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool standins_refused; /* libfabric uses stream calls that we do not know */

static struct standin *new_standin(struct standin *all, unsigned flags)
{
	struct standin *s = NULL;
	pthread_mutex_lock(&standins_lock);
	for (int i = 0; i < STANDINS && !s; i++)
		if (!all[i].used)
			s = &all[i];
	if (s) {
		pthread_mutex_init(&s->lock, NULL);
		s->used = true;
		s->flags = flags;
		s->n = 0;
	}
	pthread_mutex_unlock(&standins_lock);
	return s;
}

static struct standin *standin_of(struct standin *all, void *p)
{
	return p >= (void *)all && p < (void *)(all + STANDINS) ? p : NULL;
}

/* True streams are few: the 128 that libfabric asks for cost 0.1 ms a transfer until all are made, and 66 MiB of the GPU
 * (measured, H200); eight hold as many copies in flight as there are engines for. Stand-ins share them, and they stay. */
enum { LANES = 8 };
static struct { void *context, *streams[LANES]; unsigned long long id; } lanes[PER];
static pthread_mutex_t lanes_lock = PTHREAD_MUTEX_INITIALIZER;

static void *lane(const struct cx_driver *d, void *context, unsigned long long id, size_t number, unsigned flags)
{
	void *stream = NULL;
	int at = -1;
	pthread_mutex_lock(&lanes_lock);
	for (int i = 0; i < PER && at < 0; i++)
		if (lanes[i].context == context && (lanes[i].id == id || !id))
			at = i;
	for (int i = 0; i < PER && at < 0; i++)
		if (!lanes[i].context || cx_dead(d, lanes[i].context)) {
			memset(&lanes[i], 0, sizeof lanes[i]); /* a context's streams have gone with it */
			lanes[i].context = context;
			lanes[i].id = id;
			at = i;
		}
	if (at >= 0) {
		void **place = &lanes[at].streams[number % LANES];
		if (!*place && (!d->stream_create || d->stream_create(place, flags) != CX_OK))
			*place = NULL;
		stream = *place;
	}
	pthread_mutex_unlock(&lanes_lock);
	return stream;
}

/* The true stream or event of a stand-in in `context`, which is current; made when first needed. Locked by the caller. */
static void *true_in(const struct cx_driver *d, struct standin *s, void *context)
{
	unsigned long long id = cx_context_id(d, context);
	for (int i = 0; i < s->n; i++)
		if (s->at[i].context == context && (s->at[i].id == id || !id))
			return s->at[i].it;
	void *it = NULL;
	for (int i = 0; i < s->n; i++)
		if (cx_dead(d, s->at[i].context))
			s->at[i--] = s->at[--s->n];
	if (s->n == PER)
		return NULL;
	if (standin_of(stream_standins, s))
		it = lane(d, context, id, (size_t)(s - stream_standins), s->flags);
	else if (!d->event_create || d->event_create(&it, s->flags) != CX_OK)
		it = NULL;
	if (it)
		s->at[s->n++] = (struct true_one){ context, it, id };
	return it;
}

typedef int stream_create_call(void **, unsigned);
static int my_create(enum call which, struct standin *all, void **out, unsigned flags)
{
	REAL(which, stream_create_call);
	const struct cx_driver *d = active();
	struct standin *s;
	if (!d)
		return call(out, flags);
	if (!atomic_load(&standins_refused) && (s = new_standin(all, flags))) {
		*out = s;
		return CX_OK;
	}
	struct cx_entry e = cx_enter(d, somewhere_if_bare(d));
	int r = call(out, flags);
	cx_leave(d, e);
	return r;
}
static int my_stream_create(void **s, unsigned f) { return my_create(STREAM_CREATE, stream_standins, s, f); }
static int my_event_create(void **v, unsigned f) { return my_create(EVENT_CREATE, event_standins, v, f); }

static int each(struct standin *s, int (*f)(void *))
{
	int r = CX_OK;
	pthread_mutex_lock(&s->lock);
	for (int i = 0; i < s->n && !r; i++) {
		const struct cx_driver *d;
		r = f(s->at[i].it);
		if (r && r != CX_ERROR_NOT_READY && (d = cx_driver()) && cx_dead(d, s->at[i].context)) {
			s->at[i--] = s->at[--s->n]; /* gone with its context, and all work in it */
			r = CX_OK;
		}
	}
	pthread_mutex_unlock(&s->lock);
	return r;
}

static int destroy(enum call which, struct standin *all, void *p)
{
	REAL(which, pointer_call);
	struct standin *s = standin_of(all, p);
	if (!s)
		return call(p);
	int r = all == event_standins ? each(s, call) : CX_OK; /* true streams are shared, and stay */
	pthread_mutex_lock(&standins_lock);
	pthread_mutex_destroy(&s->lock);
	s->used = false;
	pthread_mutex_unlock(&standins_lock);
	return r;
}
static int my_stream_destroy(void *s) { return destroy(STREAM_DESTROY, stream_standins, s); }
static int my_stream_destroy_v2(void *s) { return destroy(STREAM_DESTROY_V2, stream_standins, s); }
static int my_event_destroy(void *v) { return destroy(EVENT_DESTROY, event_standins, v); }
static int my_event_destroy_v2(void *v) { return destroy(EVENT_DESTROY_V2, event_standins, v); }

static int on_each(enum call which, struct standin *all, void *p)
{
	REAL(which, pointer_call);
	struct standin *s = standin_of(all, p);
	return s ? each(s, call) : call(p);
}
static int my_stream_sync(void *s) { return on_each(STREAM_SYNC, stream_standins, s); }
static int my_event_sync(void *v) { return on_each(EVENT_SYNC, event_standins, v); }
static int my_event_query(void *v) { return on_each(EVENT_QUERY, event_standins, v); }

typedef int event_record_call(void *, void *);
static int my_event_record(void *event, void *stream)
{
	REAL(EVENT_RECORD, event_record_call);
	struct standin *v = standin_of(event_standins, event), *s = standin_of(stream_standins, stream);
	const struct cx_driver *d = cx_driver();
	if (!v || !s || !d)
		return call(event, stream);
	int r = CX_OK;
	pthread_mutex_lock(&v->lock);
	pthread_mutex_lock(&s->lock);
	/* In each context that the stream has worked in: an earlier copy may still run in another one. */
	for (int i = 0; i < s->n && !r; i++) {
		if (cx_dead(d, s->at[i].context))
			continue;
		struct cx_entry e = cx_enter(d, s->at[i].context);
		void *it = true_in(d, v, s->at[i].context);
		if (it)
			r = call(it, s->at[i].it);
		else /* no event to be had: what it stands for has happened when the stream is through */
			r = d->stream_sync ? d->stream_sync(s->at[i].it) : CX_ERROR_UNKNOWN;
		cx_leave(d, e);
	}
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_unlock(&v->lock);
	return r;
}

typedef int memcpy_async_call(void *, const void *, size_t, int, void *);
typedef int dtod_async_call(cx_ptr, cx_ptr, size_t, void *);

static int start_copy(enum call which, void *to, const void *from, size_t n, int direction, void *stream)
{
	void *f = real(which);
	if (!f)
		return CX_ERROR_UNKNOWN;
	const struct cx_driver *d = cx_driver();
	struct standin *s = standin_of(stream_standins, stream);
	struct copy c = { to, from, NULL, CX_COPY_ASYNC, false };
	struct cx_entry e = { NULL, CX_MAX_DEVICES };
	bool counted = d && !atomic_load(&cx_off), wait = false;
	int r = CX_OK;
	if (s && d) {
		c = plan(d, to, from);
		if (!c.context)
			c.context = somewhere(d);
		e = cx_enter(d, c.context);
		pthread_mutex_lock(&s->lock);
		void *current = NULL;
		d->ctx_get(&current);
		stream = current ? true_in(d, s, current) : NULL;
		pthread_mutex_unlock(&s->lock);
		/* No stream to be had, as when the GPU is full: the default one, to its end, since no event will tell. */
		wait = !stream;
		r = current && (stream || d->stream_sync) ? CX_OK : CX_ERROR_INVALID_CONTEXT;
	}
	if (!r)
		r = which == MEMCPY_ASYNC ? ((memcpy_async_call *)f)(c.to, c.from, n, direction, stream)
					  : ((dtod_async_call *)f)((cx_ptr)c.to, (cx_ptr)c.from, n, stream);
	if (!r && wait)
		r = d->stream_sync(NULL);
	if (counted) {
		count(e, CX_COPY_ASYNC, r, n);
		if (!s)
			atomic_fetch_add(&cx_fabric_counts.off_stream, 1);
	}
	if (d)
		cx_leave(d, e);
	return r;
}
static int my_memcpy_async(void *t, const void *f, size_t n, int k, void *s) { return start_copy(MEMCPY_ASYNC, t, f, n, k, s); }
static int my_dtod_async(cx_ptr t, cx_ptr f, size_t n, void *s) { return start_copy(DTOD_ASYNC, (void *)t, (const void *)f, n, 0, s); }
static int my_dtod_async_v2(cx_ptr t, cx_ptr f, size_t n, void *s) { return start_copy(DTOD_ASYNC_V2, (void *)t, (const void *)f, n, 0, s); }

/* ---- answering dlsym ---------------------------------------------------------------------------------------- */

/* One wrapper stands for one original: a second CUDA runtime in the process keeps its own calls. */
static bool claim(struct cx_rule *rule, void *f)
{
	void *expected = NULL;
	if (atomic_compare_exchange_strong(&rule->original, &expected, f) || expected == f)
		return true;
	atomic_fetch_add(&cx_fabric_counts.conflicts, 1);
	return false;
}

static void *slot_hook(struct cx_rule *rule, void *current) { return claim(rule, current) ? rule->hook : NULL; }

typedef void *dlsym_call(void *, const char *);
static void *__attribute__((noinline)) answer(void *handle, const char *name)
{
	if (atomic_load(&cx_off) || !name || handle == RTLD_NEXT)
		return NULL;
	for (int i = 0; i < CALLS; i++) {
		if (strcmp(name, rules[i].symbol))
			continue;
		void *f = ((dlsym_call *)atomic_load(&rules[CALLS].original))(handle, name);
		if (!f || !claim(&rules[i], f))
			return NULL;
		atomic_fetch_add(&cx_fabric_counts.answered, 1);
		return rules[i].hook;
	}
	/* A stand-in must never reach a call that takes it for a true stream. */
	if (!strncmp(name, "cuStream", 8) || !strncmp(name, "cuEvent", 7) || !strncmp(name, "cudaStream", 10) ||
	    !strncmp(name, "cudaEvent", 9) || (!strncmp(name, "cu", 2) && strstr(name, "Async"))) {
		atomic_store(&standins_refused, true);
		atomic_fetch_add(&cx_fabric_counts.unknown_async, 1);
	}
	return NULL;
}

/* The last line is a jump: libfabric's memory hooks ask for RTLD_NEXT, which goes by the caller's address. */
static void *hook_dlsym(void *handle, const char *name)
{
	void *ours = answer(handle, name);
	if (ours)
		return ours;
	return ((dlsym_call *)atomic_load_explicit(&rules[CALLS].original, memory_order_relaxed))(handle, name);
}

#define CALL(which, name, f) [which] = { .symbol = name, .where = CX_FABRIC, .hook = (void *)f, .hook_for = slot_hook, .original_of = cx_one_original }
static struct cx_rule rules[CALLS + 1] = {
	CALL(RANGE, "cuMemGetAddressRange", my_range), CALL(RANGE_V2, "cuMemGetAddressRange_v2", my_range_v2),
	CALL(GET_HANDLE, "cudaIpcGetMemHandle", my_get_handle), CALL(OPEN_HANDLE, "cudaIpcOpenMemHandle", my_open_handle),
	CALL(CLOSE_HANDLE, "cudaIpcCloseMemHandle", my_close_handle), CALL(MEMCPY, "cudaMemcpy", my_memcpy),
	CALL(MEMCPY_ASYNC, "cudaMemcpyAsync", my_memcpy_async), CALL(DTOD_ASYNC, "cuMemcpyDtoDAsync", my_dtod_async),
	CALL(DTOD_ASYNC_V2, "cuMemcpyDtoDAsync_v2", my_dtod_async_v2),
	CALL(DMABUF, "cuMemGetHandleForAddressRange", my_dmabuf),
	CALL(SET_ATTRIBUTE, "cuPointerSetAttribute", my_set_attribute),
	CALL(HOST_REGISTER, "cudaHostRegister", my_host_register),
	CALL(HOST_UNREGISTER, "cudaHostUnregister", my_host_unregister),
	CALL(HOST_ALLOC, "cudaHostAlloc", my_host_alloc), CALL(HOST_FREE, "cudaFreeHost", my_host_free),
	CALL(MALLOC, "cudaMalloc", my_malloc), CALL(FREE, "cudaFree", my_free),
	CALL(DEVICE_SYNC, "cudaDeviceSynchronize", my_device_sync),
	CALL(STREAM_CREATE, "cuStreamCreate", my_stream_create), CALL(STREAM_DESTROY, "cuStreamDestroy", my_stream_destroy),
	CALL(STREAM_DESTROY_V2, "cuStreamDestroy_v2", my_stream_destroy_v2),
	CALL(STREAM_SYNC, "cuStreamSynchronize", my_stream_sync), CALL(EVENT_CREATE, "cuEventCreate", my_event_create),
	CALL(EVENT_DESTROY, "cuEventDestroy", my_event_destroy),
	CALL(EVENT_DESTROY_V2, "cuEventDestroy_v2", my_event_destroy_v2),
	CALL(EVENT_RECORD, "cuEventRecord", my_event_record), CALL(EVENT_SYNC, "cuEventSynchronize", my_event_sync),
	CALL(EVENT_QUERY, "cuEventQuery", my_event_query),
	CALL(CTX_CREATE, "cuCtxCreate_v2", my_ctx_create), CALL(CTX_DESTROY, "cuCtxDestroy_v2", my_ctx_destroy),
	[CALLS] = { .symbol = "dlsym", .where = CX_FABRIC, .hook = (void *)hook_dlsym, .hook_for = cx_one_hook, .original_of = cx_one_original },
};

/* ---- a libfabric that was in use before us ------------------------------------------------------------------ */

struct adoption {
	char runtimes[8][1024]; /* loaded CUDA runtimes, by path */
	size_t nruntimes;
	void *addresses[8][CALLS]; /* of each call in each of them and in the driver */
};

static int find_runtimes(struct dl_phdr_info *info, size_t size, void *arg)
{
	struct adoption *a = arg;
	const char *name = info->dlpi_name ? info->dlpi_name : "", *base = strrchr(name, '/');
	(void)size;
	if (!strncmp(base ? base + 1 : name, "libcudart", 9) && a->nruntimes < 7 && strlen(name) < sizeof a->runtimes[0])
		strcpy(a->runtimes[a->nruntimes++], name);
	return 0;
}

static void adopt_words(const struct adoption *a, uintptr_t low, uintptr_t high)
{
	for (void **word = (void **)low; word + 1 <= (void **)high; word++) {
		void *value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
		if (!value)
			continue;
		for (size_t k = 0; k < a->nruntimes; k++)
			for (int i = 0; i < CALLS; i++)
				if (value == a->addresses[k][i] && claim(&rules[i], value)) {
					__atomic_store_n(word, rules[i].hook, __ATOMIC_RELEASE);
					atomic_fetch_add(&cx_fabric_counts.adopted, 1);
				}
	}
}

static int adopt_object(struct dl_phdr_info *info, size_t size, void *arg)
{
	const char *name = info->dlpi_name ? info->dlpi_name : "", *base = strrchr(name, '/');
	uintptr_t sealed_low = 0, sealed_high = 0;
	(void)size;
	if (!strstr(base ? base + 1 : name, "libfabric"))
		return 0;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];
		if (p->p_type == PT_GNU_RELRO) {
			/* The last page is rounded as the loader does: what it shares with writable data stays writable. */
			sealed_low = info->dlpi_addr + p->p_vaddr;
			sealed_high = sealed_low + p->p_memsz;
		}
	}
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];
		if (p->p_type != PT_LOAD || !(p->p_flags & PF_W))
			continue;
		uintptr_t low = (info->dlpi_addr + p->p_vaddr + sizeof(void *) - 1) & ~(sizeof(void *) - 1);
		uintptr_t high = info->dlpi_addr + p->p_vaddr + p->p_memsz;
		if (sealed_low >= low - sizeof(void *) && sealed_low < high && sealed_high > low)
			low = (sealed_high + sizeof(void *) - 1) & ~(sizeof(void *) - 1);
		if (low < high)
			adopt_words(arg, low, high);
	}
	return 0;
}

void cx_fabric_adopt(void)
{
	struct adoption *a = calloc(1, sizeof *a);
	void *lib;
	if (!a || !cx_driver()) { /* without a driver in the process libfabric has found nothing either */
		free(a);
		return;
	}
	dl_iterate_phdr(find_runtimes, a);
	strcpy(a->runtimes[a->nruntimes++], "libcuda.so.1");
	for (size_t k = 0; k < a->nruntimes; k++) {
		if (!(lib = dlopen(a->runtimes[k], RTLD_NOW | RTLD_NOLOAD)))
			continue;
		for (int i = 0; i < CALLS; i++)
			a->addresses[k][i] = dlsym(lib, rules[i].symbol);
		dlclose(lib);
	}
	dl_iterate_phdr(adopt_object, a);
	free(a);
}

void cx_fabric_forked(void)
{
	/* Nothing of the parent's CUDA exists in the child; whatever it holds is forgotten, not destroyed. Nor are the
	 * parent's calls the child's. */
	cx_set_home(NULL);
	memset(cx_calls, 0, sizeof cx_calls);
	atomic_store(&cx_fabric_counts.translated, 0);
	atomic_store(&cx_fabric_counts.untranslated, 0);
	atomic_store(&cx_fabric_counts.own_stream, 0);
	atomic_store(&cx_fabric_counts.off_stream, 0);
	mappings = NULL;
	memset(streams, 0, sizeof streams);
	pthread_mutex_init(&mappings_lock, NULL);
	pthread_mutex_init(&streams_lock, NULL);
	pthread_mutex_init(&standins_lock, NULL);
	pthread_mutex_init(&lanes_lock, NULL);
	memset(lanes, 0, sizeof lanes);
	for (int i = 0; i < STANDINS; i++) {
		stream_standins[i].n = event_standins[i].n = 0;
		pthread_mutex_init(&stream_standins[i].lock, NULL);
		pthread_mutex_init(&event_standins[i].lock, NULL);
	}
}

void cx_fabric_init(void)
{
	atomic_store(&rules[CALLS].original, dlsym(RTLD_DEFAULT, "dlsym"));
	cx_rules_add(rules, CALLS + 1);
}
#endif
