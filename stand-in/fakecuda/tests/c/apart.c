/* Work on a stream of another device than the current one, and memory of a peer. Two devices. */
#include "driver.h"

int cuCtxEnablePeerAccess(void *, unsigned);
int cuDevicePrimaryCtxReset_v2(int);
int cuMemcpyAsync(ptr, ptr, size_t, void *);
int cuMemcpyHtoDAsync_v2(ptr, const void *, size_t, void *);
int cuMemcpyDtoHAsync_v2(void *, ptr, size_t, void *);
int cuMemcpyDtoDAsync_v2(ptr, ptr, size_t, void *);
int cuMemcpyPeerAsync(ptr, void *, ptr, void *, size_t, void *);
int cuMemsetD16Async(ptr, unsigned short, size_t, void *);
int cuMemsetD32_v2(ptr, unsigned, size_t);
int cuPointerGetAttribute(void *, int, ptr);

static int byte_at(ptr from)
{
    unsigned char byte;
    OK(cuMemcpyDtoH_v2(&byte, from, 1));
    return byte;
}

int main(void)
{
    void *first = enter(), *second, *stream;
    ptr here, there, pooled;
    char bytes[4] = {1, 2, 3, 4}, back[4] = {0};
    int device = 7;
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxSetCurrent(second));
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc_v2(&there, 64));
    OK(cuCtxSetCurrent(first));
    OK(cuMemAlloc_v2(&here, 64));

    /* A copy succeeds on any stream. */
    OK(cuMemcpyHtoDAsync_v2(here, bytes, 4, stream));
    OK(cuMemcpyDtoDAsync_v2(there, here, 4, stream));
    OK(cuMemcpyAsync(here + 4, there, 4, stream));
    OK(cuMemcpyPeerAsync(here + 8, first, there, second, 4, stream));
    OK(cuMemcpyDtoHAsync_v2(back, here + 8, 4, stream));
    OK(cuStreamSynchronize(stream));
    IS(0, memcmp(bytes, back, 4));
    IS(2, byte_at(here + 5));

    /* A fill runs on the stream's device, which has no access to the other one's memory. */
    OK(cuMemsetD16Async(there, 0x0909, 4, stream));
    OK(cuStreamSynchronize(stream));
    IS(9, byte_at(there));
    IS(1, cuMemsetD8Async(here, 9, 4, stream));
    IS(1, cuMemsetD8_v2(there, 8, 4));
    IS(1, cuMemsetD32_v2(there, 8, 4));
    OK(cuStreamSynchronize(stream));
    IS(1, byte_at(here));
    OK(cuCtxEnablePeerAccess(second, 0));
    OK(cuMemsetD8_v2(there, 8, 4));
    OK(cuMemsetD8Async(there, 8, 4, NULL));
    OK(cuCtxSynchronize());
    IS(8, byte_at(there));
    IS(1, cuMemsetD8Async(here, 9, 4, stream));
    IS(704, cuCtxEnablePeerAccess(second, 0));

    OK(cuMemAllocAsync(&pooled, 64, stream));
    OK(cuPointerGetAttribute(&device, 9, pooled));
    IS(1, device);
    OK(cuMemFreeAsync(pooled, stream));

    /* The access ends with the peer. */
    OK(cuStreamDestroy_v2(stream));
    OK(cuDevicePrimaryCtxReset_v2(1));
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxEnablePeerAccess(second, 0));
    OK(cuDevicePrimaryCtxRelease_v2(1));
    OK(cuMemFree_v2(here));
    OK(cuCtxSynchronize());
    OK(cuCtxSetCurrent(NULL));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    return 0;
}
