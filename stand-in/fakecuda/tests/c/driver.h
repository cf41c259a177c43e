/* The functions of the driver that the test programs call, so that no header of NVIDIA is needed. */
#ifndef DRIVER_H
#define DRIVER_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fakecuda.h"

typedef unsigned long long ptr;
typedef struct { int type, id; } location;
typedef struct {
    int type, handles;
    location at;
    void *meta;
    struct { unsigned char compression, rdma; unsigned short usage; unsigned char reserved[4]; } flags;
} props;
typedef struct { location at; int flags; } grant;
typedef struct {
    int type, handles;
    location at;
    void *attributes;
    size_t maximum;
    unsigned short usage;
    unsigned char reserved[54];
} pool_props;

int cuInit(unsigned);
int cuDriverGetVersion(int *);
int cuDeviceGetCount(int *);
int cuDevicePrimaryCtxRetain(void **, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuCtxSetCurrent(void *);
int cuCtxSynchronize(void);
int cuCtxGetCurrent(void **);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxDestroy_v2(void *);
int cuCtxPopCurrent_v2(void **);
int cuMemAddressReserve(ptr *, size_t, size_t, ptr, unsigned long long);
int cuMemAddressFree(ptr, size_t);
int cuMemCreate(ptr *, size_t, const props *, unsigned long long);
int cuMemRelease(ptr);
int cuMemMap(ptr, size_t, size_t, ptr, unsigned long long);
int cuMemUnmap(ptr, size_t);
int cuMemSetAccess(ptr, size_t, const grant *, size_t);
int cuMemRetainAllocationHandle(ptr *, void *);
int cuMemExportToShareableHandle(void *, ptr, int, unsigned long long);
int cuMemImportFromShareableHandle(ptr *, void *, int);
int cuMemAlloc_v2(ptr *, size_t);
int cuMemFree_v2(ptr);
int cuMemAllocAsync(ptr *, size_t, void *);
int cuMemFreeAsync(ptr, void *);
int cuMemHostAlloc(void **, size_t, unsigned);
int cuMemFreeHost(void *);
int cuMemAllocManaged(ptr *, size_t, unsigned);
int cuMemPoolCreate(void **, const pool_props *);
int cuMemPoolDestroy(void *);
int cuMemPoolSetAccess(void *, const grant *, size_t);
int cuMemRangeGetAttribute(void *, size_t, int, ptr, size_t);
int cuMemsetD8_v2(ptr, unsigned char, size_t);
int cuMemsetD8Async(ptr, unsigned char, size_t, void *);
int cuMemcpyHtoD_v2(ptr, const void *, size_t);
int cuMemcpyDtoH_v2(void *, ptr, size_t);
int cuMemcpyDtoD_v2(ptr, ptr, size_t);
int cuMemsetD2D8_v2(ptr, size_t, unsigned char, size_t, size_t);
int cuPointerGetAttributes(unsigned, int *, void **, ptr);
int cuStreamCreate(void **, unsigned);
int cuStreamDestroy_v2(void *);
int cuStreamSynchronize(void *);
int cuStreamQuery(void *);
int cuEventCreate(void **, unsigned);
int cuEventDestroy_v2(void *);
int cuEventRecord(void *, void *);
int cuEventQuery(void *);
int cuStreamBeginCapture_v2(void *, int);
int cuStreamEndCapture(void *, void **);
int cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
int cuGraphDestroy(void *);
int cuGraphExecDestroy(void *);

#define GRANULE ((size_t)2 << 20)

/* Ends the program with status 99 if a call does not answer as expected. */
#define IS(code, call) is(code, call, #call, __LINE__)
#define OK(call) IS(0, call)

static inline void is(int wanted, int found, const char *call, int line)
{
    if (found != wanted) {
        fprintf(stderr, "line %d: %s is %d and not %d\n", line, call, found, wanted);
        exit(99);
    }
}

static inline void *enter(void)
{
    void *context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    return context;
}

static inline props plain(int handles)
{
    props made;
    memset(&made, 0, sizeof made);
    made.type = 1;
    made.handles = handles;
    made.at.type = 1;
    return made;
}

static inline grant all(void)
{
    grant made = {{1, 0}, 3};
    return made;
}

/* Reserves, creates and maps one granule that the device may use. */
static inline ptr mapped(ptr *handle)
{
    ptr base;
    props of = plain(0);
    grant to = all();
    OK(cuMemAddressReserve(&base, GRANULE, 0, 0, 0));
    OK(cuMemCreate(handle, GRANULE, &of, 0));
    OK(cuMemMap(base, GRANULE, 0, *handle, 0));
    OK(cuMemSetAccess(base, GRANULE, &to, 1));
    return base;
}

static inline void unmapped(ptr base, ptr handle)
{
    OK(cuMemUnmap(base, GRANULE));
    OK(cuMemRelease(handle));
    OK(cuMemAddressFree(base, GRANULE));
}

#endif
