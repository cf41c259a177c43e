/* Programs that each do one thing wrong. The first argument names it. */
#include "driver.h"

static ptr leaked_allocation(void)
{
    ptr made;
    OK(cuMemAlloc_v2(&made, 4096));
    return made;
}

static void leaks(const char *what)
{
    ptr handle, made;
    void *object, *graph;
    int fd;
    props of = plain(1);
    if (!strcmp(what, "reservation"))
        OK(cuMemAddressReserve(&made, GRANULE, 0, 0, 0));
    if (!strcmp(what, "physical"))
        OK(cuMemCreate(&handle, GRANULE, &of, 0));
    if (!strcmp(what, "reference")) {
        made = mapped(&handle);
        OK(cuMemRetainAllocationHandle(&handle, (void *)made));
        unmapped(made, handle);
    }
    if (!strcmp(what, "mapping")) {
        made = mapped(&handle);
        OK(cuMemRelease(handle));
    }
    if (!strcmp(what, "allocation"))
        for (int i = 0; i < 3; i++)
            leaked_allocation();
    if (!strcmp(what, "pooled"))
        OK(cuMemAllocAsync(&made, 4096, NULL));
    if (!strcmp(what, "pinned"))
        OK(cuMemHostAlloc(&object, 4096, 0));
    if (!strcmp(what, "managed"))
        OK(cuMemAllocManaged(&made, 4096, 1));
    if (!strcmp(what, "exported")) {
        OK(cuMemCreate(&handle, GRANULE, &of, 0));
        OK(cuMemExportToShareableHandle(&fd, handle, 1, 0));
        OK(cuMemRelease(handle));
    }
    if (!strcmp(what, "stream"))
        OK(cuStreamCreate(&object, 0));
    if (!strcmp(what, "event"))
        OK(cuEventCreate(&object, 0));
    if (!strcmp(what, "context")) {
        OK(cuCtxCreate_v2(&object, 0, 0));
        OK(cuCtxPopCurrent_v2(&object));
    }
    if (!strcmp(what, "graph")) {
        OK(cuStreamCreate(&object, 1));
        OK(cuStreamBeginCapture_v2(object, 2));
        OK(cuStreamEndCapture(object, &graph));
        OK(cuStreamDestroy_v2(object));
    }
    if (!strcmp(what, "pool")) {
        pool_props wanted;
        memset(&wanted, 0, sizeof wanted);
        wanted.type = wanted.at.type = 1;
        OK(cuMemPoolCreate(&object, &wanted));
    }
}

static void uses_after_release(const char *what)
{
    ptr handle, made;
    void *stream, *event;
    char bytes[64];
    props of = plain(0);
    if (!strcmp(what, "released-twice")) {
        OK(cuMemCreate(&handle, GRANULE, &of, 0));
        OK(cuMemRelease(handle));
        cuMemRelease(handle);
    }
    if (!strcmp(what, "freed-twice")) {
        made = leaked_allocation();
        OK(cuMemFree_v2(made));
        cuMemFree_v2(made);
    }
    if (!strcmp(what, "mapped-after-release")) {
        OK(cuMemAddressReserve(&made, GRANULE, 0, 0, 0));
        OK(cuMemCreate(&handle, GRANULE, &of, 0));
        OK(cuMemRelease(handle));
        cuMemMap(made, GRANULE, 0, handle, 0);
        OK(cuMemAddressFree(made, GRANULE));
    }
    if (!strcmp(what, "stream-after-destroy")) {
        OK(cuStreamCreate(&stream, 0));
        OK(cuStreamDestroy_v2(stream));
        IS(400, cuStreamQuery(stream));
    }
    if (!strcmp(what, "context-after-destroy")) {
        OK(cuCtxCreate_v2(&event, 0, 0));
        OK(cuCtxDestroy_v2(event));
        IS(201, cuCtxSetCurrent(event));
    }
    if (!strcmp(what, "event-after-destroy")) {
        OK(cuEventCreate(&event, 0));
        OK(cuEventDestroy_v2(event));
        IS(400, cuEventRecord(event, NULL));
    }
    if (!strcmp(what, "read-after-free")) {
        made = leaked_allocation();
        OK(cuMemFree_v2(made));
        IS(1, cuMemcpyDtoH_v2(bytes, made + 8, 8));
    }
    if (!strcmp(what, "write-after-unmap")) {
        made = mapped(&handle);
        OK(cuMemUnmap(made, GRANULE));
        IS(1, cuMemsetD8_v2(made + 16, 1, 8));
        OK(cuMemRelease(handle));
        OK(cuMemAddressFree(made, GRANULE));
    }
}

static void takes_from_work(const char *what)
{
    ptr handle, made;
    grant none = {{1, 0}, 0};
    void *stream;
    OK(cuStreamCreate(&stream, 1));
    if (!strcmp(what, "unmap-under-work")) {
        made = mapped(&handle);
        OK(cuMemsetD8Async(made, 1, 64, stream));
        unmapped(made, handle);
    }
    if (!strcmp(what, "access-under-work")) {
        made = mapped(&handle);
        OK(cuMemsetD8Async(made, 1, 64, stream));
        OK(cuMemSetAccess(made, GRANULE, &none, 1));
        unmapped(made, handle);
    }
    if (!strcmp(what, "held")) {
        grant to = all();
        props of = plain(0);
        ptr other;
        made = mapped(&handle);
        OK(fakecuda_hold(stream, true));
        OK(cuMemsetD8Async(made, 1, 64, stream));
        /* An exchange: another physical at the same address. */
        OK(cuMemUnmap(made, GRANULE));
        OK(cuMemRelease(handle));
        OK(cuMemCreate(&other, GRANULE, &of, 0));
        OK(cuMemMap(made, GRANULE, 0, other, 0));
        OK(cuMemSetAccess(made, GRANULE, &to, 1));
        OK(fakecuda_hold(stream, false));
        unmapped(made, other);
    }
    cuStreamDestroy_v2(stream);
}

static void reads_unwritten(const char *what)
{
    ptr handle, made;
    char bytes[64];
    if (!strcmp(what, "unwritten")) {
        made = mapped(&handle);
        OK(cuMemsetD8_v2(made, 1, 32));
        OK(cuMemcpyDtoH_v2(bytes, made, 32));
        OK(cuMemcpyDtoH_v2(bytes, made, 64));
        unmapped(made, handle);
    }
    /* Two allocations that share a granule, and a third that takes the place of the second. */
    if (!strcmp(what, "unwritten-small")) {
        ptr other;
        OK(cuMemAlloc_v2(&made, 64));
        OK(cuMemAlloc_v2(&other, 64));
        OK(cuMemsetD8_v2(made, 1, 64));
        OK(cuMemcpyDtoH_v2(bytes, made, 64));
        OK(cuMemsetD8_v2(other, 1, 64));
        OK(cuMemFree_v2(other));
        OK(cuMemAlloc_v2(&other, 64));
        OK(cuMemsetD8_v2(other, 1, 32));
        OK(cuMemcpyDtoH_v2(bytes, other, 64));
        OK(cuMemFree_v2(made));
        OK(cuMemFree_v2(other));
    }
}

int main(int count, char **words)
{
    const char *what = count > 1 ? words[1] : "";
    enter();
    leaks(what);
    /* The last release of a context may destroy what is in it. */
    if (count > 2 && !strcmp(words[2], "keeps-context"))
        return 0;
    uses_after_release(what);
    takes_from_work(what);
    reads_unwritten(what);
    OK(cuCtxSetCurrent(NULL));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    return 0;
}
