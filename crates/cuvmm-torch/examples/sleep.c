/* Memory of a tag that sleeps and wakes at the same address, from C:

       cargo build -p cuvmm-torch -p fakecuda
       gcc -Icrates/cuvmm-torch/include crates/cuvmm-torch/examples/sleep.c -o sleep \
           -Ltarget/debug -lcuvmm_torch -Wl,-rpath,"$PWD/target/debug"
       ./sleep

   Without a GPU, on the stand-in for libcuda:

       mkdir -p standin && ln -sf "$PWD/target/debug/libfakecuda.so" standin/libcuda.so.1
       LD_LIBRARY_PATH=standin ./sleep */

#include <stdio.h>
#include <stdlib.h>

#include "cuvmm.h"

#define MIB ((size_t)1 << 20)

// Ends the program with the thread's last error, unless `code` is 0.
static void must(int code) {
    char text[1024];
    if (code != 0) {
        cuvmm_last_error(text, sizeof text);
        fprintf(stderr, "%s\n", text);
        exit(1);
    }
}

int main(void) {
    must(cuvmm_configure("{\"limit\": 67108864}"));
    uint64_t token, free_bytes, limit;
    must(cuvmm_tag_begin("weights", &token));
    void *weights = cuvmm_tag_malloc(32 * MIB, 0, NULL);
    cuvmm_tag_end(token);
    if (weights == NULL)
        return 1; // the reason is on standard error
    double number = 1.5;
    must(cuvmm_write(0, (uintptr_t)weights, &number, sizeof number, NULL));

    must(cuvmm_sleep("[\"weights\"]", 1)); // contents go to host memory
    must(cuvmm_mem_get_info(0, &free_bytes, &limit));
    printf("asleep: %zu of %zu MiB are free\n", free_bytes / MIB, limit / MIB);

    must(cuvmm_wake("[\"weights\"]")); // back at the same address
    number = 0;
    must(cuvmm_read(0, &number, (uintptr_t)weights, sizeof number, NULL));
    printf("awake: %g\n", number);

    if (cuvmm_try_malloc(64 * MIB, 0, NULL) == NULL) { // more than is left
        char text[1024];
        cuvmm_last_error(text, sizeof text);
        printf("refused: %s\n", text);
    }
    cuvmm_tag_free(weights, 32 * MIB, 0, NULL);
    return 0;
}
