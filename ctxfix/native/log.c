/* SPDX-License-Identifier: Apache-2.0 */
/* libfabric's log, taken over through its own interface for that (fi_import_log, 1.16 and newer): sorted and counted here,
 * because any thread of libfabric's may log, holding locks that a thread with Python's lock waits for.
 *
 * libfabric has one importer; its own log is silent from then on. So this is for processes whose log is silent anyway
 * (FI_LOG_LEVEL unset), which Python makes sure of. There is no way back that libfabric would allow. */
#define _GNU_SOURCE
#include "native.h"

#if CX_SUPPORTED
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* What of rdma/fabric.h and rdma/fi_ext.h is needed; stable across libfabric's releases. */
enum { CLASS_LOG = 26, LEVEL_WARN = 0, LEVEL_INFO = 2, SUBSYS_CORE = 0, SUBSYS_AV = 5, INTERFACE_1_20 = 1 << 16 | 20 };
struct fid;
struct fid_ops {
	size_t size;
	int (*close)(struct fid *);
	int (*bind)(struct fid *, struct fid *, uint64_t);
};
struct fid { size_t class; void *context; struct fid_ops *ops; };
struct provider { uint32_t version, fi_version; void *context[4]; const char *name; };
struct log_ops {
	size_t size;
	int (*enabled)(const struct provider *, int level, int subsys, uint64_t flags);
	int (*ready)(const struct provider *, int level, int subsys, uint64_t flags, uint64_t *show);
	void (*log)(const struct provider *, int level, int subsys, const char *function, int line, const char *message);
};
struct fid_log { struct fid fid; struct log_ops *ops; };

static const struct { const char *kind, *words; } kinds[CX_LOG_KINDS] = {
	{ "sar", "fallback to using SAR" },
	{ "range_failure", "Failed to perform cuMemGetAddressRange" },
	{ "handle_failure", "Failed to perform cudaIpcGetMemHandle" },
	{ "open_failure", "Failed to perform cudaIpcOpenMemHandle" },
	{ "copy_failure", "Failed to perform cudaMemcpy" },
	{ "shm_off", "EFA will not use SHM" },
	{ "shm_peer", "to shm provider's av" },
	{ "other", "" },
};

static struct cx_log_kind said[CX_LOG_KINDS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool imported;

const char *cx_log_name(int kind) { return kinds[kind].kind; }

void cx_log_read(int kind, struct cx_log_kind *out)
{
	pthread_mutex_lock(&lock);
	*out = said[kind];
	pthread_mutex_unlock(&lock);
}

void cx_log_forked(void)
{
	pthread_mutex_init(&lock, NULL); /* another thread of the parent may have held it */
	memset(said, 0, sizeof said);
}

static int enabled(const struct provider *p, int level, int subsys, uint64_t flags)
{
	(void)p, (void)flags;
	return level == LEVEL_WARN || (level == LEVEL_INFO && (subsys == SUBSYS_CORE || subsys == SUBSYS_AV));
}

static int ready(const struct provider *p, int level, int subsys, uint64_t flags, uint64_t *show)
{
	(void)show;
	return enabled(p, level, subsys, flags);
}

static void take(const struct provider *p, int level, int subsys, const char *function, int line, const char *message)
{
	int kind = 0;
	(void)subsys;
	while (kind < CX_LOG_KINDS - 1 && !strstr(message, kinds[kind].words))
		kind++;
	if (kind == CX_LOG_KINDS - 1 && level != LEVEL_WARN)
		return;
	pthread_mutex_lock(&lock);
	struct cx_log_kind *s = &said[kind];
	if (s->count++ < CX_LOG_LINES)
		snprintf(s->lines[s->count - 1], CX_LOG_LENGTH, "%s:%s():%d %s", p && p->name ? p->name : "?", function, line,
			 message);
	pthread_mutex_unlock(&lock);
}

/* Take the log of the libfabric at `path`, which is loaded. 0, or a negative errno of libfabric's; 1: it is no libfabric that
 * can do it. */
int cx_log_import(const char *path)
{
	static struct log_ops ops = { sizeof ops, enabled, ready, take };
	static struct fid_log ours = { { CLASS_LOG, NULL, NULL }, &ops };
	struct fid *logging = NULL;
	if (imported)
		return 0;
	void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
	int (*open)(uint32_t, const char *, void *, size_t, uint64_t, struct fid **, void *) =
		library ? (__typeof__(open))dlsym(library, "fi_open") : NULL;
	if (!open)
		return 1;
	int result = open(INTERFACE_1_20, "logging", NULL, 0, 0, &logging, &ours);
	if (result)
		return result;
	result = logging->ops->bind(logging, &ours.fid, 0);
	logging->ops->close(logging);
	imported = !result;
	return result;
}
#endif
