// A library in the place of libcuda that refuses one call, and hands all others to the library that it
// is linked with.

#include <dlfcn.h>

#include <atomic>

namespace {

// Which calls from now on are refused: that after so many others. Negative for none.
std::atomic<long> unmaps{-1}, maps{-1};

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
}
