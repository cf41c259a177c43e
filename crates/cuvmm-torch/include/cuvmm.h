// The C functions of libcuvmm_torch.so. The README lists what they do.

#ifndef CUVMM_H
#define CUVMM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

// Called once for a request that lacks memory, to give some back.
typedef void (*cuvmm_collector)(void);
// Called after a request found too little memory: bytes asked for, limit, free bytes.
typedef void (*cuvmm_observer)(int device, uint64_t bytes, uint64_t limit, uint64_t free);
// Called when others lack memory, to release blocks of a paged cache.
typedef void (*cuvmm_on_pressure)(uint64_t cache, uint64_t bytes);

// Settings and errors. Functions that return `int` return 0, or a negative number: -3 if memory was
// short, -4 if a name is not published, -1 or another one for all else.
int cuvmm_configure(const char *json);
size_t cuvmm_last_error(char *buffer, size_t length);
int cuvmm_last_status(void);
const char *cuvmm_version(void);

// Memory. `stream` is a CUstream or cudaStream_t. Sizes that are negative are refused.
void *cuvmm_malloc(ssize_t size, int device, void *stream);
void cuvmm_free(void *address, ssize_t size, int device, void *stream);
void *cuvmm_try_malloc(ssize_t size, int device, void *stream);
void *cuvmm_collecting_malloc(ssize_t size, int device, void *stream, cuvmm_collector collector);
void cuvmm_record_stream(void *address, void *stream);
int cuvmm_try_record_stream(void *address, void *stream);
int cuvmm_stream_end(void *stream, int wait);
void cuvmm_reset(void);
int cuvmm_trim(int device, uint64_t *bytes);
void cuvmm_set_collector(cuvmm_collector collector);
void cuvmm_set_observer(cuvmm_observer observer);
void cuvmm_memory_fraction(double fraction, int device);
double cuvmm_get_memory_fraction(int device);
int cuvmm_mem_get_info(int device, uint64_t *free, uint64_t *total);
void *cuvmm_base_alloc(void *address, size_t *size);
int cuvmm_access(const void *address, int device);
size_t cuvmm_extents(const void *address, uint64_t size, int device, char *buffer, size_t length);

// Copies, and waiting for a stream.
int cuvmm_write(int device, uint64_t to, const void *from, size_t size, void *stream);
int cuvmm_read(int device, void *to, uint64_t from, size_t size, void *stream);
int cuvmm_synchronize(int device, void *stream);
int cuvmm_settle(int device, void *stream);

// Figures. Such functions write a text if it fits, and return the bytes that it needs, the zero byte
// included.
size_t cuvmm_stats(int device, char *buffer, size_t length);
size_t cuvmm_memory_stats(int device, char *buffer, size_t length);
size_t cuvmm_snapshot(int device, char *buffer, size_t length);
size_t cuvmm_table(int device, char *buffer, size_t length);
void cuvmm_reset_peak_stats(int device);
void cuvmm_reset_accumulated_stats(int device);
size_t cuvmm_history(int device, char *buffer, size_t length);
void cuvmm_history_end(void);
int cuvmm_profile(void);

// Tags, whose memory sleeps and wakes. `tags` is a JSON list of names, or null for all.
int cuvmm_tag_begin(const char *name, uint64_t *token);
void cuvmm_tag_end(uint64_t token);
int cuvmm_tag_enter(const char *name);
void cuvmm_tag_leave(void);
void *cuvmm_tag_malloc(ssize_t size, int device, void *stream);
void cuvmm_tag_free(void *address, ssize_t size, int device, void *stream);
size_t cuvmm_tag_of(const void *address, char *buffer, size_t length);
int cuvmm_tag_shareable(const char *name);
int cuvmm_graphs_begin(const char *name, int keep, uint64_t *token);
void *cuvmm_graph_malloc(ssize_t size, int device, void *stream);
int cuvmm_sleep(const char *tags, int keep);
int cuvmm_sleep_within(const char *tags, int keep, double seconds);
int cuvmm_sleep_each(const char *tags);
int cuvmm_wake(const char *tags);
int cuvmm_wake_within(const char *tags, double seconds);
int cuvmm_exchange(const char *sleep, const char *wake, int keep);
size_t cuvmm_asleep(char *buffer, size_t length);
int cuvmm_keep(const void *address, uint64_t size, uint64_t *token);
void cuvmm_keep_end(uint64_t token);
int cuvmm_read_kept(const void *address, size_t bytes, void *buffer);
int cuvmm_host_prepare(const char *tags);
int cuvmm_host_release(const char *tags, uint64_t *bytes);
void cuvmm_host_limit(uint64_t bytes);

// Groups of processes, whose tags sleep and wake together. A timeout is in milliseconds.
int cuvmm_group_join(const char *json, uint64_t *token);
size_t cuvmm_group(uint64_t token, char *buffer, size_t length);
int cuvmm_group_sleep(uint64_t token, const char *tags, int keep, uint64_t timeout);
int cuvmm_group_wake(uint64_t token, const char *tags, uint64_t timeout);
void cuvmm_group_leave(uint64_t token);

// Paged caches of keys and values. A number of a block has `width` bytes, 4 or 8.
int cuvmm_paged_new(const char *json, uint64_t *token);
void cuvmm_paged_end(uint64_t token);
size_t cuvmm_paged(uint64_t token, char *buffer, size_t length);
size_t cuvmm_paged_view(uint64_t token, uint32_t group, uint32_t layer, uint32_t part,
    char *buffer, size_t length);
size_t cuvmm_paged_stats(uint64_t token, char *buffer, size_t length);
int cuvmm_paged_back(uint64_t token, const void *numbers, size_t count, int width,
    cuvmm_collector collector);
int cuvmm_paged_try_back(uint64_t token, const void *numbers, size_t count, int width);
int cuvmm_paged_release(uint64_t token, const void *numbers, size_t count, int width);
int cuvmm_paged_reserve(uint64_t token, uint32_t count, cuvmm_collector collector);
int cuvmm_paged_can_allocate(uint64_t token, uint32_t count);
int cuvmm_paged_request(uint64_t token, const void *numbers, size_t count, int width,
    uint64_t *request);
int cuvmm_paged_request_done(uint64_t request);
int cuvmm_paged_request_wait(uint64_t request, double seconds);
int cuvmm_paged_request_take(uint64_t request);
int cuvmm_paged_request_end(uint64_t request);
int cuvmm_paged_step_begin(uint64_t token, uint64_t *step);
void cuvmm_paged_step_end(uint64_t token, uint64_t step);
int cuvmm_paged_record(uint64_t token, void *stream);
int cuvmm_paged_purge(uint64_t token, uint64_t *bytes);
int cuvmm_paged_emptiest(uint64_t token, uint64_t bytes, const void *numbers, size_t count,
    int width, uint32_t *chosen, uint64_t *found);
int cuvmm_paged_on_pressure(uint64_t token, cuvmm_on_pressure function);

// Memory for other processes.
size_t cuvmm_socket(char *buffer, size_t length);
int cuvmm_publish(const char *json, uint64_t *version);
int cuvmm_publication_keep(const char *name, const char *path, const char *keeper,
    uint64_t *version);
int cuvmm_withdraw(const char *name, const char *path);
int cuvmm_attach(const char *json, uint64_t *number);
size_t cuvmm_attached(uint64_t number, char *buffer, size_t length);
int cuvmm_newer(uint64_t number, uint64_t millis, uint64_t *version);
int cuvmm_detach(uint64_t number);
int cuvmm_detach_later(uint64_t number);
int cuvmm_keeper_begin(const char *path, const char *ledgers, uint64_t *token);
void cuvmm_keeper_end(uint64_t token);
int cuvmm_keeper_drop(const char *name, const char *keeper);
int cuvmm_offer(void *address, uint64_t size, uint64_t *number);
size_t cuvmm_offered(uint64_t number, char *buffer, size_t length);
int cuvmm_offer_handles(uint64_t number, int *handles, size_t length);
void cuvmm_offer_end(uint64_t number);
int cuvmm_receive(const char *json, const int *handles, size_t count, int giver, uint64_t *number);

#ifdef __cplusplus
}
#endif

#endif
