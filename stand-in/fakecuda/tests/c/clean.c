/* A program that uses every kind of object and does nothing wrong. Its first argument says in which
 * way it ends. */
#include <sys/wait.h>

#include "driver.h"

static void virtual_memory(void)
{
    ptr handle, again, other;
    int fd;
    props of = plain(1);
    char bytes[64];
    ptr base = mapped(&handle);
    OK(cuMemsetD8_v2(base, 7, GRANULE));
    OK(cuMemcpyDtoH_v2(bytes, base, sizeof bytes));
    /* A handle is released while the mapping lives, and asked for again. */
    OK(cuMemRelease(handle));
    OK(cuMemRetainAllocationHandle(&again, (void *)base));
    OK(cuMemUnmap(base, GRANULE));
    /* Refused for its size, and not for the mapping that was there. */
    IS(1, cuMemMap(base, GRANULE / 2, 0, again, 0));
    OK(cuMemMap(base, GRANULE, 0, again, 0));
    unmapped(base, again);
    OK(cuMemCreate(&handle, GRANULE, &of, 0));
    OK(cuMemExportToShareableHandle(&fd, handle, 1, 0));
    OK(cuMemImportFromShareableHandle(&other, (void *)(intptr_t)fd, 1));
    OK(cuMemRelease(other));
    close(fd);
    OK(cuMemRelease(handle));
}

static void allocations(void)
{
    ptr one, other;
    void *stream, *event, *pinned, *pool;
    char bytes[64] = {1};
    pool_props of;
    memset(&of, 0, sizeof of);
    of.type = 1;
    of.at.type = 1;
    OK(cuStreamCreate(&stream, 1));
    OK(cuEventCreate(&event, 2));
    OK(cuMemAlloc_v2(&one, 64));
    OK(cuMemAlloc_v2(&other, 64));
    OK(cuMemcpyHtoD_v2(one, bytes, 64));
    OK(cuMemcpyDtoD_v2(other, one, 64));
    OK(cuMemcpyDtoH_v2(bytes, other, 64));
    OK(cuMemFree_v2(one));
    /* The address may be the last one. */
    OK(cuMemAlloc_v2(&one, 64));
    OK(cuMemFree_v2(one));
    OK(cuMemFree_v2(other));
    OK(cuMemAllocAsync(&one, 64, stream));
    OK(cuMemsetD8Async(one, 7, 64, stream));
    OK(cuMemFreeAsync(one, stream));
    OK(cuEventRecord(event, stream));
    while (cuEventQuery(event) == 600)
        ;
    OK(cuStreamSynchronize(stream));
    OK(cuMemHostAlloc(&pinned, 4096, 0));
    OK(cuMemFreeHost(pinned));
    OK(cuMemAllocManaged(&one, 4096, 1));
    memset((void *)one, 1, 4096);
    OK(cuMemcpyDtoH_v2(bytes, one, 64));
    OK(cuMemFree_v2(one));
    OK(cuMemPoolCreate(&pool, &of));
    OK(cuMemPoolDestroy(pool));
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream));
}

/* Sizes and counts without bound are refused, or mean nothing. */
static void bounds(void)
{
    ptr made;
    char bytes[64] = {0};
    int attributes[1] = {0};
    void *places[1] = {bytes}, *pool;
    ptr handle, base = mapped(&handle);
    grant to = all();
    pool_props of;
    memset(&of, 0, sizeof of);
    of.type = 1;
    of.at.type = 1;
    OK(cuMemPoolCreate(&pool, &of));
    for (int bits = 21; bits < 66; bits++) {
        size_t many = bits < 64 ? (size_t)1 << bits : ~(size_t)0 >> (bits - 64);
        IS(1, cuMemSetAccess(base, GRANULE, &to, many));
        IS(801, cuMemPoolSetAccess(pool, &to, many));
    }
    OK(cuMemPoolDestroy(pool));
    unmapped(base, handle);
    OK(cuMemAllocManaged(&made, 4096, 1));
    IS(1, cuMemRangeGetAttribute(bytes, (size_t)1 << 40, 3, made, 4096));
    OK(cuMemFree_v2(made));
    OK(cuMemAlloc_v2(&made, 64));
    IS(1, cuMemcpyHtoD_v2(made, bytes, (size_t)1 << 63));
    IS(1, cuMemcpyDtoH_v2(bytes, made, ~(size_t)0));
    OK(cuMemsetD2D8_v2(made, 64, 1, 0, (size_t)1 << 62));
    IS(1, cuPointerGetAttributes(~0u, attributes, places, made));
    OK(cuMemFree_v2(made));
}

static void graphs(void)
{
    void *stream, *graph, *made;
    OK(cuStreamCreate(&stream, 1));
    OK(cuStreamBeginCapture_v2(stream, 2));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&made, graph, 0));
    OK(cuGraphExecDestroy(made));
    OK(cuGraphDestroy(graph));
    OK(cuStreamDestroy_v2(stream));
}

static ptr kept;

/* Runs after main has returned. */
static void release_at_exit(void)
{
    OK(cuMemRelease(kept));
}

/* Runs after the thread's own variables have ended. */
static void free_at_exit(void)
{
    void *context;
    OK(cuCtxGetCurrent(&context));
    OK(cuMemFree_v2(kept));
    OK(cuCtxSetCurrent(NULL));
    OK(cuDevicePrimaryCtxRelease_v2(0));
}

int main(int count, char **words)
{
    const char *how = count > 1 ? words[1] : "";
    props of = plain(0);
    IS(3, cuMemsetD2D8_v2(0, 0, 0, 0, 0));
    enter();
    virtual_memory();
    allocations();
    bounds();
    graphs();
    if (!strcmp(how, "atexit")) {
        OK(cuMemCreate(&kept, GRANULE, &of, 0));
        atexit(release_at_exit);
    }
    if (!strcmp(how, "current-atexit")) {
        OK(cuMemAlloc_v2(&kept, 64));
        atexit(free_at_exit);
        printf("done");
        return 0;
    }
    if (!strcmp(how, "contexts")) {
        void *made, *popped;
        OK(cuCtxCreate_v2(&made, 0, 0));
        OK(cuCtxPopCurrent_v2(&popped));
        OK(cuCtxDestroy_v2(made));
    }
    if (!strcmp(how, "forked")) {
        ptr parents;
        int status;
        OK(cuMemCreate(&parents, GRANULE, &of, 0));
        if (fork() == 0)
            exit(3);
        wait(&status);
        if (WEXITSTATUS(status) != 3)
            return 98;
        OK(cuMemRelease(parents));
    }
    OK(cuCtxSynchronize());
    OK(cuCtxSetCurrent(NULL));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    printf("done");
    return !strcmp(how, "fails") ? 5 : 0;
}
