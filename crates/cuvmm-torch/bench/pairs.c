// Times pairs of an allocation and a free that need no driver call, through the C functions that
// PyTorch calls, beside those of other builds of the library:
//
//     gcc -O2 -o pairs pairs.c -ldl && ./pairs libnoop.so:noop libcuvmm_torch.so:cuvmm
//
// An argument is a library and the beginning of its functions' names. Each round times all libraries
// one after the other; the figure is the median of the rounds, in nanoseconds for a pair.

#define _GNU_SOURCE
#include <string.h>

#include "library.h"

#define ROUNDS 31
#define PAIRS 20000
#define LIBRARIES 8
#define OTHERS 10000

struct library {
    const char *name;
    Malloc allocate;
    Free release;
    double times[ROUNDS];
    void *others[OTHERS];
};

// Times pairs of one size, `held` of them alive at any time.
static double pairs(struct library *library, ssize_t size, int held) {
    void *live[64] = {0};
    for (int i = 0; i < held; i++) live[i] = library->allocate(size, 0, 0);
    double begun = now();
    for (int i = 0; i < PAIRS; i++) {
        library->release(live[i % held], size, 0, 0);
        live[i % held] = library->allocate(size, 0, 0);
    }
    double took = (now() - begun) / PAIRS;
    for (int i = 0; i < held; i++) library->release(live[i], size, 0, 0);
    return took;
}

int main(int count, char **arguments) {
    static struct library libraries[LIBRARIES];
    int all = count - 1;
    if (all < 1 || all > LIBRARIES) {
        fprintf(stderr, "pairs LIBRARY:PREFIX ...\n");
        return 1;
    }
    for (int i = 0; i < all; i++) {
        char *prefix = strrchr(arguments[i + 1], ':');
        if (!prefix) return 1;
        *prefix++ = 0;
        void *loaded = dlopen(arguments[i + 1], RTLD_NOW | RTLD_LOCAL);
        if (!loaded) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        libraries[i].name = arguments[i + 1];
        libraries[i].allocate = (Malloc)function(loaded, prefix, "malloc");
        libraries[i].release = (Free)function(loaded, prefix, "free");
    }
    ssize_t sizes[] = {4096, 1536 << 10, 3 << 20};
    struct {
        int held, others;
    } cases[] = {{1, 0}, {16, 0}, {16, OTHERS}};
    for (int c = 0; c < 3; c++) {
        for (int i = 0; i < all; i++)
            for (int o = 0; o < cases[c].others; o++) libraries[i].others[o] = libraries[i].allocate(512, 0, 0);
        for (int s = 0; s < 3; s++) {
            printf("%8zd bytes, %2d alive and %5d others:", sizes[s], cases[c].held, cases[c].others);
            for (int round = 0; round < ROUNDS; round++)
                for (int i = 0; i < all; i++)
                    libraries[i].times[round] = pairs(&libraries[i], sizes[s], cases[c].held);
            for (int i = 0; i < all; i++) {
                qsort(libraries[i].times, ROUNDS, sizeof(double), compare);
                printf("  %s %.1f", libraries[i].name, libraries[i].times[ROUNDS / 2]);
            }
            printf("\n");
        }
    }
    return 0;
}
