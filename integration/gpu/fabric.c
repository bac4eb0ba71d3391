/* SPDX-License-Identifier: Apache-2.0 */
/* A loopback fabric for machines without EFA: preloaded, it shows libfabric's shm provider to NIXL as one "efa" device, and
 * counts, by the device of the context current on the calling thread, what NIXL posts and which reads of a completion
 * queue return something. Written as JSON to $FABRIC_COUNTS.<pid> when the process ends.
 *
 * $FABRIC_ABI is the symbol version that NIXL's plugin asks for (FABRIC_1.7 up to NIXL 1.4, FABRIC_1.10 from 1.5). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICES 16
static const char domain_name[] = "rdmap0s6-rdm";

static void *library(void)
{
	static void *lib;
	if (!lib)
		lib = dlopen("libfabric.so.1", RTLD_NOW | RTLD_GLOBAL);
	if (!lib) {
		fprintf(stderr, "fabric.c: %s\n", dlerror());
		abort();
	}
	return lib;
}

static void *function(const char *name, const char *version)
{
	const char *wanted = version ? version : getenv("FABRIC_ABI");
	void *f = dlvsym(library(), name, wanted ? wanted : "FABRIC_1.7");
	if (!f) {
		fprintf(stderr, "fabric.c: no %s@%s\n", name, wanted ? wanted : "FABRIC_1.7");
		abort();
	}
	return f;
}

/* ---- counts ----------------------------------------------------------------------------------------------- */

/* Row 0: no context; row n + 1: device n. */
static atomic_ulong posts[DEVICES + 1], completions[DEVICES + 1];

static int row(void)
{
	static int (*get)(void **), (*device)(int *);
	void *context = NULL;
	int d = -1;
	if (!get) {
		void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
		if (!cuda)
			return 0;
		*(void **)&device = dlsym(cuda, "cuCtxGetDevice");
		*(void **)&get = dlsym(cuda, "cuCtxGetCurrent");
	}
	if (get(&context) || !context || device(&d) || d < 0 || d >= DEVICES)
		return 0;
	return d + 1;
}

static void print_row(FILE *out, const char *name, atomic_ulong *counts)
{
	const char *comma = "";
	fprintf(out, "\"%s\": {", name);
	for (int i = 0; i <= DEVICES; i++)
		if (counts[i]) {
			if (i)
				fprintf(out, "%s\"%d\": %lu", comma, i - 1, counts[i]);
			else
				fprintf(out, "%s\"none\": %lu", comma, counts[i]);
			comma = ", ";
		}
	fprintf(out, "}");
}

__attribute__((destructor)) static void report(void)
{
	const char *prefix = getenv("FABRIC_COUNTS");
	char path[4096];
	FILE *out;
	unsigned long any = 0;
	for (int i = 0; i <= DEVICES; i++)
		any += posts[i] + completions[i];
	if (!prefix || !any)
		return;
	snprintf(path, sizeof path, "%s.%d", prefix, getpid());
	if (!(out = fopen(path, "w")))
		return;
	fprintf(out, "{");
	print_row(out, "posts", posts);
	fprintf(out, ", ");
	print_row(out, "completions", completions);
	fprintf(out, "}\n");
	fclose(out);
}

/* ---- shm shown as efa ------------------------------------------------------------------------------------- */

typedef int getinfo_call(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);

static void set(char **field, const char *value)
{
	free(*field);
	*field = value ? strdup(value) : NULL;
}

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
	       struct fi_info **info)
{
	static __thread int inside; /* libfabric calls its own fi_getinfo, in its newest version, and finds ours */
	if (inside)
		return ((getinfo_call *)dlsym(library(), "fi_getinfo"))(version, node, service, flags, hints, info);
	if (!hints)
		return ((getinfo_call *)function("fi_getinfo", NULL))(version, node, service, flags, hints, info);
	struct fi_info *(*duplicate)(const struct fi_info *) = function("fi_dupinfo", NULL);
	void (*release)(struct fi_info *) = function("fi_freeinfo", NULL);
	struct fi_info *h = duplicate(hints);
	set(&h->fabric_attr->prov_name, "shm");
	set(&h->fabric_attr->name, NULL);
	set(&h->domain_attr->name, NULL);
	h->domain_attr->mr_mode = FI_MR_HMEM;
	h->domain_attr->mr_key_size = 0;
	h->domain_attr->threading = FI_THREAD_UNSPEC;
	h->caps = FI_MSG | FI_RMA | FI_HMEM | FI_LOCAL_COMM;
	h->ep_attr->type = FI_EP_RDM;
	h->mode = 0;
	inside++;
	int r = ((getinfo_call *)function("fi_getinfo", NULL))(version, node, service, flags, h, info);
	inside--;
	release(h);
	if (r)
		return r;
	if ((*info)->next) {
		release((*info)->next);
		(*info)->next = NULL;
	}
	set(&(*info)->fabric_attr->prov_name, "efa");
	set(&(*info)->domain_attr->name, domain_name);
	return 0;
}

/* The shm provider checks these names: they are its own while it is called. */
struct names { char *provider, *domain; };
static struct names disguise(struct fi_info *i)
{
	struct names before = { i->fabric_attr->prov_name, i->domain_attr->name };
	i->fabric_attr->prov_name = "shm";
	i->domain_attr->name = "shm";
	return before;
}
static void undisguise(struct fi_info *i, struct names before)
{
	i->fabric_attr->prov_name = before.provider;
	i->domain_attr->name = before.domain;
}

/* One provider, so one table of each kind: copied once, with some calls replaced. */
static struct fi_ops_fabric fabric_ops, *fabric_true;
static struct fi_ops_domain domain_ops, *domain_true;
static struct fi_ops_mr mr_ops, *mr_true;
static struct fi_ops_rma rma_ops, *rma_true;
static struct fi_ops_cq cq_ops, *cq_true;

/* Looked at before the call: a post without a context can leave the thread with GPU 0's. Counted if it was taken: NIXL
 * tries again as long as the answer is FI_EAGAIN. */
static ssize_t posted(int row, ssize_t result)
{
	if (!result)
		atomic_fetch_add(&posts[row], 1);
	return result;
}

static ssize_t my_write_data(struct fid_ep *e, const void *b, size_t n, void *d, uint64_t data, fi_addr_t to, uint64_t at,
			     uint64_t key, void *context)
{
	int r = row();
	return posted(r, rma_true->writedata(e, b, n, d, data, to, at, key, context));
}
static ssize_t my_write_msg(struct fid_ep *e, const struct fi_msg_rma *m, uint64_t flags)
{
	int r = row();
	return posted(r, rma_true->writemsg(e, m, flags & ~FI_MORE));
}
static ssize_t my_read(struct fid_ep *e, void *b, size_t n, void *d, fi_addr_t from, uint64_t at, uint64_t key, void *context)
{
	int r = row();
	return posted(r, rma_true->read(e, b, n, d, from, at, key, context));
}
static ssize_t my_read_msg(struct fid_ep *e, const struct fi_msg_rma *m, uint64_t flags)
{
	int r = row();
	return posted(r, rma_true->readmsg(e, m, flags & ~FI_MORE));
}

static ssize_t my_cq_read(struct fid_cq *cq, void *buffer, size_t n)
{
	ssize_t r = cq_true->read(cq, buffer, n);
	if (r > 0)
		atomic_fetch_add(&completions[row()], 1);
	return r;
}

static int my_register(struct fid *domain, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr)
{
	struct fi_mr_attr a = *attr;
	a.access |= FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
	a.requested_key = (uint64_t)a.mr_iov->iov_base; /* efa chooses keys itself, shm does not */
	if (a.iface != FI_HMEM_SYSTEM)
		flags |= FI_HMEM_DEVICE_ONLY; /* as efa tells its own shm; without it shm never tries CUDA IPC */
	return mr_true->regattr(domain, &a, flags, mr);
}

static int my_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context)
{
	struct names before = disguise(info);
	int r = domain_true->endpoint(domain, info, ep, context);
	undisguise(info, before);
	if (!r) {
		rma_true = (*ep)->rma;
		rma_ops = *rma_true;
		rma_ops.writedata = my_write_data;
		rma_ops.writemsg = my_write_msg;
		rma_ops.read = my_read;
		rma_ops.readmsg = my_read_msg;
		(*ep)->rma = &rma_ops;
	}
	return r;
}

static int my_cq_open(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context)
{
	int r = domain_true->cq_open(domain, attr, cq, context);
	if (!r) {
		cq_true = (*cq)->ops;
		cq_ops = *cq_true;
		cq_ops.read = my_cq_read;
		(*cq)->ops = &cq_ops;
	}
	return r;
}

static int my_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context)
{
	struct names before = disguise(info);
	int r = fabric_true->domain(fabric, info, domain, context);
	undisguise(info, before);
	if (!r) {
		domain_true = (*domain)->ops;
		domain_ops = *domain_true;
		domain_ops.endpoint = my_endpoint;
		domain_ops.cq_open = my_cq_open;
		(*domain)->ops = &domain_ops;
		mr_true = (*domain)->mr;
		mr_ops = *mr_true;
		mr_ops.regattr = my_register;
		(*domain)->mr = &mr_ops;
	}
	return r;
}

int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context)
{
	int (*call)(struct fi_fabric_attr *, struct fid_fabric **, void *) = function("fi_fabric", "FABRIC_1.1");
	char *provider = attr->prov_name;
	attr->prov_name = "shm";
	int r = call(attr, fabric, context);
	attr->prov_name = provider;
	if (!r) {
		fabric_true = (*fabric)->ops;
		fabric_ops = *fabric_true;
		fabric_ops.domain = my_domain;
		(*fabric)->ops = &fabric_ops;
	}
	return r;
}
