/*
 * Memory calls of the driver API in C, compiled against NVIDIA's header and linked with the stand-in for
 * libcuda. It is compiled a second time with the functions whose default stream is the thread's own.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const size_t GRANULE = 2 << 20;

static void must(CUresult got, CUresult wanted, const char *call, int line) {
    if (got != wanted) {
        const char *name = "?";
        cuGetErrorName(got, &name);
        fprintf(stderr, "memory.c:%d: %s answered %s (%d) and not %d\n", line, call, name, got, wanted);
        exit(1);
    }
}

#define OK(call) must(call, CUDA_SUCCESS, #call, __LINE__)
#define REFUSED(call, code) must(call, CUDA_ERROR_##code, #call, __LINE__)
#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "memory.c:%d: not so: %s\n", __LINE__, #condition);           \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static CUmemAllocationProp properties(void) {
    CUmemAllocationProp wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return wanted;
}

static CUdeviceptr mapped(size_t bytes) {
    CUmemAllocationProp wanted = properties();
    CUmemGenericAllocationHandle handle;
    CUmemAccessDesc access;
    CUdeviceptr base;
    memset(&access, 0, sizeof access);
    access.location = wanted.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OK(cuMemAddressReserve(&base, bytes, 0, 0, 0));
    OK(cuMemCreate(&handle, bytes, &wanted, 0));
    OK(cuMemMap(base, bytes, 0, handle, 0));
    OK(cuMemSetAccess(base, bytes, &access, 1));
    OK(cuMemRelease(handle));
    return base;
}

static void unmapped(CUdeviceptr base, size_t bytes) {
    OK(cuMemUnmap(base, bytes));
    OK(cuMemAddressFree(base, bytes));
}

static void contexts(CUdevice device, CUcontext primary) {
    CUcontext made, current;
    unsigned version, flags;
    OK(cuCtxCreate(&made, NULL, CU_CTX_SCHED_YIELD, device));
    OK(cuCtxGetCurrent(&current));
    CHECK(current == made && made != primary);
    OK(cuCtxGetApiVersion(made, &version));
    OK(cuCtxGetFlags(&flags));
    CHECK(flags & CU_CTX_SCHED_YIELD);
    CUdeviceptr memory;
    OK(cuMemAlloc(&memory, 4096));
    CUcontext of_memory;
    OK(cuPointerGetAttribute(&of_memory, CU_POINTER_ATTRIBUTE_CONTEXT, memory));
    CHECK(of_memory == made);
    OK(cuCtxDestroy(made));
    OK(cuCtxGetCurrent(&current));
    CHECK(current == primary);
    REFUSED(cuPointerGetAttribute(&of_memory, CU_POINTER_ATTRIBUTE_CONTEXT, memory), INVALID_VALUE);
}

static void attributes(void) {
    CUdeviceptr base = mapped(GRANULE), start;
    size_t size;
    unsigned long long first, second;
    OK(cuMemGetAddressRange(&start, &size, base + 4096));
    CHECK(start == base && size == GRANULE);
    CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    int ordinal = -1;
    void *places[] = {&size, &ordinal};
    OK(cuPointerGetAttributes(2, asked, places, base));
    CHECK(size == GRANULE && ordinal == 0);
    CUdeviceptr one;
    OK(cuMemAlloc(&one, 512));
    OK(cuPointerGetAttribute(&first, CU_POINTER_ATTRIBUTE_BUFFER_ID, one));
    OK(cuMemFree(one));
    OK(cuMemAlloc(&one, 512));
    OK(cuPointerGetAttribute(&second, CU_POINTER_ATTRIBUTE_BUFFER_ID, one));
    CHECK(first != second);
    OK(cuMemFree(one));
    unmapped(base, GRANULE);
}

static void copies(void) {
    CUdeviceptr base = mapped(2 * GRANULE), pitched;
    size_t pitch;
    unsigned char bytes[64], back[64] = {0};
    for (int i = 0; i < 64; i++)
        bytes[i] = (unsigned char)i;
    OK(cuMemcpy(base, (CUdeviceptr)(size_t)bytes, 64));
    OK(cuMemAllocPitch(&pitched, &pitch, 8, 8, 4));
    CUDA_MEMCPY2D rows;
    memset(&rows, 0, sizeof rows);
    rows.srcMemoryType = rows.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    rows.srcDevice = base;
    rows.srcPitch = 8;
    rows.dstDevice = pitched;
    rows.dstPitch = pitch;
    rows.WidthInBytes = 8;
    rows.Height = 8;
    OK(cuMemcpy2D(&rows));
    OK(cuMemcpyDtoH(back, pitched + pitch, 8));
    CHECK(memcmp(back, bytes + 8, 8) == 0);
    OK(cuMemsetD16(base, 0xABCD, 8));
    OK(cuMemsetD32(base + 16, 0x12345678, 2));
    OK(cuMemcpyDtoH(back, base, 24));
    CHECK(back[0] == 0xCD && back[1] == 0xAB && back[16] == 0x78 && back[19] == 0x12);
    REFUSED(cuMemsetD32(base + 2, 1, 1), INVALID_VALUE);
    REFUSED(cuMemsetD8(base + 2 * GRANULE - 8, 1, 16), INVALID_VALUE);
    OK(cuMemFree(pitched));
    unmapped(base, 2 * GRANULE);
}

static void registered(void) {
    void *memory = NULL;
    CUdeviceptr seen, device;
    CHECK(posix_memalign(&memory, 4096, 8192) == 0);
    OK(cuMemHostRegister(memory, 8192, CU_MEMHOSTREGISTER_DEVICEMAP));
    REFUSED(cuMemHostRegister(memory, 8192, 0), HOST_MEMORY_ALREADY_REGISTERED);
    OK(cuMemHostGetDevicePointer(&seen, memory, 0));
    CHECK(seen == (CUdeviceptr)(size_t)memory);
    OK(cuMemAlloc(&device, 4096));
    OK(cuMemsetD8(device, 9, 4096));
    OK(cuMemcpyDtoD(seen, device, 16));
    CHECK(*(unsigned char *)memory == 9);
    OK(cuMemHostUnregister(memory));
    REFUSED(cuMemHostUnregister(memory), HOST_MEMORY_NOT_REGISTERED);
    OK(cuMemFree(device));
    free(memory);
}

static void CUDA_CB count(void *data) {
    CUdeviceptr never;
    ++*(int *)data;
    /* A function in stream order may not call the driver. */
    must(cuMemAlloc(&never, 512), CUDA_ERROR_NOT_PERMITTED, "cuMemAlloc in a function", __LINE__);
}

static void *own_stream(void *context) {
    int calls = 0;
    unsigned long long id;
    CUdeviceptr memory;
    OK(cuCtxSetCurrent(context));
    OK(cuMemAllocAsync(&memory, 4096, CU_STREAM_PER_THREAD));
    OK(cuMemsetD8Async(memory, 3, 4096, CU_STREAM_PER_THREAD));
    OK(cuLaunchHostFunc(CU_STREAM_PER_THREAD, count, &calls));
    OK(cuMemFreeAsync(memory, CU_STREAM_PER_THREAD));
    OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
    CHECK(calls == 1);
    OK(cuStreamGetId(CU_STREAM_PER_THREAD, &id));
    OK(cuStreamQuery(0));
    return NULL;
}

static void streams(CUcontext primary) {
    CUstream stream;
    CUevent start, end, shared;
    CUipcEventHandle name;
    float milliseconds;
    int least, greatest, priority;
    OK(cuCtxGetStreamPriorityRange(&least, &greatest));
    OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, greatest));
    OK(cuStreamGetPriority(stream, &priority));
    CHECK(priority == greatest && greatest < least);
    OK(cuEventCreate(&start, CU_EVENT_DEFAULT));
    OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
    REFUSED(cuEventElapsedTime(&milliseconds, start, end), INVALID_HANDLE);
    OK(cuEventRecord(start, stream));
    OK(cuEventRecord(end, stream));
    OK(cuEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds >= 0);
    OK(cuEventCreate(&shared, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
    OK(cuIpcGetEventHandle(&name, shared));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, own_stream, primary) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    OK(cuEventDestroy(start));
    OK(cuEventDestroy(end));
    OK(cuEventDestroy(shared));
    OK(cuStreamDestroy(stream));
}

static void entry(void) {
    void *found = NULL;
    CUdriverProcAddressQueryResult status;
    OK(cuGetProcAddress("cuMemCreate", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status));
    CHECK(status == CU_GET_PROC_ADDRESS_SUCCESS && found == (void *)cuMemCreate);
    OK(cuGetProcAddress("cuMemCreate", &found, 10000, CU_GET_PROC_ADDRESS_DEFAULT, &status));
    CHECK(status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT && found == NULL);
    OK(cuGetProcAddress("cuNothing", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status));
    CHECK(status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND && found == NULL);
    CUmodule module;
    REFUSED(cuModuleLoad(&module, "kernels.ptx"), NOT_SUPPORTED);
}

int main(void) {
    CUdevice device;
    CUcontext primary;
    char place[16];
    CUdevice there;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDeviceGetPCIBusId(place, sizeof place, device));
    OK(cuDeviceGetByPCIBusId(&there, place));
    CHECK(there == device);
    OK(cuDevicePrimaryCtxRetain(&primary, device));
    OK(cuCtxSetCurrent(primary));
    entry();
    contexts(device, primary);
    attributes();
    copies();
    registered();
    streams(primary);
    OK(cuDevicePrimaryCtxRelease(device));
    printf("C against cuda.h %d: as expected\n", CUDA_VERSION);
    return 0;
}
