// Times the operations of a recorded training through the C functions that PyTorch calls, beside those
// of other builds of the library:
//
//     gcc -O2 -o ops ops.c -ldl && zcat trace.gz | ./ops libnoop.so:noop libcuvmm_torch.so:cuvmm
//
// Reads lines `a NUMBER BYTES STREAM` and `f NUMBER`, the format of `cuvmm heap`; all are played on the
// default stream. It needs no GPU: on cuvmm's stand-in for libcuda (`LD_LIBRARY_PATH`,
// `FAKECUDA_CAPACITY`) a driver call takes little, and the times are those of the library. An argument
// is a library and the beginning of its functions' names. The libraries take turns, a round each; a
// figure is the least of the rounds, in nanoseconds: the mean of an allocation and a free, without the
// slowest fiftieth of each, where calls of the driver are. It contains the time of the clock, so compare
// it with that of an allocator that does nothing (noop.c).

#define _GNU_SOURCE
#include <string.h>

#include "library.h"

#define ROUNDS 7
#define LIBRARIES 8
#define SMALL (1L << 20)

// Kinds of times: small and large allocations, then their frees.
enum { KINDS = 4 };

struct operation {
    long number, size;
};

struct library {
    const char *name;
    Malloc allocate;
    Free release;
    double least[KINDS];
};

static struct operation *operations;
static long count, numbers;

static void read_trace(void) {
    long room = 0;
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        struct operation *next;
        if (count == room) {
            room = room ? 2 * room : 1024;
            operations = realloc(operations, room * sizeof *operations);
        }
        next = &operations[count];
        next->size = -1;
        if (sscanf(line, "a %ld %ld", &next->number, &next->size) != 2 &&
            sscanf(line, "f %ld", &next->number) != 1) {
            fprintf(stderr, "not an operation: %s", line);
            exit(1);
        }
        if (next->number >= numbers) numbers = next->number + 1;
        count++;
    }
}

// Plays the trace once, frees what is left, and notes the least means.
static void play(struct library *library) {
    double *times[KINDS];
    long counts[KINDS] = {0};
    void **live = calloc(numbers, sizeof *live);
    long *sizes = calloc(numbers, sizeof *sizes);
    for (int kind = 0; kind < KINDS; kind++) times[kind] = malloc(count * sizeof(double));
    for (long i = 0; i < count; i++) {
        long number = operations[i].number;
        int frees = operations[i].size < 0;
        if (!frees) sizes[number] = operations[i].size;
        if (frees && !live[number]) continue;
        double begun = now();
        if (frees) {
            library->release(live[number], sizes[number], 0, 0);
            live[number] = 0;
        } else {
            live[number] = library->allocate(sizes[number], 0, 0);
        }
        double taken = now() - begun;
        int kind = 2 * frees + (sizes[number] > SMALL);
        times[kind][counts[kind]++] = taken;
    }
    for (long number = 0; number < numbers; number++)
        if (live[number]) library->release(live[number], sizes[number], 0, 0);
    for (int kind = 0; kind < KINDS; kind++) {
        long kept = counts[kind] * 49 / 50;
        double sum = 0;
        qsort(times[kind], counts[kind], sizeof(double), compare);
        for (long i = 0; i < kept; i++) sum += times[kind][i];
        double mean = kept ? sum / kept : 0;
        if (!library->least[kind] || mean < library->least[kind]) library->least[kind] = mean;
        free(times[kind]);
    }
    free(live);
    free(sizes);
}

int main(int arguments, char **values) {
    struct library libraries[LIBRARIES] = {0};
    int known = 0;
    read_trace();
    for (int i = 1; i < arguments && known < LIBRARIES; i++) {
        char *prefix = strchr(values[i], ':');
        if (!prefix) {
            fprintf(stderr, "%s: LIBRARY:PREFIX is wanted\n", values[i]);
            return 1;
        }
        *prefix++ = 0;
        void *opened = dlopen(values[i], RTLD_NOW | RTLD_LOCAL);
        if (!opened) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        struct library *library = &libraries[known++];
        library->name = values[i];
        library->allocate = function(opened, prefix, "malloc");
        library->release = function(opened, prefix, "free");
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < known; i++) play(&libraries[i]);
    printf("%-32s %10s %10s\n", "ns", "small", "large");
    for (int i = 0; i < known; i++) {
        double *least = libraries[i].least;
        printf("%-32s %10.0f %10.0f\n", libraries[i].name, least[0] + least[2], least[1] + least[3]);
    }
    return 0;
}
