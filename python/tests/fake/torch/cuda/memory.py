"""The parts of `torch.cuda.memory` that the package calls or replaces functions of."""

import contextlib
import ctypes

from .. import _C


class CUDAPluggableAllocator:
    def __init__(self, path, malloc, free):
        library = ctypes.CDLL(path)
        address = lambda name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        self._allocator = _C._cuda_customAllocator(address(malloc), address(free))

    def allocator(self):
        return self._allocator


class _CUDAAllocator:
    def __init__(self, allocator):
        self._allocator = allocator

    def allocator(self):
        return self._allocator


def change_current_allocator(allocator):
    _C._cuda_changeCurrentAllocator(allocator.allocator())


def _get_current_allocator():
    return _CUDAAllocator(_C._cuda_getAllocator())


def flat(nested):
    found = {}

    def flatten(prefix, value):
        for key, inner in value.items():
            name = prefix + key
            if isinstance(inner, dict):
                flatten(name + ".", inner)
            else:
                found[name] = inner

    flatten("", nested)
    return found


def memory_stats(device=0):
    return flat(_C._cuda_memoryStats(device))


def max_memory_allocated(device=0):
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device=0):
    return memory_stats(device)["reserved_bytes.all.current"]


def memory_snapshot(mempool_id=None):
    return _C._cuda_memorySnapshot(mempool_id)["segments"]


def reset_peak_memory_stats(device=0):
    _C._cuda_resetPeakMemoryStats(device)


def empty_cache():
    _C._cuda_emptyCache()


def mem_get_info(device=None):
    raise AssertionError("the driver's figures were asked for")


class MemPool:
    made = 0

    def __init__(self, allocator=None):
        if _C.current is not None:
            raise RuntimeError("pluggable does not yet support createOrIncrefPool.")
        self.allocator = allocator
        MemPool.made += 1


#: Pools that are entered. Some versions of PyTorch use the outermost, and each refuses one twice.
entered: list[MemPool] = []


@contextlib.contextmanager
def use_mem_pool(pool, device=None):
    if pool in entered:
        raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
    entered.append(pool)
    try:
        yield
    finally:
        entered.remove(pool)
