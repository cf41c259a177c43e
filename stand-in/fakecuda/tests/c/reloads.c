/* The library is closed and opened again while its objects live, and while a stream runs a function. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long ptr;
static void *library;
static atomic_int started, released;

static void blocks(void *unused)
{
    (void)unused;
    atomic_store(&started, 1);
    while (!atomic_load(&released))
        usleep(100);
}

#define CALL(name, types, ...) \
    do { \
        int (*function) types; \
        *(void **)&function = dlsym(library, #name); \
        int code = function ? function(__VA_ARGS__) : -1; \
        if (code) { \
            fprintf(stderr, "line %d: %s is %d\n", __LINE__, #name, code); \
            exit(99); \
        } \
    } while (0)

static void uses(int functions)
{
    void *context, *stream, *event, *pinned;
    ptr memory;
    char byte = 0;
    CALL(cuInit, (unsigned), 0);
    CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, 0);
    CALL(cuCtxSetCurrent, (void *), context);
    CALL(cuStreamCreate, (void **, unsigned), &stream, 1);
    CALL(cuEventCreate, (void **, unsigned), &event, 2);
    CALL(cuMemAlloc_v2, (ptr *, size_t), &memory, 4096);
    CALL(cuMemHostAlloc, (void **, size_t, unsigned), &pinned, 4096, 0);
    CALL(cuMemsetD8Async, (ptr, unsigned char, size_t, void *), memory, 9, 4096, stream);
    CALL(cuStreamSynchronize, (void *), stream);
    CALL(cuMemcpyDtoH_v2, (void *, ptr, size_t), &byte, memory, 1);
    if (byte != 9)
        exit(98);
    if (functions) {
        CALL(cuLaunchHostFunc, (void *, void (*)(void *), void *), stream, blocks, NULL);
        while (!atomic_load(&started))
            usleep(100);
    }
}

int main(int count, char **words)
{
    int functions = count > 1 && !strcmp(words[1], "functions");
    for (int round = 0; round < 5; round++) {
        library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library)
            return 97;
        uses(functions);
        if (dlclose(library))
            return 96;
        atomic_store(&released, 1);
    }
    return 0;
}
