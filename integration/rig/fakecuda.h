/* SPDX-License-Identifier: Apache-2.0
 *
 * What the fake driver offers to tests beside CUDA's own functions. Call them in the process under test:
 *     ctypes.CDLL("libcuda.so.1").fakecuda_fail(b"cuCtxSetCurrent", 201, 2, 1)
 * Names are the exported ones without a version suffix: "cuMemAlloc" stands for cuMemAlloc_v2 too.
 */
#ifndef CTXFIX_RIG_FAKECUDA_H
#define CTXFIX_RIG_FAKECUDA_H

#include "cuda_abi.h"

/* After `after` more calls of `name`, the next `times` calls return `error` and do nothing (times 0: for
 * ever). Several rules may be set; fakecuda_fail(NULL, 0, 0, 0) removes all. Returns 0, or 1 when the table
 * is full.
 * At start: FAKECUDA_FAIL="name:error[:first[:times]],...", where `first` counts calls from 1. */
int fakecuda_fail(const char *name, int error, unsigned after, unsigned times);

/* Calls so far of one driver function, or of all of them together (name NULL; looking up functions with
 * cuGetProcAddress is left out of that). Calls that the fake runtime makes count too. */
unsigned long fakecuda_calls(const char *name);
void fakecuda_reset_calls(void);

/* Living contexts of a device (an active primary context counts as one) and how often its primary context
 * is retained. Neither needs cuInit. */
int fakecuda_contexts(int device);
int fakecuda_retained(int device);

/* Depth of the calling thread's context stack. */
int fakecuda_stack_depth(void);

/* What the loopback fabric records about one address: -1 where there is no device. `right` is 1 when the
 * calling thread's context is the one that owns the address (for memory without a context: a context of its
 * device). Counts as no call and never fails on demand. */
struct fakecuda_look {
    int owner, current, right;
};
void fakecuda_look(CUdeviceptr address, struct fakecuda_look *look);

#endif
