/* A test of a program's error path, and of work that is queued, with the functions of fakecuda.h. */
#include "driver.h"

int main(void)
{
    uint64_t live[FAKECUDA_COUNTS], count;
    ptr made, other;
    void *stream;
    char bytes[8];

    enter();
    OK(cuStreamCreate(&stream, 1));
    OK(fakecuda_watch(true));
    OK(cuMemAlloc_v2(&made, 64));

    /* The second allocation from now on fails, with another code than usual. */
    OK(fakecuda_fail("cuMemAlloc:2:INVALID_CONTEXT"));
    OK(cuMemAlloc_v2(&other, 64));
    IS(201, cuMemAlloc_v2(&other, 64));
    OK(fakecuda_injected(&count));
    IS(1, (int)count);
    OK(fakecuda_fail(NULL));
    IS(1, fakecuda_fail("cuMemAlloc"));
    IS(1, fakecuda_fail("cuMemAllocate:1"));

    /* Work waits until the stream is released, or until the test runs it piece by piece. */
    OK(fakecuda_hold(stream, true));
    OK(cuMemsetD8Async(made, 1, 8, stream));
    OK(cuMemsetD8Async(made, 2, 8, stream));
    IS(600, cuStreamQuery(stream));
    OK(fakecuda_live(live));
    IS(2, (int)live[FAKECUDA_QUEUED]);
    IS(2, (int)live[FAKECUDA_ALLOCATIONS]);
    OK(fakecuda_step(stream));
    OK(cuMemcpyDtoH_v2(bytes, made, 8));
    IS(1, bytes[7]);
    OK(fakecuda_hold(stream, false));
    OK(cuStreamQuery(stream));
    OK(cuMemcpyDtoH_v2(bytes, made, 8));
    IS(2, bytes[7]);
    OK(fakecuda_hold_all(true));
    OK(cuMemsetD8Async(made, 3, 8, stream));
    IS(600, cuStreamQuery(stream));
    OK(fakecuda_hold_all(false));
    OK(cuStreamQuery(stream));
    IS(600, fakecuda_step(stream));

    /* Two allocations would be leaked if the process ended now. */
    OK(fakecuda_findings(&count));
    IS(2, (int)count);
    OK(fakecuda_report(STDERR_FILENO));
    OK(fakecuda_forget());
    OK(fakecuda_findings(&count));
    IS(0, (int)count);
    OK(fakecuda_report_json(STDERR_FILENO));
    IS(1, fakecuda_report(-1));

    OK(fakecuda_lose());
    IS(700, cuStreamQuery(stream));
    return 0;
}
