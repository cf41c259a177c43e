/* Functions that a stream runs: on a thread of the driver's, which holds nothing meanwhile. The first
 * argument says which part runs. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "driver.h"

int cuLaunchHostFunc(void *, void (*)(void *), void *);
int cuStreamAddCallback(void *, void (*)(void *, int, void *), void *, unsigned);
int cuStreamWaitEvent(void *, void *, unsigned);
int cuEventSynchronize(void *);
int cuGraphLaunch(void *, void *);
int cuMemcpyAsync(ptr, ptr, size_t, void *);
int cuMemsetD32_v2(ptr, unsigned, size_t);
int cuCtxGetDevice(int *);
int cuDevicePrimaryCtxReset_v2(int);

/* A function that waits until it is released. */
struct gate {
    atomic_int started, released, returned;
};

static void blocks(void *data)
{
    struct gate *gate = data;
    atomic_fetch_add(&gate->started, 1);
    while (!atomic_load(&gate->released))
        usleep(100);
    atomic_store(&gate->returned, 1);
}

static void *release(void *data)
{
    struct gate *gate = data;
    while (!atomic_load(&gate->started))
        usleep(100);
    usleep(2000);
    atomic_store(&gate->released, 1);
    return NULL;
}

static void await_start(struct gate *gate)
{
    while (!atomic_load(&gate->started))
        usleep(100);
}

static void *new_stream(unsigned flags)
{
    void *stream;
    OK(cuStreamCreate(&stream, flags));
    return stream;
}

static void *new_event(void)
{
    void *event;
    OK(cuEventCreate(&event, 2));
    return event;
}

static int byte_at(ptr from)
{
    unsigned char byte;
    OK(cuMemcpyDtoH_v2(&byte, from, 1));
    return byte;
}

/* The usual way to keep a stream busy. The test frees and allocates meanwhile, as on a GPU. */
static void held(void)
{
    struct gate gate = {0};
    void *stream = new_stream(1), *other = new_stream(1), *event = new_event();
    ptr memory, more;
    OK(cuMemAlloc_v2(&memory, 64));
    OK(cuMemsetD8Async(memory, 1, 64, stream));
    OK(cuLaunchHostFunc(stream, blocks, &gate));
    OK(cuMemsetD8Async(memory, 2, 64, stream));
    OK(cuEventRecord(event, stream));
    OK(cuStreamWaitEvent(other, event, 0));
    await_start(&gate);
    IS(600, cuStreamQuery(stream));
    IS(600, cuStreamQuery(stream));
    IS(600, cuEventQuery(event));
    IS(600, cuStreamQuery(other));
    IS(600, cuStreamQuery(other));
    OK(cuMemAllocAsync(&more, 64, other));
    OK(cuMemFreeAsync(more, other));
    IS(1, byte_at(memory));
    OK(cuMemsetD32_v2(memory, 0x01010101, 16));
    atomic_store(&gate.released, 1);
    OK(cuStreamSynchronize(other));
    OK(cuEventQuery(event));
    OK(cuStreamQuery(stream));
    IS(2, byte_at(memory));
    OK(cuEventDestroy_v2(event));
    OK(cuStreamDestroy_v2(stream));
    OK(cuStreamDestroy_v2(other));
    OK(cuMemFree_v2(memory));
}

static atomic_int answers[4];

static void asks(void *data)
{
    ptr made;
    struct gate *gate = data;
    answers[0] = cuStreamQuery(NULL);
    answers[1] = cuMemAlloc_v2(&made, 64);
    answers[2] = cuCtxGetDevice((int[1]){0});
    answers[3] = cuLaunchHostFunc(NULL, asks, NULL);
    blocks(gate);
}

static void add(void *stream, int status, void *data)
{
    (void)stream;
    atomic_fetch_add((atomic_int *)data, status + 1);
}

/* A function may not call the driver, and may wait for a thread that does. */
static void inside(void)
{
    struct gate gate = {0};
    atomic_int count = 0;
    void *stream = new_stream(1);
    ptr made;
    OK(cuLaunchHostFunc(stream, asks, &gate));
    OK(cuStreamAddCallback(stream, add, &count, 0));
    await_start(&gate);
    OK(cuMemAlloc_v2(&made, 64));
    OK(cuMemFree_v2((atomic_store(&gate.released, 1), made)));
    OK(cuStreamSynchronize(stream));
    IS(1, count);
    for (int at = 0; at < 4; at++)
        IS(800, answers[at]);
    OK(cuStreamDestroy_v2(stream));
}

/* Each call that waits for the device's work returns after the function. */
static void waits(void)
{
    for (int way = 0; way < 10; way++) {
        struct gate gate = {0};
        pthread_t thread;
        void *made = NULL, *stream, *event, *before;
        ptr memory;
        char byte = 1;
        OK(cuCtxGetCurrent(&before));
        if (way == 8)
            OK(cuCtxCreate_v2(&made, 0, 0));
        stream = new_stream(0);
        event = new_event();
        OK(cuMemAlloc_v2(&memory, 64));
        OK(cuLaunchHostFunc(stream, blocks, &gate));
        OK(cuEventRecord(event, stream));
        if (pthread_create(&thread, NULL, release, &gate))
            exit(97);
        switch (way) {
        case 0: OK(cuStreamSynchronize(stream)); break;
        case 1: OK(cuEventSynchronize(event)); break;
        case 2: OK(cuCtxSynchronize()); break;
        case 3: OK(cuMemcpyHtoD_v2(memory, &byte, 1)); break;
        case 4: OK(cuMemcpyDtoH_v2(&byte, memory, 1)); break;
        case 5: OK(cuMemFree_v2(memory)); break;
        case 6: OK(cuStreamSynchronize(NULL)); break;
        case 7:
            while (cuStreamQuery(stream) == 600)
                ;
            break;
        case 8: OK(cuCtxDestroy_v2(made)); break;
        case 9: OK(cuDevicePrimaryCtxReset_v2(0)); break;
        }
        IS(1, gate.returned);
        pthread_join(thread, NULL);
        if (way < 8) {
            OK(cuEventDestroy_v2(event));
            OK(cuStreamDestroy_v2(stream));
        }
        if (way < 8 && way != 5)
            OK(cuMemFree_v2(memory));
        if (way == 8)
            OK(cuCtxSetCurrent(before));
    }
    enter();
}

/* A stream that is destroyed runs what it has. */
static void destroyed(void)
{
    struct gate gate = {0};
    void *stream = new_stream(1);
    ptr memory;
    OK(cuMemAlloc_v2(&memory, 64));
    OK(cuLaunchHostFunc(stream, blocks, &gate));
    OK(cuMemsetD8Async(memory, 9, 64, stream));
    OK(cuStreamDestroy_v2(stream));
    await_start(&gate);
    IS(0, gate.returned);
    atomic_store(&gate.released, 1);
    OK(cuCtxSynchronize());
    IS(1, gate.returned);
    IS(9, byte_at(memory));
    OK(cuMemFree_v2(memory));
}

/* A graph waits at its function too, at each launch. */
static void graphs(void)
{
    struct gate gate = {0};
    void *stream = new_stream(1), *graph, *made;
    ptr memory;
    OK(cuMemAlloc_v2(&memory, 64));
    OK(cuMemsetD8Async(memory, 0, 64, stream));
    OK(cuStreamBeginCapture_v2(stream, 2));
    OK(cuMemsetD8Async(memory, 1, 1, stream));
    OK(cuLaunchHostFunc(stream, blocks, &gate));
    OK(cuMemsetD8Async(memory + 1, 1, 1, stream));
    OK(cuStreamEndCapture(stream, &graph));
    IS(0, gate.started);
    OK(cuGraphInstantiateWithFlags(&made, graph, 0));
    OK(cuGraphLaunch(made, stream));
    await_start(&gate);
    IS(1, byte_at(memory));
    IS(0, byte_at(memory + 1));
    /* What is queued outlives the graph. */
    OK(cuGraphLaunch(made, stream));
    OK(cuGraphExecDestroy(made));
    OK(cuGraphDestroy(graph));
    atomic_store(&gate.released, 1);
    OK(cuStreamSynchronize(stream));
    IS(2, gate.started);
    IS(1, byte_at(memory + 1));
    OK(cuStreamDestroy_v2(stream));
    OK(cuMemFree_v2(memory));
}

/* A forked child answers, and the parent's function goes on. */
static void forked(void)
{
    struct gate gate = {0};
    void *stream = new_stream(1);
    int status;
    OK(cuLaunchHostFunc(stream, blocks, &gate));
    await_start(&gate);
    if (fork() == 0) {
        IS(3, cuStreamSynchronize(stream));
        IS(3, cuLaunchHostFunc(stream, blocks, &gate));
        IS(3, cuCtxSynchronize());
        exit(4);
    }
    wait(&status);
    IS(4, WEXITSTATUS(status));
    atomic_store(&gate.released, 1);
    OK(cuStreamSynchronize(stream));
    OK(cuStreamDestroy_v2(stream));
}

static void exits(void *data)
{
    (void)data;
    exit(0);
}

int main(int count, char **words)
{
    static struct gate endless;
    const char *how = count > 1 ? words[1] : "";
    ptr leaked;
    enter();
    if (!strcmp(how, "exit-while-one-runs")) {
        OK(cuMemAlloc_v2(&leaked, 64));
        OK(cuLaunchHostFunc(NULL, blocks, &endless));
        await_start(&endless);
        return 0;
    }
    if (!strcmp(how, "exit-inside")) {
        OK(cuMemAlloc_v2(&leaked, 64));
        OK(cuLaunchHostFunc(NULL, exits, NULL));
        cuStreamSynchronize(NULL);
        for (;;)
            usleep(1000);
    }
    held();
    inside();
    waits();
    destroyed();
    graphs();
    forked();
    OK(cuCtxSynchronize());
    OK(cuCtxSetCurrent(NULL));
    OK(cuDevicePrimaryCtxRelease_v2(0));
    return 0;
}
