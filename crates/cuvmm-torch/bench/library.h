// Calls of the C functions of a build of the library, and the clock.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>

typedef void *(*Malloc)(ssize_t, int, void *);
typedef void (*Free)(void *, ssize_t, int, void *);

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

static void *function(void *library, const char *prefix, const char *name) {
    char full[128];
    snprintf(full, sizeof full, "%s_%s", prefix, name);
    void *found = dlsym(library, full);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}
