/* An allocator that has no memory: each address is new, and is never used again. With it, compare.py
 * measures what PyTorch itself takes for an allocation and a free. Nothing may read or write the
 * memory.
 *
 *   gcc -O2 -shared -fPIC -o libnoop.so noop.c
 */
#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

/* No GPU has memory there. */
static _Atomic uintptr_t next = (uintptr_t)1 << 40;

void *noop_malloc(ssize_t size, int device, void *stream) {
    (void)device;
    (void)stream;
    if (size <= 0)
        return 0;
    uintptr_t rounded = ((uintptr_t)size + 511) & ~(uintptr_t)511;
    return (void *)atomic_fetch_add(&next, rounded);
}

void noop_free(void *address, ssize_t size, int device, void *stream) {
    (void)address;
    (void)size;
    (void)device;
    (void)stream;
}
