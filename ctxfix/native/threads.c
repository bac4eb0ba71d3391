/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that an armed thread starts, in whatever library, get a context; and may get it later.
 *
 * A thread is armed for a group and, if one is known, a context. Each thread it starts becomes a member of the group, and
 * so do the threads that members start. A member takes the group's context when it starts, and again whenever
 * cx_bind_group gave the group another one: it looks when it passes one of the calls below, through the import slots of
 * the objects named by cx_set_late, and when libfabric uses CUDA on it (fabric.c). NIXL's progress thread takes a mutex
 * twice in each turn of its loop, idle or not (progressActiveRails and progressCompletionQueue, in every release read,
 * 1.1.0 to 1.5.1); it does not sleep, since its Python class sets the delay to zero. */
#define _GNU_SOURCE
#include "native.h"

#if CX_SUPPORTED
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

struct group {
	_Atomic(void *) context;
	atomic_uint version; /* counts the bindings; 0 is none yet */
	cx_count threads, bound, failed;
};

/* Groups are few (one an agent) and never freed: a thread may look at its own at any time. */
enum { CHUNK = 256, CHUNKS = 256 };
static _Atomic(struct group *) chunks[CHUNKS];
static atomic_uint ngroups;

struct cx_thread_counts cx_thread_counts;

static __thread struct {
	struct cx_armed armed;
	void *inherited;     /* context this thread was started in */
	unsigned member;     /* group of this thread, 0 if none */
	unsigned seen;       /* version of its group that it has applied */
	bool held;           /* the caller's context was put right by Python: NIXL is not to change it */
} me;

static struct group *group_of(unsigned number)
{
	if (!number || number > atomic_load(&ngroups))
		return NULL;
	struct group *chunk = atomic_load(&chunks[(number - 1) / CHUNK]);
	return chunk ? &chunk[(number - 1) % CHUNK] : NULL;
}

unsigned cx_new_group(void)
{
	unsigned number = 0;
	cx_lock();
	unsigned n = atomic_load(&ngroups);
	if (n < CHUNK * CHUNKS) {
		if (!atomic_load(&chunks[n / CHUNK]))
			atomic_store(&chunks[n / CHUNK], calloc(CHUNK, sizeof(struct group)));
		if (atomic_load(&chunks[n / CHUNK])) {
			number = n + 1;
			atomic_store(&ngroups, number);
		}
	}
	cx_unlock();
	return number;
}

int cx_bind_group(unsigned number, void *context)
{
	struct group *g = group_of(number);
	if (!g)
		return -1;
	if (atomic_exchange(&g->context, context) != context)
		atomic_fetch_add(&g->version, 1);
	return 0;
}

int cx_group_info(unsigned number, void **context, unsigned long *threads, unsigned long *bound, unsigned long *failed)
{
	struct group *g = group_of(number);
	if (!g)
		return -1;
	*context = atomic_load(&g->context);
	*threads = atomic_load(&g->threads);
	*bound = atomic_load(&g->bound);
	*failed = atomic_load(&g->failed);
	return 0;
}

struct cx_armed cx_armed_now(void) { return me.armed; }

struct cx_armed cx_arm(struct cx_armed now)
{
	struct cx_armed before = me.armed;
	me.armed = now;
	return before;
}

bool cx_hold(bool on)
{
	bool before = me.held;
	me.held = on;
	return before;
}

void cx_threads_forked(void)
{
	/* The one thread of the child: it belongs to no agent, and CUDA does not work in it. */
	me.armed = (struct cx_armed){ 0 };
	me.inherited = NULL;
	me.member = 0;
	me.held = false;
	memset(&cx_thread_counts, 0, sizeof cx_thread_counts);
	for (unsigned n = atomic_load(&ngroups); n; n--)
		cx_bind_group(n, NULL);
}

/* ---- binding --------------------------------------------------------------------------------------------- */

/* Make `context` current on this thread; a context that is no more leaves the thread as it is. */
static void bind(struct group *g, void *context, bool late)
{
	const struct cx_driver *d = cx_driver();
	if (d && cx_alive(d, context) && d->ctx_set(context) == CX_OK) {
		atomic_fetch_add(&cx_thread_counts.bound, 1);
		if (late)
			atomic_fetch_add(&cx_thread_counts.late, 1);
		if (g)
			atomic_fetch_add(&g->bound, 1);
		return;
	}
	atomic_fetch_add(&cx_thread_counts.failed, 1);
	if (g)
		atomic_fetch_add(&g->failed, 1);
}

/* The version is read before the context: a binding that comes between the two is seen as new at the next pass. */
static void __attribute__((noinline)) bind_late(struct group *g)
{
	int saved = errno;
	me.seen = atomic_load(&g->version);
	void *context = atomic_load(&g->context);
	if (context && !atomic_load(&cx_off))
		bind(g, context, true);
	errno = saved;
}

static inline void pass(void)
{
	if (__builtin_expect(me.member != 0, 0)) {
		struct group *g = group_of(me.member);
		if (atomic_load_explicit(&g->version, memory_order_acquire) != me.seen)
			bind_late(g);
	}
}

void *cx_thread_context(void)
{
	if (!me.member)
		return NULL;
	pass();
	return atomic_load(&group_of(me.member)->context);
}

/* ---- pthread_create -------------------------------------------------------------------------------------- */

struct start {
	void *(*routine)(void *);
	void *argument;
	void *context;
	unsigned group;
};

static void *started(void *arg)
{
	struct start s = *(struct start *)arg;
	free(arg);
	if (!atomic_load(&cx_off)) {
		int state;
		/* The driver may open files: no cancellation inside it. The routine starts with the state it would have had. */
		pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
		struct group *g = group_of(s.group);
		if (g) {
			me.member = s.group;
			me.seen = atomic_load(&g->version);
			void *later = atomic_load(&g->context);
			if (later)
				s.context = later;
		}
		me.inherited = s.context;
		if (s.context)
			bind(g, s.context, false);
		else
			atomic_fetch_add(&cx_thread_counts.pending, 1);
		pthread_setcancelstate(state, NULL);
	}
	return s.routine(s.argument); /* pthread_exit and cancellation pass: nothing is left to clean up */
}

typedef int create_call(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static int create(create_call *real, pthread_t *thread, const pthread_attr_t *attr, void *(*routine)(void *), void *arg)
{
	if ((!me.armed.on && !me.member && !me.inherited) || atomic_load(&cx_off))
		return real(thread, attr, routine, arg);
	struct start *s = atomic_load(&cx_fault_malloc) ? NULL : malloc(sizeof *s);
	if (!s) { /* better a thread without a context than none */
		atomic_fetch_add(&cx_thread_counts.plain, 1);
		return real(thread, attr, routine, arg);
	}
	s->routine = routine;
	s->argument = arg;
	s->context = me.armed.on ? me.armed.context : me.inherited;
	s->group = me.armed.on ? me.armed.group : me.member;
	/* Counted first: the thread may be through before pthread_create returns. */
	struct group *g = group_of(s->group);
	atomic_fetch_add(&cx_thread_counts.created, 1);
	if (g)
		atomic_fetch_add(&g->threads, 1);
	int error = real(thread, attr, started, s);
	if (error) {
		free(s);
		atomic_fetch_sub(&cx_thread_counts.created, 1);
		if (g)
			atomic_fetch_sub(&g->threads, 1);
	}
	return error;
}

/* One hook for each thing that slots were found to call: other interposers stay in the line. */
enum { ORIGINALS = 4 };
static _Atomic(void *) originals[ORIGINALS];
#define HOOK(n)                                                                                                        \
	static int create_##n(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x)                      \
	{                                                                                                              \
		return create((create_call *)atomic_load_explicit(&originals[n], memory_order_relaxed), t, a, f, x);   \
	}
HOOK(0) HOOK(1) HOOK(2) HOOK(3)
static void *const hooks[ORIGINALS] = { (void *)create_0, (void *)create_1, (void *)create_2, (void *)create_3 };

static void *create_hook(struct cx_rule *rule, void *current)
{
	(void)rule;
	for (int i = 0; i < ORIGINALS; i++) {
		if (!atomic_load(&originals[i]))
			atomic_store(&originals[i], current);
		if (atomic_load(&originals[i]) == current)
			return hooks[i];
	}
	return NULL;
}

static void *create_original(struct cx_rule *rule, void *value)
{
	(void)rule;
	for (int i = 0; i < ORIGINALS; i++)
		if (value == hooks[i])
			return atomic_load(&originals[i]);
	return NULL;
}

/* ---- dlsym: objects that came by dlopen while we are armed ------------------------------------------------ */

/* NIXL loads a backend's plugin inside createBackend and asks it for its entry point, which starts the threads. dlopen
 * itself is left alone, since it looks at its caller's address for the search path. So does dlsym for RTLD_NEXT: the last
 * line is a jump, not a call, and dlsym sees the true caller. */
enum { RULE_CREATE, RULE_DLSYM, RULE_MUTEX, RULE_NANOSLEEP, RULE_CLOCK_NANOSLEEP, RULE_USLEEP, RULE_YIELD, RULE_EPOLL,
       RULE_POLL, RULE_SET_DEVICE, RULE_SET_CURRENT, RULE_ATTRIBUTES, RULES };
static struct cx_rule rules[RULES];
#define ORIGINAL(rule, type) ((type *)atomic_load_explicit(&rules[rule].original, memory_order_relaxed))

#if defined(__has_attribute)
#if __has_attribute(musttail)
#define JUMP __attribute__((musttail)) return
#endif
#endif
#ifndef JUMP
#define JUMP return /* a sibling call at -O2 */
#endif

static void __attribute__((noinline)) before_dlsym(void)
{
	if (me.armed.on && !atomic_load(&cx_off)) {
		int saved = errno;
		cx_scan();
		errno = saved;
	}
}

typedef void *dlsym_call(void *, const char *);
static void *hook_dlsym(void *handle, const char *name)
{
	before_dlsym();
	JUMP ORIGINAL(RULE_DLSYM, dlsym_call)(handle, name);
}

/* ---- places that threads pass ---------------------------------------------------------------------------- */

typedef int mutex_call(pthread_mutex_t *);
static int hook_mutex(pthread_mutex_t *m) { pass(); return ORIGINAL(RULE_MUTEX, mutex_call)(m); }

typedef int nanosleep_call(const struct timespec *, struct timespec *);
static int hook_nanosleep(const struct timespec *t, struct timespec *left)
{
	pass();
	return ORIGINAL(RULE_NANOSLEEP, nanosleep_call)(t, left);
}

typedef int clock_nanosleep_call(clockid_t, int, const struct timespec *, struct timespec *);
static int hook_clock_nanosleep(clockid_t c, int flags, const struct timespec *t, struct timespec *left)
{
	pass();
	return ORIGINAL(RULE_CLOCK_NANOSLEEP, clock_nanosleep_call)(c, flags, t, left);
}

typedef int usleep_call(useconds_t);
static int hook_usleep(useconds_t us) { pass(); return ORIGINAL(RULE_USLEEP, usleep_call)(us); }

typedef int yield_call(void);
static int hook_yield(void) { pass(); return ORIGINAL(RULE_YIELD, yield_call)(); }

/* These two wait: the thread is looked at when it comes back to work. */
typedef int epoll_call(int, struct epoll_event *, int, int);
static int hook_epoll(int fd, struct epoll_event *events, int n, int timeout)
{
	int ready = ORIGINAL(RULE_EPOLL, epoll_call)(fd, events, n, timeout);
	pass();
	return ready;
}

typedef int poll_call(struct pollfd *, nfds_t, int);
static int hook_poll(struct pollfd *fds, nfds_t n, int timeout)
{
	int ready = ORIGINAL(RULE_POLL, poll_call)(fds, n, timeout);
	pass();
	return ready;
}

/* ---- NIXL's own changes of context, while ours is held ---------------------------------------------------- */

/* The plugin makes a device or a recorded context current before it posts: the device that the application wrote into
 * the descriptor, or the context of the first memory it saw. Both can be wrong; while Python holds the right one, both
 * say that they did it. */
static bool keep(void)
{
	const struct cx_driver *d;
	void *current = NULL;
	if (!me.held || atomic_load(&cx_off) || !(d = cx_driver()) || d->ctx_get(&current) != CX_OK || !current)
		return false;
	atomic_fetch_add(&cx_thread_counts.held, 1);
	return true;
}

typedef int set_device_call(int);
static int hook_set_device(int device) { return keep() ? CX_OK : ORIGINAL(RULE_SET_DEVICE, set_device_call)(device); }

typedef int set_current_call(void *);
static int hook_set_current(void *c) { return keep() ? CX_OK : ORIGINAL(RULE_SET_CURRENT, set_current_call)(c); }

/* Asked once for each registration, and kept: NIXL 1.4.0 refuses to post memory whose recorded context is NULL (VMM memory,
 * pools), and 1.1.0 registers it in whatever context there is. The answer is what a cudaSetDevice would make current. */
typedef int attributes_call(unsigned, const int *, void **, cx_ptr);
static int hook_attributes(unsigned n, const int *attributes, void **data, cx_ptr p)
{
	int r = ORIGINAL(RULE_ATTRIBUTES, attributes_call)(n, attributes, data, p);
	const struct cx_driver *d;
	if (r != CX_OK || atomic_load(&cx_off) || !(d = cx_driver()))
		return r;
	for (unsigned i = 0; i < n; i++)
		if (attributes[i] == CX_ATTRIBUTE_CONTEXT && !*(void **)data[i])
			*(void **)data[i] = cx_owner(d, p);
	return r;
}

#define ONE(name, place, f) { .symbol = name, .where = place, .hook = (void *)f, .hook_for = cx_one_hook, .original_of = cx_one_original }
static struct cx_rule rules[RULES] = {
	[RULE_CREATE] = { .symbol = "pthread_create", .where = CX_ANYWHERE, .hook_for = create_hook, .original_of = create_original },
	[RULE_DLSYM] = ONE("dlsym", CX_ELSEWHERE, hook_dlsym),
	[RULE_MUTEX] = ONE("pthread_mutex_lock", CX_LATE, hook_mutex),
	[RULE_NANOSLEEP] = ONE("nanosleep", CX_LATE, hook_nanosleep),
	[RULE_CLOCK_NANOSLEEP] = ONE("clock_nanosleep", CX_LATE, hook_clock_nanosleep),
	[RULE_USLEEP] = ONE("usleep", CX_LATE, hook_usleep),
	[RULE_YIELD] = ONE("sched_yield", CX_LATE, hook_yield),
	[RULE_EPOLL] = ONE("epoll_wait", CX_LATE, hook_epoll),
	[RULE_POLL] = ONE("poll", CX_LATE, hook_poll),
	[RULE_SET_DEVICE] = ONE("cudaSetDevice", CX_PLUGIN, hook_set_device),
	[RULE_SET_CURRENT] = ONE("cuCtxSetCurrent", CX_PLUGIN, hook_set_current),
	[RULE_ATTRIBUTES] = ONE("cuPointerGetAttributes", CX_PLUGIN, hook_attributes),
};

void cx_threads_init(void)
{
	/* What an unresolved slot would be bound to. RTLD_DEFAULT honours what was preloaded. */
	for (int i = RULE_CREATE; i <= RULE_POLL; i++)
		atomic_store(&rules[i].original, dlsym(RTLD_DEFAULT, rules[i].symbol));
	cx_rules_add(rules, RULES);
}
#endif
