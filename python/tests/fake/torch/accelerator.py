"""The figures of `torch.accelerator`, which are empty if its allocator has not started."""

from . import _C, cuda


def memory_stats(device=0):
    if not _C._accelerator_isAllocatorInitialized():
        return {}
    return cuda.memory.flat(_C._accelerator_getDeviceStats(device))


def memory_allocated(device=0):
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def memory_reserved(device=0):
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_allocated(device=0):
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def reset_peak_memory_stats(device=0):
    _C._accelerator_resetPeakStats(device)


def get_memory_info(device=0):
    return _C._accelerator_getMemoryInfo(device)


def empty_cache():
    if _C._accelerator_isAllocatorInitialized():
        _C._accelerator_emptyCache()
