"""The parts of `torch.cuda.memory` that the package calls or replaces functions of."""

import contextlib
import ctypes
import itertools
import os
import sys
import weakref

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
    if _C.current is None:
        found = privates.get(mempool_id)
        return [] if found is None else found.snapshot()
    return _C._cuda_memorySnapshot(mempool_id)["segments"]


def reset_peak_memory_stats(device=0):
    _C._cuda_resetPeakMemoryStats(device)


def empty_cache():
    _C._cuda_emptyCache()


def mem_get_info(device=None):
    raise AssertionError("the driver's figures were asked for")


class OutOfMemoryError(RuntimeError):
    pass


class Private:
    """The memory of a pool, in segments with one tensor or none. It stays with its tensors when the pool is dropped."""

    numbers = itertools.count(1)

    def __init__(self, allocator):
        # Without an allocator the memory is PyTorch's own.
        self.allocator = _C.native if allocator is None else allocator
        self.id, self.dropped = (0, next(self.numbers)), False
        self.used, self.free = [], []
        privates[self.id] = self

    def take(self, size, device, stream):
        """Returns a free segment, or a new one. Gives nothing back and tries once, as PyTorch does."""
        fits = [it for it in self.free if it[0] >= size and it[2:] == (device, stream)]
        if fits:
            segment = min(fits)
            self.free.remove(segment)
        else:
            segment = size, self.allocator.malloc(size, device, stream), device, stream
            if not segment[1]:
                raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.used.append(segment)
        return segment

    def put(self, segment):
        self.used.remove(segment)
        self.free.append(segment)

    def release(self):
        assert self.dropped
        for size, address, device, stream in self.free:
            self.allocator.free(address, size, device, stream)
        self.free.clear()
        if not self.used:
            privates.pop(self.id, None)

    def snapshot(self):
        return [{"active_size": it[0]} for it in self.used] + [{"active_size": 0} for it in self.free]


#: The memory of all pools, by their numbers.
privates = {}


class MemPool:
    made = 0

    def __init__(self, allocator=None):
        if _C.current is not None:
            raise RuntimeError("pluggable does not yet support createOrIncrefPool.")
        from . import current_device

        self.private, self.device, self.allocator = Private(allocator), current_device(), allocator
        MemPool.made += 1
        known[self.id] = self

    @property
    def id(self):
        return self.private.id

    def __del__(self):
        private = getattr(self, "private", None)
        if private is None or sys.is_finalizing():
            return
        if any(it.device == self.device for it in entered):
            # PyTorch fails an assertion in a destructor.
            sys.stderr.write("INTERNAL ASSERT FAILED: captures_underway.empty()\n")
            sys.stderr.flush()
            os._exit(134)
        private.dropped = True
        private.release()


#: Pools by their handles.
known = weakref.WeakValueDictionary()
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
