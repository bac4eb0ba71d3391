/* SPDX-License-Identifier: Apache-2.0 */
/* Ten thousand threads, in several groups that are bound and bound again meanwhile; run under valgrind or with TSAN.
 * The extension's C files are linked in; the thread library and the stub driver are separate objects, as in life. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "native.h"

void *stub_context(int);
int stub_current(void);

/* in the thread library: its slots are hooked */
int start(pthread_t *, int, void *(*)(void *), void *);
void turn(void);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int right, wrong;

static void *look(void *arg)
{
	/* Whoever binds the group may not get a core for a while: patience is counted in time, not in turns. */
	time_t until = time(NULL) + 60;
	while (stub_current() != (int)(long)arg && time(NULL) < until)
		turn();
	pthread_mutex_lock(&lock);
	if (stub_current() == (int)(long)arg)
		right++;
	else
		wrong++;
	pthread_mutex_unlock(&lock);
	return NULL;
}


static void *starter(void *arg)
{
	enum { AT_ONCE = 10 };
	int rounds = *(int *)arg;
	for (int i = 0; i < rounds; i++) {
		int device = 1 + i % 3;
		unsigned group = cx_new_group();
		pthread_t t[AT_ONCE];
		struct cx_armed before = cx_arm((struct cx_armed){ true, i % 2 ? stub_context(device) : NULL, group });
		cx_scan();
		int n = start(t, AT_ONCE, look, (void *)(long)device);
		cx_bind_group(group, stub_context(device)); /* most of them run already */
		cx_arm(before);
		for (int j = 0; j < n; j++)
			pthread_join(t[j], NULL);
		if (n != AT_ONCE)
			abort();
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int rounds = (argc > 1 ? atoi(argv[1]) : 10000) / 20;
	pthread_t t[2];
	for (int d = 0; d < 4; d++)
		stub_context(d);
	cx_threads_init();
	cx_fabric_init();
	cx_set_late((const char *const[]){ "libstarter" }, 1);
	cx_scan();
	for (int i = 0; i < 2; i++)
		if (pthread_create(&t[i], NULL, starter, &rounds))
			return 2;
	for (int i = 0; i < 2; i++)
		pthread_join(t[i], NULL);
	cx_undo();
	printf("right %d wrong %d created %lu late %d\n", right, wrong, cx_thread_counts.created, cx_thread_counts.late > 0);
	return wrong || right != rounds * 20;
}
