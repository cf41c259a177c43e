// A library in the place of libcuda that refuses one call or holds it up, ends the process when it is asked
// about a stream that was destroyed last, numbers the captures, and hands all others to the library that it is
// linked with.

#include <dlfcn.h>

#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

// Which calls from now on are refused: that after so many others. Negative for none.
std::atomic<long> unmaps{-1}, maps{-1};

// Whether the next creation of memory is held up: no, when it comes, now.
enum { FREE, NEXT, HELD };
std::atomic<int> creation{FREE};

std::atomic<void *> destroyed{nullptr};

// How many captures have begun, and the number of the last on each stream.
std::mutex lock;
unsigned long captures = 0;
std::map<void *, unsigned long> numbers;

bool refuses(std::atomic<long> &left) {
  return left.load() >= 0 && left.fetch_sub(1) == 0;
}

template <typename F> F next(const char *name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

} // namespace

extern "C" {

// Refuses the unmapping after `unmap_at` others and the mapping after `map_at` others.
void refuse_after(long unmap_at, long map_at) {
  unmaps = unmap_at;
  maps = map_at;
}

// Holds the next creation of memory up.
void refuse_hold() { creation = NEXT; }

// Waits until a creation of memory is held up.
void refuse_await() {
  while (creation != HELD)
    sched_yield();
}

// Lets the creation go on.
void refuse_go() { creation = FREE; }

int cuMemCreate(unsigned long long *handle, unsigned long size, const void *props,
                unsigned long long flags) {
  using F = int (*)(unsigned long long *, unsigned long, const void *, unsigned long long);
  int next_one = NEXT;
  if (creation.compare_exchange_strong(next_one, HELD))
    while (creation == HELD)
      sched_yield();
  return next<F>("cuMemCreate")(handle, size, props, flags);
}

int cuMemUnmap(unsigned long long address, unsigned long size) {
  using F = int (*)(unsigned long long, unsigned long);
  // CUDA_ERROR_UNKNOWN
  return refuses(unmaps) ? 999 : next<F>("cuMemUnmap")(address, size);
}

int cuMemMap(unsigned long long address, unsigned long size, unsigned long offset,
             unsigned long long handle, unsigned long long flags) {
  using F = int (*)(unsigned long long, unsigned long, unsigned long, unsigned long long,
                    unsigned long long);
  return refuses(maps) ? 999 : next<F>("cuMemMap")(address, size, offset, handle, flags);
}

int cuStreamDestroy_v2(void *stream) {
  using F = int (*)(void *);
  destroyed = stream;
  return next<F>("cuStreamDestroy_v2")(stream);
}

int cuStreamIsCapturing(void *stream, int *status) {
  using F = int (*)(void *, int *);
  if (stream != nullptr && stream == destroyed)
    abort();
  return next<F>("cuStreamIsCapturing")(stream, status);
}

int cuStreamBeginCapture_v2(void *stream, int mode) {
  using F = int (*)(void *, int);
  {
    std::lock_guard<std::mutex> guard(lock);
    numbers[stream] = ++captures;
  }
  return next<F>("cuStreamBeginCapture_v2")(stream, mode);
}

int cuStreamGetCaptureInfo(void *stream, int *status, unsigned long *id) {
  using F = int (*)(void *, int *, unsigned long *);
  if (stream != nullptr && stream == destroyed)
    abort();
  int code = next<F>("cuStreamGetCaptureInfo")(stream, status, id);
  if (code == 0 && *status == 1) {
    std::lock_guard<std::mutex> guard(lock);
    *id = numbers[stream];
  }
  return code;
}
}
