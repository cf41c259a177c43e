/* Forked children while threads of the parent are in calls: every call of a child answers at once, also
 * where it would take a lock that a thread of the parent held. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "driver.h"

int cuMemGetInfo_v2(size_t *, size_t *);

static atomic_int ends;
static void *context;

static void *calls(void *unused)
{
    (void)unused;
    OK(cuCtxSetCurrent(context));
    while (!ends) {
        ptr made;
        OK(cuMemAlloc_v2(&made, 64));
        OK(cuMemsetD8_v2(made, 1, 64));
        OK(cuMemFree_v2(made));
    }
    return NULL;
}

static int child(void)
{
    ptr made;
    size_t free, total;
    /* A child that waits for a lock is ended. */
    alarm(20);
    IS(3, cuInit(0));
    IS(3, cuMemGetInfo_v2(&free, &total));
    IS(3, cuMemAlloc_v2(&made, 64));
    IS(3, cuStreamSynchronize(NULL));
    IS(3, cuCtxSynchronize());
    IS(3, fakecuda_fail("cuMemAlloc:1"));
    IS(3, fakecuda_fail(NULL));
    return 7;
}

int main(void)
{
    /* Faults that are judged at each call and hit none: their lock is held most of the time. */
    enum { FAULTS = 4000, THREADS = 4, CHILDREN = 40 };
    static char faults[FAULTS * 24] = "";
    char *end = faults;
    pthread_t threads[THREADS];
    for (int at = 0; at < FAULTS; at++)
        end += sprintf(end, "%scuMemAlloc:999999999", at ? "," : "");
    context = enter();
    OK(fakecuda_fail(faults));
    for (int at = 0; at < THREADS; at++)
        if (pthread_create(&threads[at], NULL, calls, NULL))
            return 97;
    for (int at = 0; at < CHILDREN; at++) {
        int status;
        pid_t process = fork();
        if (process == 0)
            _exit(child());
        if (waitpid(process, &status, 0) != process || !WIFEXITED(status))
            return 96;
        IS(7, WEXITSTATUS(status));
    }
    ends = 1;
    for (int at = 0; at < THREADS; at++)
        pthread_join(threads[at], NULL);
    OK(fakecuda_fail(NULL));
    return 0;
}
