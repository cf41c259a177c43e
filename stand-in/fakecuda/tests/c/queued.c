/* Asynchronous copies of host memory on a held stream, which another thread releases. */
#include <pthread.h>
#include <stdatomic.h>

#include "driver.h"

int cuMemcpyHtoDAsync_v2(ptr, const void *, size_t, void *);
int cuMemcpyDtoHAsync_v2(void *, ptr, size_t, void *);
int cuMemcpyAsync(ptr, ptr, size_t, void *);

static void *context;
static atomic_int released;

static void *release(void *stream)
{
    OK(cuCtxSetCurrent(context));
    usleep(20000);
    atomic_store(&released, 1);
    OK(fakecuda_hold(stream, false));
    return NULL;
}

/* Copies on the held stream, and asks whether the copy returned after the release. */
#define BEHIND(waits, call)                                                                        \
    do {                                                                                           \
        pthread_t thread;                                                                          \
        atomic_store(&released, 0);                                                                \
        OK(fakecuda_hold(stream, true));                                                           \
        OK(pthread_create(&thread, NULL, release, stream));                                        \
        OK(call);                                                                                  \
        if (waits)                                                                                 \
            IS(1, atomic_load(&released));                                                         \
        after;                                                                                     \
        pthread_join(thread, NULL);                                                                \
        OK(cuStreamSynchronize(stream));                                                           \
    } while (0)

int main(void)
{
    void *stream, *pinned, *other, *graph, *made;
    char bytes[1000], back[1000];
    ptr device;

    context = enter();
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc_v2(&device, sizeof bytes));
    OK(cuMemHostAlloc(&pinned, sizeof bytes, 0));
    OK(cuMemHostAlloc(&other, sizeof bytes, 0));
    OK(cuMemsetD8_v2(device, 5, sizeof bytes));

    /* To pageable memory, and from the host to the host: the bytes are there when the call returns. */
#define after IS(5, bytes[999])
    BEHIND(1, cuMemcpyDtoHAsync_v2(bytes, device, sizeof bytes, stream));
    memset(bytes, 0, sizeof bytes);
    BEHIND(1, cuMemcpyAsync((ptr)bytes, device, sizeof bytes, stream));
    memset(pinned, 5, sizeof bytes);
    memset(bytes, 0, sizeof bytes);
    BEHIND(1, cuMemcpyAsync((ptr)bytes, (ptr)pinned, sizeof bytes, stream));
#undef after
#define after IS(5, ((char *)other)[999])
    BEHIND(1, cuMemcpyAsync((ptr)other, (ptr)pinned, sizeof bytes, stream));
#undef after

    /* From pageable memory: the bytes were read when the call returns. */
#define after memset(bytes, 9, sizeof bytes)
    for (int any = 0; any < 2; any++) {
        memset(bytes, 6 + any, sizeof bytes);
        BEHIND(0, any ? cuMemcpyAsync(device, (ptr)bytes, sizeof bytes, stream)
                      : cuMemcpyHtoDAsync_v2(device, bytes, sizeof bytes, stream));
        OK(cuMemcpyDtoH_v2(back, device, sizeof back));
        IS(6 + any, back[999]);
    }
#undef after

    /* Pinned memory is read and written when the stream does it. */
    memset(pinned, 1, sizeof bytes);
    OK(fakecuda_hold(stream, true));
    OK(cuMemcpyHtoDAsync_v2(device, pinned, sizeof bytes, stream));
    OK(cuMemcpyDtoHAsync_v2(other, device, sizeof bytes, stream));
    memset(pinned, 2, sizeof bytes);
    IS(5, ((char *)other)[0]);
    OK(fakecuda_hold(stream, false));
    OK(cuStreamSynchronize(stream));
    IS(2, ((char *)other)[0]);

    /* A captured copy waits for nothing. */
    OK(cuStreamBeginCapture_v2(stream, 0));
    OK(cuMemcpyDtoHAsync_v2(bytes, device, sizeof bytes, stream));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&made, graph, 0));

    OK(cuGraphExecDestroy(made));
    OK(cuGraphDestroy(graph));
    OK(cuMemFreeHost(other));
    OK(cuMemFreeHost(pinned));
    OK(cuMemFree_v2(device));
    OK(cuStreamDestroy_v2(stream));
    return 0;
}
