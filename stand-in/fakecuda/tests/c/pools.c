/* Memory pools without a current context, copies of the memory of a pool on the host, and the device
 * of registered memory. Two devices. */
#include "driver.h"

int cuMemGetDefaultMemPool(void **, location *, int);
int cuMemGetMemPool(void **, location *, int);
int cuDeviceGetMemPool(void **, int);
int cuMemPoolGetAttribute(void *, int, void *);
int cuMemAllocFromPoolAsync(ptr *, size_t, void *, void *);
int cuMemPoolExportToShareableHandle(void *, void *, int, unsigned long long);
int cuMemPoolImportFromShareableHandle(void **, void *, int, unsigned long long);
int cuMemPoolExportPointer(void *, ptr);
int cuMemPoolImportPointer(ptr *, void *, void *);
int cuMemcpyAsync(ptr, ptr, size_t, void *);
int cuMemHostRegister_v2(void *, size_t, unsigned);
int cuMemHostUnregister(void *);
int cuPointerGetAttribute(void *, int, ptr);

static void *pool(int place, int handles)
{
    void *made;
    pool_props of;
    memset(&of, 0, sizeof of);
    of.type = 1;
    of.handles = handles;
    of.at.type = place;
    OK(cuMemPoolCreate(&made, &of));
    return made;
}

/* A process may receive a pool and its memory before it makes a context current. */
static void no_context(void *context)
{
    ptr own, shared, none;
    void *exporter = pool(1, 1), *importer;
    unsigned long long used = 0;
    char ticket[64];
    int fd;
    OK(cuMemAllocFromPoolAsync(&own, 4096, exporter, NULL));
    OK(cuCtxSetCurrent(NULL));
    OK(cuMemPoolGetAttribute(exporter, 7, &used));
    IS(4096, (int)used);
    OK(cuMemPoolExportToShareableHandle(&fd, exporter, 1, 0));
    OK(cuMemPoolImportFromShareableHandle(&importer, (void *)(intptr_t)fd, 1, 0));
    close(fd);
    OK(cuMemPoolExportPointer(ticket, own));
    OK(cuMemPoolImportPointer(&shared, importer, ticket));
    IS(201, cuMemAllocFromPoolAsync(&none, 4096, exporter, NULL));
    OK(cuCtxSetCurrent(context));
    OK(cuMemFree_v2(shared));
    OK(cuMemFree_v2(own));
    OK(cuCtxSetCurrent(NULL));
    OK(cuMemPoolDestroy(importer));
    OK(cuMemPoolDestroy(exporter));
    OK(cuCtxSetCurrent(context));
}

/* The device has no access to the pool and copies its memory all the same. */
static void host_pool(void)
{
    ptr ends[2], middle;
    void *host = pool(2, 0), *stream;
    OK(cuStreamCreate(&stream, 1));
    OK(cuMemAlloc_v2(&middle, 64));
    OK(cuMemAllocFromPoolAsync(&ends[0], 64, host, stream));
    OK(cuMemAllocFromPoolAsync(&ends[1], 64, host, stream));
    OK(cuStreamSynchronize(stream));
    memset((void *)ends[0], 42, 64);
    OK(cuMemcpyAsync(ends[1], ends[0], 64, stream));
    OK(cuStreamSynchronize(stream));
    IS(0, memcmp((void *)ends[0], (void *)ends[1], 64));
    memset((void *)ends[1], 0, 64);
    OK(cuMemcpyAsync(middle, ends[0], 64, stream));
    OK(cuMemcpyAsync(ends[1], middle, 64, stream));
    OK(cuStreamSynchronize(stream));
    IS(0, memcmp((void *)ends[0], (void *)ends[1], 64));
    for (int end = 0; end < 2; end++)
        OK(cuMemFreeAsync(ends[end], stream));
    OK(cuMemFree_v2(middle));
    OK(cuMemPoolDestroy(host));
    OK(cuStreamDestroy_v2(stream));
}

/* The pool of a place is the default pool of the device or of the host, which cannot be destroyed. */
static void defaults(void)
{
    location device = {1, 1}, host = {2, 0}, nowhere = {0, 0};
    void *of_device, *same, *of_host;
    ptr memory;
    OK(cuDeviceGetMemPool(&of_device, 1));
    OK(cuMemGetMemPool(&same, &device, 1));
    IS(1, same == of_device);
    OK(cuMemGetDefaultMemPool(&of_host, &host, 1));
    OK(cuMemGetMemPool(&same, &host, 1));
    IS(1, same == of_host);
    IS(1, cuMemGetMemPool(&same, &nowhere, 1));
    OK(cuMemAllocFromPoolAsync(&memory, 64, of_host, NULL));
    OK(cuStreamSynchronize(NULL));
    memset((void *)memory, 1, 64);
    OK(cuMemFreeAsync(memory, NULL));
    OK(cuStreamSynchronize(NULL));
    IS(1, cuMemPoolDestroy(of_host));
}

static void registered(void *context)
{
    static char memory[4096];
    void *second;
    int device = -1;
    OK(cuDevicePrimaryCtxRetain(&second, 1));
    OK(cuCtxSetCurrent(second));
    OK(cuMemHostRegister_v2(memory, sizeof memory, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuPointerGetAttribute(&device, 9, (ptr)memory));
    IS(1, device);
    OK(cuMemHostUnregister(memory));
}

int main(void)
{
    void *context = enter();
    no_context(context);
    host_pool();
    defaults();
    registered(context);
    return 0;
}
