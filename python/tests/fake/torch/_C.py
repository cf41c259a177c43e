"""PyTorch's C functions for a pluggable allocator: those that it refuses raise what it raises."""

import ctypes
import threading

_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

current = None
started = False
benchmark = False


class _refuse:
    """A function that is refused. As those of C, it is no Python function."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *arguments, **named):
        raise RuntimeError(
            f"CUDAPluggableAllocator does not yet support {self.name}. If you need it, please file"
            " an issue describing your use case."
        )


class _CUDAPluggableAllocator:
    def __init__(self, malloc, free):
        self.malloc, self.free, self.hooks = _MALLOC(malloc), _FREE(free), {}


def _setter(name):
    def setter(self, address):
        assert address > 4096, f"{name} got {address}"
        self.hooks[name] = address

    return setter


for _name in (
    "set_init_fn",
    "set_reset_fn",
    "set_memory_fraction_fn",
    "set_base_alloc_fn",
    "set_record_stream_fn",
    "set_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn",
    "set_release_pool",
):
    setattr(_CUDAPluggableAllocator, _name, _setter(_name))


def _cuda_customAllocator(malloc, free):
    return _CUDAPluggableAllocator(malloc, free)


def _cuda_getAllocator():
    return current


def _cuda_changeCurrentAllocator(allocator):
    global current
    if started:
        raise RuntimeError("Can't swap an already initialized allocator")
    current = allocator


class _Native:
    """PyTorch's own allocator, without its caches."""

    def malloc(self, size, device, stream):
        address = ctypes.c_uint64()
        assert ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        return address.value

    def free(self, address, size, device, stream):
        assert ctypes.CDLL("libcuda.so.1").cuMemFree_v2(ctypes.c_uint64(address)) == 0


native = _Native()

#: Free memory that PyTorch's own allocator keeps on device 0, and tensors outside of pools.
native_cache, native_used = [], 0
#: The function that says how much memory pools have of PyTorch's own allocator.
native_pools = None


def native_reserve(size):
    """Makes PyTorch's own allocator keep free memory."""
    address = ctypes.c_uint64()
    assert ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    native_cache.append((address.value, size))


def native_reserved(device):
    own = native_used + sum(size for _, size in native_cache) if device == 0 else 0
    return own + (native_pools(device) if native_pools else 0)


def _cuda_emptyCache():
    if current is None:
        from .cuda import memory

        # What is outside of pools stays while one is entered.
        while native_cache and not memory.entered:
            address, _ = native_cache.pop()
            assert ctypes.CDLL("libcuda.so.1").cuMemFree_v2(ctypes.c_uint64(address)) == 0
        for private in list(memory.privates.values()):
            if private.dropped:
                private.release()
        return
    ctypes.CFUNCTYPE(None)(current.hooks["set_reset_fn"])()


def _cuda_setMemoryFraction(fraction, device):
    function = ctypes.CFUNCTYPE(None, ctypes.c_double, ctypes.c_int)
    function(current.hooks["set_memory_fraction_fn"])(fraction, device)


_cuda_memoryStats = _refuse("getDeviceStats")
_cuda_memorySnapshot = _refuse("snapshot")
_cuda_resetPeakMemoryStats = _refuse("resetPeakStats")
_cuda_resetAccumulatedMemoryStats = _refuse("resetAccumulatedStats")
_cuda_getMemoryFraction = _refuse("getMemoryFraction")
_cuda_getCheckpointState = _refuse("getCheckpointState")
_cuda_setCheckpointPoolState = _refuse("setCheckpointPoolState")
_cuda_record_memory_history = _refuse("recordHistory")
_cuda_record_memory_history_legacy = _refuse("recordHistory")
_cuda_attach_out_of_memory_observer = _refuse("attachOutOfMemoryObserver")

_accelerator_getDeviceStats = _refuse("getDeviceStats")
_accelerator_resetPeakStats = _refuse("resetPeakStats")
_accelerator_resetAccumulatedStats = _refuse("resetAccumulatedStats")
_accelerator_getMemoryInfo = _refuse("getMemoryInfo")
_accelerator_emptyCache = _refuse("emptyCache")


def _accelerator_isAllocatorInitialized():
    return False


class StorageBase:
    _share_cuda_ = _refuse("shareIPcHandle")
    _new_shared_cuda = staticmethod(_refuse("getIpcDevPtr"))


class _Autograd(threading.local):
    multithreading = True


_autograd = _Autograd()


def _is_multithreading_enabled():
    return _autograd.multithreading


def _set_multithreading_enabled(enabled):
    _autograd.multithreading = enabled


def _get_cudnn_benchmark():
    return benchmark


def _set_cudnn_benchmark(value):
    global benchmark
    benchmark = value
