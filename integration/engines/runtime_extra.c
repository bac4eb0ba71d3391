/* SPDX-License-Identifier: Apache-2.0
 *
 * The functions of the CUDA runtime that Mooncake's engine links and the rig's runtime lacks. To be preloaded. Events and
 * batched copies are not used over TCP; here they fail, so that a test which came to use them would be seen.
 */
#define API __attribute__((visibility("default")))
enum { NOT_SUPPORTED = 801 };

API int cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = device != peer;
    return 0;
}
API int cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)peer, (void)flags;
    return 0;
}
API int cudaStreamQuery(void *stream)
{
    (void)stream;
    return 0;
}
API int cudaEventCreateWithFlags(void **event, unsigned flags)
{
    (void)event, (void)flags;
    return NOT_SUPPORTED;
}
API int cudaEventDestroy(void *event)
{
    (void)event;
    return NOT_SUPPORTED;
}
API int cudaEventRecord(void *event, void *stream)
{
    (void)event, (void)stream;
    return NOT_SUPPORTED;
}
API int cudaEventSynchronize(void *event)
{
    (void)event;
    return NOT_SUPPORTED;
}
API int cudaGetDeviceProperties_v2(void *properties, int device)
{
    (void)properties, (void)device;
    return NOT_SUPPORTED;
}
API int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data)
{
    (void)stream, (void)function, (void)data;
    return NOT_SUPPORTED;
}
API int cudaMemcpyBatchAsync(void)
{
    return NOT_SUPPORTED;
}
