/* SPDX-License-Identifier: Apache-2.0 */
/* A plain C library that starts threads; each says which device's context it started in. With PLUGIN it is a backend
 * with a progress thread; with LOADER it dlopens one, as NIXL does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

int stub_current(void);
int cudaSetDevice(int);

#if defined(PLUGIN)
struct engine { pthread_t thread; pthread_mutex_t lock; atomic_int stop, device; atomic_ulong turns; };
static void *progress(void *arg)
{
	struct engine *e = arg;
	while (!atomic_load(&e->stop)) {
		pthread_mutex_lock(&e->lock); /* where NIXL's passes in each turn */
		pthread_mutex_unlock(&e->lock);
		atomic_store(&e->device, stub_current());
		atomic_fetch_add(&e->turns, 1);
	}
	return NULL;
}
void *engine_make(void)
{
	struct engine *e = calloc(1, sizeof *e);
	pthread_mutex_init(&e->lock, NULL);
	atomic_store(&e->device, -2);
	return pthread_create(&e->thread, NULL, progress, e) ? NULL : e;
}
/* The device of its context, after it has made two more turns. */
int engine_device(struct engine *e)
{
	unsigned long from = atomic_load(&e->turns);
	while (atomic_load(&e->turns) < from + 2)
		usleep(10);
	return atomic_load(&e->device);
}
void engine_stop(struct engine *e) { atomic_store(&e->stop, 1); pthread_join(e->thread, NULL); free(e); }
int engine_set_device(int d) { return cudaSetDevice(d); }
#elif defined(LOADER)
void *load_engine(const char *path)
{
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	void *(*make)(void) = lib ? (void *(*)(void))dlsym(lib, "engine_make") : NULL;
	return make ? make() : NULL;
}
#else
static void *say(void *arg) { (void)arg; return (void *)(intptr_t)stub_current(); }
static void *leave(void *arg) { pthread_exit(arg); }
static void *wait_for_ever(void *arg) { (void)arg; for (;;) pause(); }
static void *stack_size(void *arg)
{
	pthread_attr_t a;
	size_t n;
	(void)arg;
	pthread_getattr_np(pthread_self(), &a);
	pthread_attr_getstacksize(&a, &n);
	pthread_attr_destroy(&a);
	return (void *)n;
}
static void *start_one(void *arg)
{
	pthread_t t;
	void *r;
	(void)arg;
	pthread_create(&t, NULL, say, NULL);
	pthread_join(t, &r);
	return r;
}
static intptr_t run(void *(*f)(void *), void *arg, size_t stack, int cancel)
{
	pthread_attr_t a;
	pthread_t t;
	void *r;
	pthread_attr_init(&a);
	if (stack)
		pthread_attr_setstacksize(&a, stack);
	int error = pthread_create(&t, &a, f, arg);
	pthread_attr_destroy(&a);
	if (error)
		return -1000 - error;
	if (cancel)
		pthread_cancel(t);
	pthread_join(t, &r);
	return (intptr_t)r;
}
intptr_t t_device(void) { return run(say, NULL, 0, 0); }
intptr_t t_exit(void) { return run(leave, (void *)4711, 0, 0); }
intptr_t t_cancel(void) { return run(wait_for_ever, NULL, 0, 1); }
intptr_t t_stack(size_t n) { return run(stack_size, NULL, n, 0); }
intptr_t t_impossible(void) { return run(say, NULL, (size_t)1 << 46, 0); }
intptr_t t_grandchild(void) { return run(start_one, NULL, 0, 0); }
/* another interposer, that takes the slot after us */
static int other_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) { (void)t, (void)a, (void)f, (void)x; return 77; }
void *t_other(void) { return (void *)other_create; }
#endif
