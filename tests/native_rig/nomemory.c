/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded: the nth allocation that ctxfix's extension makes gives nothing. Everybody else's work as ever. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
static atomic_int made, failing;

int nomemory_allocations(void) { return atomic_load(&made); }
void nomemory_fail(int nth) { atomic_store(&failing, nth); }

static int refused(const void *caller)
{
	Dl_info info;
	if (!atomic_load(&failing) || !dladdr(caller, &info) || !info.dli_fname || !strstr(info.dli_fname, "_native."))
		return 0;
	return atomic_fetch_add(&made, 1) + 1 == atomic_load(&failing);
}
void *malloc(size_t n) { return refused(__builtin_return_address(0)) ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t m) { return refused(__builtin_return_address(0)) ? NULL : __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { return refused(__builtin_return_address(0)) ? NULL : __libc_realloc(p, n); }
char *strdup(const char *s)
{
	char *copy = refused(__builtin_return_address(0)) ? NULL : __libc_malloc(strlen(s) + 1);
	return copy ? strcpy(copy, s) : NULL;
}
