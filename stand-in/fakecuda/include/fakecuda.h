/* fakecuda.h: functions of fakecuda that no driver has, for tests.
 *
 * fakecuda is a libcuda.so.1 over host memory. A program that runs on it can hold streams back, make
 * calls fail, count live objects and ask for a report. The functions are declared weak: linked with a
 * real driver they are null, so a test can ask `if (fakecuda_live)`.
 *
 * Every function returns a CUresult as an int: 0 is CUDA_SUCCESS. Those that name a stream or "the
 * device" need a current context. A stream is a CUstream; null is the default stream.
 */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FAKECUDA_WEAK __attribute__((weak))

/* What fakecuda_live counts, in this order. */
enum fakecuda_counts {
    FAKECUDA_RESERVATIONS, /* ranges of addresses */
    FAKECUDA_PHYSICALS,    /* handles of cuMemCreate, also those that only a mapping keeps alive */
    FAKECUDA_MAPPINGS,
    FAKECUDA_ALLOCATIONS, /* of cuMemAlloc and its kin, pinned and managed memory included */
    FAKECUDA_STREAMS,
    FAKECUDA_EVENTS,
    FAKECUDA_QUEUED,   /* pieces of work that have not run */
    FAKECUDA_CONTEXTS, /* devices whose primary context is retained */
    FAKECUDA_COUNTS
};

/* Counts the live objects. */
FAKECUDA_WEAK int fakecuda_live(uint64_t counts[FAKECUDA_COUNTS]);

/* Holds a stream back, so that work submitted to it is queued; or releases it, so that the work
 * runs in this call. */
FAKECUDA_WEAK int fakecuda_hold(void *stream, bool held);

/* Holds back, or releases, every stream of the device, those created later included. */
FAKECUDA_WEAK int fakecuda_hold_all(bool held);

/* Runs the next piece of work of a stream that is held back. A function of the host is begun, and the
 * stream is busy until it has returned; a graph goes on behind it in the next step.
 * CUDA_ERROR_NOT_READY (600): there is none, or it waits for work of another stream or for a
 * function. */
FAKECUDA_WEAK int fakecuda_step(void *stream);

/* Loses the current context, as a kernel that faults does: CUDA_ERROR_ILLEGAL_ADDRESS from then on. */
FAKECUDA_WEAK int fakecuda_lose(void);

/* Makes calls fail, in addition to those that are to fail already; null makes none fail any more.
 * "cuMemCreate:3" is the third call from now on, "cuMemMap:2-4" three calls, "cuMemMap:2-" all from
 * the second on. ":INVALID_VALUE" after it is the code; it is OUT_OF_MEMORY otherwise. Commas
 * separate several. CUDA_ERROR_INVALID_VALUE (1): the text is wrong, and nothing has changed. */
FAKECUDA_WEAK int fakecuda_fail(const char *faults);

/* Counts the calls that were made to fail. */
FAKECUDA_WEAK int fakecuda_injected(uint64_t *count);

/* Turns the diagnosis on or off. FAKECUDA_REPORT and FAKECUDA_EXIT_CODE turn it on from the start.
 * Objects made while it is off have no known place. */
FAKECUDA_WEAK int fakecuda_watch(bool on);

/* Counts the findings: misuse so far, and what would be leaked if the process ended now. */
FAKECUDA_WEAK int fakecuda_findings(uint64_t *count);

/* Forgets all findings. What lives now is no leak from then on. */
FAKECUDA_WEAK int fakecuda_forget(void);

/* Writes the report of this moment to a descriptor: as text, or as one line of JSON. */
FAKECUDA_WEAK int fakecuda_report(int fd);
FAKECUDA_WEAK int fakecuda_report_json(int fd);

/* A library that keeps memory for its users until the process ends can export this function, which calls
 * `visit` with `visitor` for all memory that users have: its address, its bytes and its device. In reports
 * such memory is a leak, and what the library's own calls have made is none. It is called for each report,
 * the last one when the process ends. */
typedef void (*fakecuda_visit)(void *visitor, uint64_t address, uint64_t size, int device);
void fakecuda_lent(fakecuda_visit visit, void *visitor);

#ifdef __cplusplus
}
#endif

#endif
