/* SPDX-License-Identifier: Apache-2.0 */
/* The library of harness.c whose imports are hooked. Small stacks: a checker looks at every byte of them. */
#include <pthread.h>

int start_and_join(pthread_t *t, int n, void *(*f)(void *), void *arg)
{
	int started = 0;
	pthread_attr_t small;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 128 << 10);
	while (started < n && !pthread_create(&t[started], &small, f, arg))
		started++;
	pthread_attr_destroy(&small);
	for (int i = 0; i < started; i++)
		pthread_join(t[i], NULL);
	return started != n;
}
