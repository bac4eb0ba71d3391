/* SPDX-License-Identifier: Apache-2.0 */
/* The library of harness.c whose imports are hooked. Small stacks: a checker looks at every byte of them. */
#include <pthread.h>

int start(pthread_t *t, int n, void *(*f)(void *), void *arg)
{
	int started = 0;
	pthread_attr_t small;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 128 << 10);
	while (started < n && !pthread_create(&t[started], &small, f, arg))
		started++;
	pthread_attr_destroy(&small);
	return started;
}

/* A place that threads pass. */
void turn(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	pthread_mutex_lock(&lock);
	pthread_mutex_unlock(&lock);
}
