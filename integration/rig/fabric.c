/* SPDX-License-Identifier: Apache-2.0
 *
 * The loopback fabric, an LD_PRELOAD library: it shows libfabric's shm provider to NIXL as `efa` devices and
 * writes down, for each call that may touch GPU memory, whose memory it is and which context is current.
 *
 * Environment: RIG_POSTS (file for the records, one JSON object per line), RIG_EFAS (devices, default 1),
 * RIG_HMEM=keep (leave device memory marked as such, for a libfabric with CUDA support; otherwise it is
 * registered as host memory, which the fake driver's is).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_rma.h>

#include "fakecuda.h"

/* The headers map these names to versioned or static ones; here the exported symbols are meant. */
#undef fi_getinfo
#undef fi_freeinfo
#undef fi_dupinfo
#undef fi_fabric

#define DEVICE_PREFIX "loopback-efa"

static struct {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
} libfabric;
static int efas = 1, posts_fd = -1;
static bool keep_hmem;
static pthread_once_t started = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void start(void)
{
    void *handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle) {
        libfabric.getinfo = dlvsym(handle, "fi_getinfo", "FABRIC_1.7");
        libfabric.freeinfo = dlvsym(handle, "fi_freeinfo", "FABRIC_1.7");
        libfabric.dupinfo = dlvsym(handle, "fi_dupinfo", "FABRIC_1.7");
        libfabric.fabric = dlvsym(handle, "fi_fabric", "FABRIC_1.1");
    }
    if (!libfabric.getinfo || !libfabric.freeinfo || !libfabric.dupinfo || !libfabric.fabric) {
        fprintf(stderr, "loopback fabric: no libfabric >= 1.20: %s\n", handle ? "symbols missing" : dlerror());
        abort();
    }
    const char *count = getenv("RIG_EFAS"), *hmem = getenv("RIG_HMEM"), *posts = getenv("RIG_POSTS");
    if (count)
        efas = atoi(count);
    keep_hmem = hmem && !strcmp(hmem, "keep");
    if (posts && *posts)
        posts_fd = open(posts, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

/* ---- records ----------------------------------------------------------------------------------------- */

/* Looks at the real driver through CUDA's own calls, which the fake one spares: they would be counted there
 * as the application's. */
static void look_at(const void *address, struct fakecuda_look *look)
{
    static void (*fake)(CUdeviceptr, struct fakecuda_look *);
    static CUresult (*get_current)(CUcontext *), (*get_device)(int *), (*get_attribute)(void *, int, CUdeviceptr);
    static bool resolved;
    *look = (struct fakecuda_look){-1, -1, 0};
    pthread_mutex_lock(&lock);
    void *cuda = resolved ? NULL : dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (cuda) {
        fake = dlsym(cuda, "fakecuda_look");
        get_current = dlsym(cuda, "cuCtxGetCurrent");
        get_device = dlsym(cuda, "cuCtxGetDevice");
        get_attribute = dlsym(cuda, "cuPointerGetAttribute");
        resolved = true;
    }
    bool known = resolved;
    pthread_mutex_unlock(&lock);
    if (!known)
        return;
    CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)address;
    if (fake) {
        fake(pointer, look);
        return;
    }
    CUcontext current = NULL, owner = NULL;
    if (!get_current(&current) && current)
        get_device(&look->current);
    if (get_attribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, pointer) ||
        get_attribute(&look->owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer))
        look->owner = -1;
    look->right = look->owner >= 0 && current && (owner ? owner == current : look->owner == look->current);
}

static const char *device_text(int device, char text[12])
{
    snprintf(text, 12, device < 0 ? "null" : "%d", device);
    return text;
}

static const char *verdict_of(const struct fakecuda_look *look)
{
    return look->owner < 0 ? "host" : look->right ? "right" : look->current < 0 ? "none" : "wrong";
}

static void record(const char *op, const void *buf, size_t len, const struct fakecuda_look *look,
                   const char *verdict, long rc)
{
    if (posts_fd < 0)
        return;
    char line[320], owner[12], current[12];
    int n = snprintf(line, sizeof line,
                     "{\"op\":\"%s\",\"pid\":%d,\"tid\":%ld,\"buf\":%llu,\"len\":%zu,\"owner\":%s,\"current\":%s,"
                     "\"verdict\":\"%s\",\"rc\":%ld}\n",
                     op, getpid(), (long)syscall(SYS_gettid), (unsigned long long)(uintptr_t)buf, len,
                     device_text(look->owner, owner), device_text(look->current, current), verdict, rc);
    if (write(posts_fd, line, (size_t)n) < 0) /* one write per line: O_APPEND keeps lines whole */
        return;
}

/* ---- operation tables -------------------------------------------------------------------------------- */

/* A provider shares one table between all its objects, so each table is copied once, and never freed. The
 * copy keeps the provider's size: it may be newer than our headers. */
struct table {
    struct table *next;
    const void *original;
    char copy[]; /* the fi_ops_*, which begins with its size */
};

static void *copy_of(const void *original)
{
    static struct table *tables;
    pthread_mutex_lock(&lock);
    struct table *t = tables;
    while (t && t->original != original && t->copy != original)
        t = t->next;
    if (!t) {
        size_t size = *(const size_t *)original;
        t = malloc(sizeof *t + size);
        if (!t)
            abort();
        t->original = original;
        memcpy(t->copy, original, size);
        t->next = tables, tables = t;
    }
    pthread_mutex_unlock(&lock);
    return t->copy;
}

static const void *original_of(const void *copy)
{
    return ((const struct table *)(const void *)((const char *)copy - offsetof(struct table, copy)))->original;
}

#define ORIGINAL(type, table) ((const type *)original_of(table))

/* ---- posts ------------------------------------------------------------------------------------------- */

/* The context is looked at BEFORE calling down: libfabric's own copy makes device 0 current in a bare thread. */
#define RECORDED(op, buf, len, call)                          \
    struct fakecuda_look look;                                \
    look_at((buf), &look);                                    \
    ssize_t rc = (call);                                      \
    record((op), (buf), (len), &look, verdict_of(&look), rc); \
    return rc

static ssize_t post_write(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t to, uint64_t addr,
                          uint64_t key, void *context)
{
    RECORDED("write", buf, len,
             ORIGINAL(struct fi_ops_rma, ep->rma)->write(ep, buf, len, desc, to, addr, key, context));
}

static ssize_t post_writedata(struct fid_ep *ep, const void *buf, size_t len, void *desc, uint64_t data,
                              fi_addr_t to, uint64_t addr, uint64_t key, void *context)
{
    RECORDED("write", buf, len,
             ORIGINAL(struct fi_ops_rma, ep->rma)->writedata(ep, buf, len, desc, data, to, addr, key, context));
}

/* shm knows no FI_MORE. */
static ssize_t post_writemsg(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags)
{
    RECORDED("write", msg->msg_iov[0].iov_base, msg->msg_iov[0].iov_len,
             ORIGINAL(struct fi_ops_rma, ep->rma)->writemsg(ep, msg, flags & ~FI_MORE));
}

static ssize_t post_read(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t from, uint64_t addr,
                         uint64_t key, void *context)
{
    RECORDED("read", buf, len,
             ORIGINAL(struct fi_ops_rma, ep->rma)->read(ep, buf, len, desc, from, addr, key, context));
}

static ssize_t post_readmsg(struct fid_ep *ep, const struct fi_msg_rma *msg, uint64_t flags)
{
    RECORDED("read", msg->msg_iov[0].iov_base, msg->msg_iov[0].iov_len,
             ORIGINAL(struct fi_ops_rma, ep->rma)->readmsg(ep, msg, flags & ~FI_MORE));
}

/* FI_OPT_EFA_*, in the provider's own range, mean nothing to shm. */
static int set_option(fid_t fid, int level, int option, const void *value, size_t length)
{
    if (option < 0)
        return 0;
    struct fid_ep *ep = (struct fid_ep *)fid;
    return ORIGINAL(struct fi_ops_ep, ep->ops)->setopt(fid, level, option, value, length);
}

/* ---- completions ------------------------------------------------------------------------------------- */

/* A completion names no buffer. The owner recorded is the device of all GPU memory registered in this
 * process, as long as that is one device: enough to see on whose behalf a progress thread works. */
static struct {
    const void *address; /* some registered GPU memory */
    int device;
    bool several;
} registered = {.device = -1};

static void remember_registered(const void *address, int device)
{
    if (device < 0)
        return;
    pthread_mutex_lock(&lock);
    registered.several |= registered.device >= 0 && registered.device != device;
    registered.address = address, registered.device = device;
    pthread_mutex_unlock(&lock);
}

static ssize_t completed(ssize_t count)
{
    if (count <= 0)
        return count;
    struct fakecuda_look look;
    pthread_mutex_lock(&lock);
    const void *address = registered.address;
    bool several = registered.several;
    pthread_mutex_unlock(&lock);
    look_at(address, &look);
    if (several)
        look.owner = -1;
    record("completion", NULL, 0, &look, several ? "unknown" : verdict_of(&look), count);
    return count;
}

static ssize_t cq_read(struct fid_cq *cq, void *buf, size_t count)
{
    return completed(ORIGINAL(struct fi_ops_cq, cq->ops)->read(cq, buf, count));
}

static ssize_t cq_readfrom(struct fid_cq *cq, void *buf, size_t count, fi_addr_t *from)
{
    return completed(ORIGINAL(struct fi_ops_cq, cq->ops)->readfrom(cq, buf, count, from));
}

static ssize_t cq_sread(struct fid_cq *cq, void *buf, size_t count, const void *condition, int timeout)
{
    return completed(ORIGINAL(struct fi_ops_cq, cq->ops)->sread(cq, buf, count, condition, timeout));
}

/* ---- memory registration ------------------------------------------------------------------------------ */

/* NIXL expects keys chosen by the provider, as efa does; shm wants them chosen by the caller. */
static uint64_t next_key(void)
{
    static uint64_t key;
    return __atomic_add_fetch(&key, 1, __ATOMIC_RELAXED);
}

static int mr_reg(struct fid *domain, const void *buf, size_t len, uint64_t access, uint64_t offset, uint64_t key,
                  uint64_t flags, struct fid_mr **mr, void *context)
{
    (void)key;
    return ORIGINAL(struct fi_ops_mr, ((struct fid_domain *)domain)->mr)
        ->reg(domain, buf, len, access, offset, next_key(), flags, mr, context);
}

static int mr_regattr(struct fid *domain, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr)
{
    const struct fi_ops_mr *original = ORIGINAL(struct fi_ops_mr, ((struct fid_domain *)domain)->mr);
    struct fi_mr_attr changed = *attr;
    changed.requested_key = next_key();
    if (attr->iface == FI_HMEM_SYSTEM)
        return original->regattr(domain, &changed, flags, mr);
    if (!keep_hmem)
        changed.iface = FI_HMEM_SYSTEM;
    else
        flags |= FI_HMEM_DEVICE_ONLY; /* as the efa provider tells shm; without it shm never tries CUDA IPC */
    struct fakecuda_look look;
    look_at(attr->mr_iov[0].iov_base, &look);
    int rc = original->regattr(domain, &changed, flags, mr);
    if (!rc)
        remember_registered(attr->mr_iov[0].iov_base, look.owner);
    record("register", attr->mr_iov[0].iov_base, attr->mr_iov[0].iov_len, &look,
           verdict_of(&look), rc);
    return rc;
}

/* ---- opening: fabric -> domain -> endpoint, completion queue ------------------------------------------- */

/* NIXL hands back the info it was shown; shm must see its own. A stack copy, valid during one call. */
struct shm_info {
    struct fi_info info;
    struct fi_fabric_attr fabric;
    struct fi_domain_attr domain;
};

static struct fi_info *as_shm(struct shm_info *out, const struct fi_info *shown)
{
    out->info = *shown, out->fabric = *shown->fabric_attr, out->domain = *shown->domain_attr;
    out->fabric.prov_name = "shm";
    out->domain.name = "shm";
    out->info.fabric_attr = &out->fabric, out->info.domain_attr = &out->domain;
    out->info.nic = NULL, out->info.next = NULL;
    return &out->info;
}

static int open_cq(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context)
{
    int rc = ORIGINAL(struct fi_ops_domain, domain->ops)->cq_open(domain, attr, cq, context);
    if (rc)
        return rc;
    struct fi_ops_cq *ops = copy_of((*cq)->ops);
    ops->read = cq_read, ops->readfrom = cq_readfrom, ops->sread = cq_sread;
    (*cq)->ops = ops;
    return 0;
}

static int open_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context)
{
    struct shm_info shm;
    int rc = ORIGINAL(struct fi_ops_domain, domain->ops)->endpoint(domain, as_shm(&shm, info), ep, context);
    if (rc)
        return rc;
    struct fi_ops_rma *rma = copy_of((*ep)->rma);
    rma->write = post_write, rma->writedata = post_writedata, rma->writemsg = post_writemsg;
    rma->read = post_read, rma->readmsg = post_readmsg;
    (*ep)->rma = rma;
    struct fi_ops_ep *ops = copy_of((*ep)->ops);
    ops->setopt = set_option;
    (*ep)->ops = ops;
    return 0;
}

static int open_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context)
{
    struct shm_info shm;
    int rc = ORIGINAL(struct fi_ops_fabric, fabric->ops)->domain(fabric, as_shm(&shm, info), domain, context);
    if (rc)
        return rc;
    struct fi_ops_domain *ops = copy_of((*domain)->ops);
    ops->endpoint = open_endpoint, ops->cq_open = open_cq;
    (*domain)->ops = ops;
    struct fi_ops_mr *mr = copy_of((*domain)->mr);
    mr->reg = mr_reg, mr->regattr = mr_regattr;
    (*domain)->mr = mr;
    return 0;
}

int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context)
{
    pthread_once(&started, start);
    if (!attr->prov_name || strcmp(attr->prov_name, "efa"))
        return libfabric.fabric(attr, fabric, context);
    struct fi_fabric_attr shm = *attr;
    shm.prov_name = "shm";
    int rc = libfabric.fabric(&shm, fabric, context);
    if (rc)
        return rc;
    struct fi_ops_fabric *ops = copy_of((*fabric)->ops);
    ops->domain = open_domain;
    (*fabric)->ops = ops;
    return 0;
}

/* ---- discovery --------------------------------------------------------------------------------------- */

static struct fid_nic *new_nic(int index);

static int nic_close(struct fid *fid)
{
    struct fid_nic *nic = (struct fid_nic *)fid;
    free(nic->device_attr);
    free(nic->bus_attr);
    free(nic->link_attr);
    free(nic);
    return 0;
}

static int nic_control(struct fid *fid, int command, void *arg)
{
    struct fid_nic *nic = (struct fid_nic *)fid;
    if (command != FI_DUP)
        return -FI_ENOSYS;
    *(struct fid_nic **)arg = new_nic(nic->bus_attr->attr.pci.bus_id - 0x20);
    return 0;
}

/* EFA i sits at PCI address 0000:(0x20 + i):00.0, as in topo.xml: NIXL pairs GPUs and EFAs by it. */
static struct fid_nic *new_nic(int index)
{
    static struct fi_ops ops = {.size = sizeof ops, .close = nic_close, .control = nic_control};
    struct fid_nic *nic = calloc(1, sizeof *nic);
    if (!nic || !(nic->device_attr = calloc(1, sizeof *nic->device_attr)) ||
        !(nic->bus_attr = calloc(1, sizeof *nic->bus_attr)) || !(nic->link_attr = calloc(1, sizeof *nic->link_attr)))
        abort();
    nic->fid.fclass = FI_CLASS_NIC;
    nic->fid.ops = &ops;
    nic->bus_attr->bus_type = FI_BUS_PCI;
    nic->bus_attr->attr.pci.bus_id = (uint8_t)(0x20 + index);
    nic->link_attr->speed = 100000000000u;
    nic->link_attr->mtu = 8928;
    nic->link_attr->state = FI_LINK_UP;
    return nic;
}

static void set_string(char **field, const char *text)
{
    free(*field);
    *field = text ? strdup(text) : NULL;
}

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
               const struct fi_info *hints, struct fi_info **shown)
{
    pthread_once(&started, start);
    const char *provider = hints && hints->fabric_attr ? hints->fabric_attr->prov_name : NULL;
    const char *domain = hints && hints->domain_attr ? hints->domain_attr->name : NULL;
    int first = 0, end = efas;
    bool ours = hints && hints->fabric_attr && hints->domain_attr && (!provider || !strcmp(provider, "efa"));
    if (ours && domain) {
        ours = !strncmp(domain, DEVICE_PREFIX, strlen(DEVICE_PREFIX));
        first = ours ? atoi(domain + strlen(DEVICE_PREFIX)) : 0;
        end = first + 1;
    }
    if (!ours)
        return libfabric.getinfo(version, node, service, flags, hints, shown);

    struct fi_info *wanted = libfabric.dupinfo(hints), *shm = NULL, **tail = shown;
    set_string(&wanted->fabric_attr->prov_name, "shm");
    set_string(&wanted->domain_attr->name, NULL);
    wanted->caps &= ~FI_REMOTE_COMM; /* shm reaches this machine only */
    int rc = libfabric.getinfo(version, node, service, flags, wanted, &shm);
    libfabric.freeinfo(wanted);
    if (rc)
        return rc;
    *shown = NULL;
    for (int i = first; i < end; i++) {
        char name[32];
        struct fi_info *info = libfabric.dupinfo(shm);
        snprintf(name, sizeof name, DEVICE_PREFIX "%d-rdm", i);
        set_string(&info->fabric_attr->prov_name, "efa");
        set_string(&info->domain_attr->name, name);
        info->nic = new_nic(i);
        info->next = NULL;
        *tail = info, tail = &info->next;
    }
    libfabric.freeinfo(shm);
    return 0;
}
