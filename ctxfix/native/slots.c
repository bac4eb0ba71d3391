/* SPDX-License-Identifier: Apache-2.0 */
/* Import slots of loaded ELF objects: found, replaced, put back.
 *
 * A slot is the word that an object's own relocation (JUMP_SLOT, GLOB_DAT; in libfabric also plain 64-bit pointers)
 * filled with the address of an imported function. Only such words are written: no code, no symbol table.
 *
 * The walk runs inside dl_iterate_phdr, so under the loader's list lock: nothing is unmapped meanwhile. An object that
 * another thread's dlopen has mapped but not yet relocated is visible there too; its slots still hold file offsets.
 * Those are left alone and looked at again: the loader adds the load address to a lazy slot, so one written too early
 * would end up as nonsense. No function of the loader may be called inside the walk, nor with our lock held. */
#define _GNU_SOURCE
#include "native.h"

atomic_bool cx_off;

#if CX_SUPPORTED
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { R_JUMP = R_X86_64_JUMP_SLOT, R_GOT = R_X86_64_GLOB_DAT, R_DATA = R_X86_64_64 };
#else
enum { R_JUMP = R_AARCH64_JUMP_SLOT, R_GOT = R_AARCH64_GLOB_DAT, R_DATA = R_AARCH64_ABS64 };
#endif

struct cx_slot_counts cx_slot_counts;
atomic_int cx_fault_mprotect, cx_fault_malloc;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
void cx_lock(void) { pthread_mutex_lock(&lock); }
void cx_unlock(void) { pthread_mutex_unlock(&lock); }

static struct { struct cx_rule *rules; size_t n; } sets[4];
static size_t nsets;
static bool first_letter[256];

void cx_rules_add(struct cx_rule *rules, size_t n)
{
	sets[nsets].rules = rules;
	sets[nsets++].n = n;
	for (size_t i = 0; i < n; i++)
		first_letter[(unsigned char)rules[i].symbol[0]] = true;
}

void *cx_one_hook(struct cx_rule *rule, void *current)
{
	void *original = atomic_load(&rule->original);
	/* Somebody else's interposer sits in this slot: it is not ours to bypass. */
	if (original && current != original)
		return NULL;
	atomic_store(&rule->original, current);
	return rule->hook;
}

void *cx_one_original(struct cx_rule *rule, void *value)
{
	return value == rule->hook ? atomic_load(&rule->original) : NULL;
}

/* ---- growing lists --------------------------------------------------------------------------------------- */

struct list { uintptr_t *at; size_t n, room; };
static struct list done;    /* objects walked to the end, by the address of their dynamic section */
static struct list patched; /* slots that we wrote */

static bool list_has(const struct list *l, uintptr_t x)
{
	for (size_t i = 0; i < l->n; i++)
		if (l->at[i] == x)
			return true;
	return false;
}

static bool list_add(struct list *l, uintptr_t x)
{
	if (l->n == l->room) {
		size_t room = l->room ? 2 * l->room : 64;
		uintptr_t *at = realloc(l->at, room * sizeof *at);
		if (!at)
			return false;
		l->at = at;
		l->room = room;
	}
	l->at[l->n++] = x;
	return true;
}

/* ---- writing a slot -------------------------------------------------------------------------------------- */

/* Protection of the page at `address`, from /proc/self/maps; -1 if it cannot be told. */
static int protection(uintptr_t address)
{
	char buffer[4096];
	size_t have = 0;
	int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), found = -1;
	if (fd < 0)
		return -1;
	for (;;) {
		ssize_t got = read(fd, buffer + have, sizeof buffer - 1 - have);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			break;
		have += (size_t)got;
		buffer[have] = 0;
		char *line = buffer, *end;
		while (found < 0 && (end = strchr(line, '\n'))) {
			char *p;
			uintptr_t low = strtoull(line, &p, 16), high = *p == '-' ? strtoull(p + 1, &p, 16) : 0;
			if (*p == ' ' && address >= low && address < high)
				found = (p[1] == 'r' ? PROT_READ : 0) | (p[2] == 'w' ? PROT_WRITE : 0) |
					(p[3] == 'x' ? PROT_EXEC : 0);
			line = end + 1;
		}
		if (found >= 0)
			break;
		have -= (size_t)(line - buffer);
		memmove(buffer, line, have);
		if (have == sizeof buffer - 1) /* a path longer than the buffer: its head was read, drop the rest */
			have = 0;
	}
	close(fd);
	return found;
}

static int protect(uintptr_t page, size_t size, int prot)
{
	if (atomic_load(&cx_fault_mprotect)) {
		errno = EPERM;
		return -1;
	}
	return mprotect((void *)page, size, prot);
}

static bool write_slot(void **slot, void *value)
{
	size_t size = (size_t)sysconf(_SC_PAGESIZE);
	uintptr_t page = (uintptr_t)slot & ~(uintptr_t)(size - 1);
	int prot = protection((uintptr_t)slot);
	bool closed = prot < 0 || !(prot & PROT_WRITE);
	if (prot < 0)
		prot = PROT_READ;
	if (closed && protect(page, size, prot | PROT_WRITE)) {
		atomic_store(&cx_slot_counts.last_errno, errno);
		atomic_fetch_add(&cx_slot_counts.write_failures, 1);
		return false;
	}
	__atomic_store_n(slot, value, __ATOMIC_RELEASE);
	if (closed && protect(page, size, prot)) {
		atomic_store(&cx_slot_counts.last_errno, errno);
		atomic_fetch_add(&cx_slot_counts.protect_failures, 1);
	}
	return true;
}

/* ---- which objects --------------------------------------------------------------------------------------- */

static char *late_words[16];
static size_t nlate;

int cx_set_late(const char *const *words, size_t n)
{
	char *copy[16];
	if (n > 16)
		return -1;
	for (size_t i = 0; i < n; i++)
		if (!(copy[i] = strdup(words[i]))) {
			while (i)
				free(copy[--i]);
			return -1;
		}
	cx_lock();
	for (size_t i = 0; i < nlate; i++)
		free(late_words[i]);
	memcpy(late_words, copy, n * sizeof *copy);
	nlate = n;
	done.n = 0; /* look at every object again */
	cx_unlock();
	return 0;
}

static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

static bool excluded(const char *name)
{
	static const char *const prefixes[] = {
		"libc.so", "libc-", "libpthread", "libdl.so", "libdl-", "ld-linux", "ld-", "ld.so", "linux-vdso", "linux-gate",
		"libcuda", "libnvidia", "libcupti", "libnvrtc", "libnvJitLink", "libtsan", "libasan", "liblsan", "libubsan",
		"vgpreload_", "libdebuginfod",
	};
	for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
		if (!strncmp(name, prefixes[i], strlen(prefixes[i])))
			return true;
	return false;
}

static bool applies(const struct cx_rule *rule, const char *name)
{
	bool fabric = strstr(name, "libfabric") != NULL;
	switch (rule->where) {
	case CX_ANYWHERE:
		return true;
	case CX_ELSEWHERE:
		return !fabric;
	case CX_FABRIC:
		return fabric;
	case CX_PLUGIN:
		return strstr(name, "plugin_LIBFABRIC") != NULL;
	case CX_LATE:
		for (size_t i = 0; i < nlate; i++)
			if (strstr(name, late_words[i]))
				return true;
	}
	return false;
}

/* ---- the walk -------------------------------------------------------------------------------------------- */

/* An unresolved slot whose original nobody knows yet: resolved after the walk, then the walk is repeated. */
struct wanted { struct cx_rule *rule; char object[1024]; };

struct walk {
	bool undo, incomplete, fabric_met;
	bool counted;
	unsigned long long adds, subs;
	struct wanted wanted[8];
	size_t nwanted;
};

static unsigned long long seen_adds, seen_subs; /* of the last complete walk */

struct object {
	const char *name;
	uintptr_t base, low, high; /* load bias, first and last mapped byte */
	const ElfW(Sym) *symbols;
	const char *strings;
	const ElfW(Rela) *tables[2];
	size_t counts[2];
};

static bool inside(const struct object *o, uintptr_t x) { return x >= o->low && x < o->high; }

static bool open_object(struct object *o, const struct dl_phdr_info *info, uintptr_t *dynamic)
{
	const ElfW(Dyn) *d = NULL;
	memset(o, 0, sizeof *o);
	o->name = base_name(info->dlpi_name ? info->dlpi_name : "");
	o->base = info->dlpi_addr;
	o->low = UINTPTR_MAX;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];
		uintptr_t at = o->base + p->p_vaddr;
		if (p->p_type == PT_DYNAMIC)
			d = (const ElfW(Dyn) *)at;
		if (p->p_type == PT_LOAD) {
			o->low = at < o->low ? at : o->low;
			o->high = at + p->p_memsz > o->high ? at + p->p_memsz : o->high;
		}
	}
	if (!d)
		return false;
	*dynamic = (uintptr_t)d;
	size_t plt = 0, rela = 0, each = sizeof(ElfW(Rela));
	for (; d->d_tag != DT_NULL; d++) {
		uintptr_t at = d->d_un.d_ptr;
		if (at < o->base) /* the vdso and some loaders leave these unrelocated */
			at += o->base;
		switch (d->d_tag) {
		case DT_SYMTAB: o->symbols = (const void *)at; break;
		case DT_STRTAB: o->strings = (const void *)at; break;
		case DT_JMPREL: o->tables[0] = (const void *)at; break;
		case DT_RELA: o->tables[1] = (const void *)at; break;
		case DT_PLTRELSZ: plt = d->d_un.d_val; break;
		case DT_RELASZ: rela = d->d_un.d_val; break;
		case DT_RELAENT: each = d->d_un.d_val; break;
		case DT_PLTREL:
			if (d->d_un.d_val != DT_RELA)
				return false;
			break;
		default: break;
		}
	}
	if (!o->symbols || !o->strings || each != sizeof(ElfW(Rela)) || !inside(o, (uintptr_t)o->symbols) ||
	    !inside(o, (uintptr_t)o->strings))
		return false;
	o->counts[0] = o->tables[0] && inside(o, (uintptr_t)o->tables[0]) ? plt / each : 0;
	o->counts[1] = o->tables[1] && inside(o, (uintptr_t)o->tables[1]) ? rela / each : 0;
	return true;
}

static void put_back(struct cx_rule *rule, void **slot, void *value)
{
	void *original = rule->original_of(rule, value);
	if (original) {
		if (write_slot(slot, original))
			atomic_fetch_add(&cx_slot_counts.restored, 1);
		else
			atomic_fetch_add(&cx_slot_counts.left, 1);
	} else if (list_has(&patched, (uintptr_t)slot)) {
		atomic_fetch_add(&cx_slot_counts.left, 1); /* somebody hooked it after us */
	}
}

static void hook_slot(struct walk *w, const struct dl_phdr_info *info, const struct object *o, struct cx_rule *rule,
		      void **slot, void *value)
{
	if (rule->original_of(rule, value))
		return;
	if (o->base && (uintptr_t)value < o->high - o->low) { /* not relocated yet, see above */
		w->incomplete = true;
		return;
	}
	void *current = value;
	if (inside(o, (uintptr_t)value)) { /* the object's own stub: bound at the first call */
		current = atomic_load(&rule->original);
		if (!current) {
			if (w->nwanted < sizeof w->wanted / sizeof *w->wanted && strlen(info->dlpi_name) < sizeof w->wanted->object) {
				w->wanted[w->nwanted].rule = rule;
				strcpy(w->wanted[w->nwanted++].object, info->dlpi_name);
			}
			w->incomplete = true;
			return;
		}
	}
	void *hook = rule->hook_for(rule, current);
	if (!hook) {
		atomic_fetch_add(&cx_slot_counts.foreign, 1);
		return;
	}
	if (!write_slot(slot, hook))
		return;
	atomic_fetch_add(&cx_slot_counts.patched, 1);
	if (!list_has(&patched, (uintptr_t)slot))
		list_add(&patched, (uintptr_t)slot); /* only for the report: undo finds our hooks without it */
}

static void visit_relocation(struct walk *w, const struct dl_phdr_info *info, const struct object *o,
			     const ElfW(Rela) *r)
{
	unsigned type = ELF64_R_TYPE(r->r_info);
	size_t index = ELF64_R_SYM(r->r_info);
	if (!index || (type != R_JUMP && type != R_GOT && type != R_DATA))
		return;
	const ElfW(Sym) *symbol = &o->symbols[index];
	const char *name = o->strings + symbol->st_name;
	/* An object that defines the function itself is an interposer; its own calls are its own business. */
	if (symbol->st_shndx != SHN_UNDEF || !first_letter[(unsigned char)name[0]])
		return;
	if (type == R_DATA && (r->r_addend || !strstr(o->name, "libfabric")))
		return;
	for (size_t s = 0; s < nsets; s++)
		for (size_t i = 0; i < sets[s].n; i++) {
			struct cx_rule *rule = &sets[s].rules[i];
			if (strcmp(name, rule->symbol) || !applies(rule, o->name))
				continue;
			void **slot = (void **)(o->base + r->r_offset);
			void *value = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
			if (!value) /* a weak import that nobody provides: code tests it for NULL */
				continue;
			if (w->undo)
				put_back(rule, slot, value);
			else
				hook_slot(w, info, o, rule, slot, value);
		}
}

static int visit_object(struct dl_phdr_info *info, size_t size, void *arg)
{
	struct walk *w = arg;
	struct object o;
	uintptr_t dynamic;
	if (!w->counted) {
		w->counted = true;
		w->adds = w->subs = 1;
		if (size >= offsetof(struct dl_phdr_info, dlpi_subs) + sizeof info->dlpi_subs) {
			w->adds = info->dlpi_adds;
			w->subs = info->dlpi_subs;
			if (!w->undo && w->adds == seen_adds && w->subs == seen_subs && done.n)
				return 1;
			if (w->subs != seen_subs)
				done.n = 0; /* something was unloaded: addresses may be another object's now */
		}
	}
	if (!open_object(&o, info, &dynamic) || excluded(o.name) || inside(&o, (uintptr_t)&visit_object))
		return 0;
	if (!w->undo && list_has(&done, dynamic))
		return 0;
	bool before = w->incomplete;
	w->incomplete = false;
	for (int t = 0; t < 2; t++)
		for (size_t i = 0; i < o.counts[t]; i++)
			visit_relocation(w, info, &o, &o.tables[t][i]);
	if (!w->undo && !w->incomplete) {
		list_add(&done, dynamic);
		atomic_fetch_add(&cx_slot_counts.objects, 1);
		if (strstr(o.name, "libfabric"))
			w->fabric_met = true;
	}
	w->incomplete |= before;
	return 0;
}

static void walk(struct walk *w)
{
	cx_lock();
	dl_iterate_phdr(visit_object, w);
	if (!w->undo && !w->incomplete) {
		seen_adds = w->adds;
		seen_subs = w->subs;
	}
	cx_unlock();
}

void cx_scan(void)
{
	bool fabric_met = false;
	atomic_fetch_add(&cx_slot_counts.scans, 1);
	for (int round = 0; round < 3; round++) {
		struct walk w = { .undo = false };
		walk(&w);
		fabric_met |= w.fabric_met;
		bool resolved = false;
		for (size_t i = 0; i < w.nwanted; i++) {
			/* What the loader would bind the stub to: the object's own scope, its dependencies. */
			void *lib = dlopen(w.wanted[i].object[0] ? w.wanted[i].object : NULL, RTLD_LAZY | RTLD_NOLOAD);
			void *f = dlsym(RTLD_DEFAULT, w.wanted[i].rule->symbol);
			void *expected = NULL;
			if (!f && lib)
				f = dlsym(lib, w.wanted[i].rule->symbol);
			if (lib)
				dlclose(lib);
			if (f && atomic_compare_exchange_strong(&w.wanted[i].rule->original, &expected, f))
				resolved = true;
		}
		if (!resolved)
			break;
	}
	if (fabric_met)
		cx_fabric_adopt();
}

void cx_undo(void)
{
	struct walk w = { .undo = true };
	atomic_store(&cx_slot_counts.restored, 0);
	atomic_store(&cx_slot_counts.left, 0);
	walk(&w);
	cx_lock();
	patched.n = 0;
	done.n = 0;
	seen_adds = seen_subs = 0;
	cx_unlock();
}
#endif
