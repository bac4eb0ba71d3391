/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA runtime (libcudart.so.12 and .13) on top of the fake driver. What matters is the one habit that the
 * bug is made of: a thread with no context gets device 0 on its next use, also one that once chose another (the
 * choice is nothing but the context it makes current).
 */
#include "cuda_abi.h"

#include <pthread.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef int cudaError_t;

/* The driver, linked as libcuda.so.1. */
CUresult cuInit(unsigned);
CUresult cuDeviceGetCount(int *);
CUresult cuDeviceGetPCIBusId(char *, int, CUdevice);
CUresult cuDeviceGetByPCIBusId(CUdevice *, const char *);
CUresult cuDeviceGetAttribute(int *, int, CUdevice);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice);
CUresult cuDevicePrimaryCtxReset_v2(CUdevice);
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *, int *);
CUresult cuCtxGetCurrent(CUcontext *);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxGetDevice(CUdevice *);
CUresult cuCtxSynchronize(void);
CUresult cuGetErrorName(CUresult, const char **);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemcpy(CUdeviceptr, CUdeviceptr, size_t);
CUresult cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t);
CUresult cuPointerGetAttributes(unsigned, const int *, void **, CUdeviceptr);
CUresult cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr);
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned);
CUresult cuIpcCloseMemHandle(CUdeviceptr);

enum { MAX_DEVICES = 16 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext retained[MAX_DEVICES]; /* the runtime retains a primary context once, not per call */
static _Thread_local cudaError_t last_error;

static cudaError_t done(CUresult result)
{
    if (result)
        last_error = result;
    return result;
}

static CUresult bind(int device)
{
    CUresult result = cuInit(0);
    CUcontext context = NULL;
    unsigned flags;
    int active = 0;
    if (result)
        return result;
    if (device < 0 || device >= MAX_DEVICES)
        return 101;
    pthread_mutex_lock(&lock);
    result = cuDevicePrimaryCtxGetState(device, &flags, &active);
    if (!result && retained[device] && !active) { /* someone reset it: let go, and take it again */
        cuDevicePrimaryCtxRelease_v2(device);
        retained[device] = NULL;
    }
    if (!result && !retained[device])
        result = cuDevicePrimaryCtxRetain(&retained[device], device);
    context = retained[device];
    pthread_mutex_unlock(&lock);
    return result ? result : cuCtxSetCurrent(context);
}

/* What nearly every runtime call does first. */
static CUresult need_context(void)
{
    CUcontext context = NULL;
    CUresult result = cuInit(0);
    if (!result)
        result = cuCtxGetCurrent(&context);
    return result || context ? result : bind(0);
}

API cudaError_t cudaSetDevice(int device)
{
    return done(bind(device));
}

API cudaError_t cudaGetDevice(int *device)
{
    CUcontext context = NULL;
    if (cuCtxGetCurrent(&context) || !context || cuCtxGetDevice(device))
        *device = 0;
    return 0;
}

API cudaError_t cudaGetDeviceCount(int *count)
{
    CUresult result = cuInit(0);
    return done(result ? result : cuDeviceGetCount(count));
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    CUresult result = cuInit(0);
    return done(result ? result : cuDeviceGetPCIBusId(text, length, device));
}

API cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text)
{
    CUresult result = cuInit(0);
    return done(result ? result : cuDeviceGetByPCIBusId(device, text));
}

API cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    CUresult result = cuInit(0);
    return done(result ? result : cuDeviceGetAttribute(value, attribute, device));
}

API cudaError_t cudaDeviceSynchronize(void)
{
    CUresult result = need_context();
    return done(result ? result : cuCtxSynchronize());
}

API cudaError_t cudaDeviceReset(void)
{
    int device = 0;
    cudaGetDevice(&device);
    return done(cuDevicePrimaryCtxReset_v2(device));
}

API const char *cudaGetErrorName(cudaError_t error)
{
    const char *name = "cudaErrorUnknown";
    cuGetErrorName(error, &name);
    return name;
}

API const char *cudaGetErrorString(cudaError_t error)
{
    return cudaGetErrorName(error);
}

API cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

API cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = 0;
    return error;
}

API cudaError_t cudaMalloc(void **address, size_t bytes)
{
    CUresult result = need_context();
    return done(result ? result : cuMemAlloc_v2((CUdeviceptr *)address, bytes));
}

struct pointer_attributes {
    int type; /* 0: not CUDA's, 1: host, 2: device, 3: managed */
    int device;
    void *on_device, *on_host;
};

/* Makes nothing current. */
API cudaError_t cudaPointerGetAttributes(struct pointer_attributes *out, const void *address)
{
    int device = 0;
    unsigned type = 0, managed = 0;
    CUresult result = cuInit(0);
    int which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                   CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void *values[] = {&type, &managed, &device};
    if (!result)
        result = cuPointerGetAttributes(3, which, values, (CUdeviceptr)address);
    if (!result) {
        void *same = (void *)(uintptr_t)address;
        out->type = managed ? 3 : (int)type;
        out->device = device;
        out->on_device = type ? same : NULL;
        out->on_host = type == CU_MEMORYTYPE_DEVICE && !managed ? NULL : same;
    }
    return done(result);
}

API cudaError_t cudaFree(void *address)
{
    CUresult result = need_context(); /* cudaFree(0) is the usual way to make a context */
    return done(result || !address ? result : cuMemFree_v2((CUdeviceptr)address));
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
    (void)kind;
    CUresult result = need_context();
    return done(result ? result : cuMemcpy((CUdeviceptr)to, (CUdeviceptr)from, bytes));
}

API cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    CUresult result = need_context();
    return done(result ? result : cuMemsetD8_v2((CUdeviceptr)to, (unsigned char)value, bytes));
}

API cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags)
{
    (void)address, (void)bytes, (void)flags;
    return done(need_context());
}

API cudaError_t cudaHostUnregister(void *address)
{
    (void)address;
    return done(need_context());
}

API cudaError_t cudaIpcGetMemHandle(CUipcMemHandle *handle, void *address)
{
    CUresult result = need_context();
    return done(result ? result : cuIpcGetMemHandle(handle, (CUdeviceptr)address));
}

API cudaError_t cudaIpcOpenMemHandle(void **address, CUipcMemHandle handle, unsigned flags)
{
    CUresult result = need_context();
    return done(result ? result : cuIpcOpenMemHandle_v2((CUdeviceptr *)address, handle, flags));
}

API cudaError_t cudaIpcCloseMemHandle(void *address)
{
    CUresult result = need_context();
    return done(result ? result : cuIpcCloseMemHandle((CUdeviceptr)address));
}

/* Imported by NIXL's UCX modules, never called on a machine without a GPU. */
#define NOT_HERE(name)           \
    API cudaError_t name(void)   \
    {                            \
        return done(801);        \
    }
NOT_HERE(cudaFreeHost)
NOT_HERE(cudaFuncSetAttribute)
NOT_HERE(cudaGetSymbolSize)
NOT_HERE(cudaHostAlloc)
NOT_HERE(cudaHostGetDevicePointer)
NOT_HERE(cudaLaunchKernel)
NOT_HERE(cudaLaunchKernelExC)
NOT_HERE(cudaMallocManaged)
NOT_HERE(cudaMemcpyAsync)
NOT_HERE(cudaMemsetAsync)
NOT_HERE(cudaStreamCreateWithFlags)
NOT_HERE(cudaStreamDestroy)
NOT_HERE(cudaStreamSynchronize)
