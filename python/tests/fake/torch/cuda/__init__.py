"""The parts of `torch.cuda` that the package calls."""

import contextlib
import ctypes
import types
import warnings

from .. import _C, tensors
from . import _utils, graphs, memory  # noqa: F401

_device = 0
#: The handle of the current stream.
stream = 0


def is_initialized():
    return _C.started


def init():
    """Starts the driver, and makes the primary context of device 0 current."""
    if not _C.started:
        libcuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        assert libcuda.cuInit(0) == 0
        assert libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert libcuda.cuCtxSetCurrent(context) == 0
        _C.started = True


def device_count():
    init()
    count = ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value


def current_device():
    init()
    return _device


def synchronize(device=None):
    libcuda, context, before = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    assert libcuda.cuCtxGetCurrent(ctypes.byref(before)) == 0
    assert libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device or 0) == 0
    assert libcuda.cuCtxSetCurrent(context) == 0
    assert libcuda.cuCtxSynchronize() == 0
    assert libcuda.cuCtxSetCurrent(before) == 0


def _memory_of_the_driver(ordinal):
    """Makes the device's context current if this thread has none, as each call of the runtime does."""
    init()
    libcuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert libcuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
    if not context:
        assert libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0
        assert libcuda.cuCtxSetCurrent(context) == 0
    assert libcuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value, total.value


def cudart():
    return types.SimpleNamespace(cudaMemGetInfo=_memory_of_the_driver)


def current_stream(device=None):
    return types.SimpleNamespace(cuda_stream=stream, device=types.SimpleNamespace(index=_device))


def is_current_stream_capturing():
    status = ctypes.c_int()
    libcuda = ctypes.CDLL("libcuda.so.1")
    code = libcuda.cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    return capturing or (code == 0 and status.value != 0)


@contextlib.contextmanager
def device(ordinal):
    global _device
    before, _device = _device, ordinal
    try:
        yield
    finally:
        _device = before


def current_blas_handle():
    """Makes the workspace of the current stream, which is kept as PyTorch does."""
    init()
    context = ctypes.c_void_p()
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)) == 0
    if not context:
        warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context!")
    key = (_device, stream)
    if key not in workspaces:
        native = not memory.entered and _C.current is None
        workspaces[key] = None if native else Tensor(512)
    return 1


#: Set by a test to say that the current stream captures, although the stand-in's does not.
capturing = False
workspaces = {}


class Tensor:
    """Bytes on the device, from the current allocator or from the pool that is entered."""

    def __init__(self, size):
        init()
        self.size, self.stream, self.device = size, stream, _device
        self.private = memory.entered[0].private if memory.entered else None
        if self.private is not None:
            self.segment = self.private.take(size, _device, stream)
            self.address = self.segment[1]
        else:
            self.allocator = _C.native if _C.current is None else _C.current
            self.address = self.allocator.malloc(size, _device, stream)
        place = tensors.device("cuda", _device)
        self.storage = tensors.Storage(self.address, size, place)

    def untyped_storage(self):
        return self.storage

    def free(self):
        self.storage = None
        if self.private is not None:
            self.private.put(self.segment)
        else:
            self.allocator.free(self.address, self.size, self.device, self.stream)


CUDAGraph = graphs.CUDAGraph
graph_pool_handle = graphs.graph_pool_handle
memory_stats = memory.memory_stats
max_memory_allocated = memory.max_memory_allocated
def memory_reserved(device=0):
    if _C.current is None:
        return _C.native_reserved(device)
    return memory.memory_reserved(device)


memory_snapshot = memory.memory_snapshot
mem_get_info = memory.mem_get_info
reset_peak_memory_stats = memory.reset_peak_memory_stats
empty_cache = memory.empty_cache
MemPool = memory.MemPool
OutOfMemoryError = memory.OutOfMemoryError
use_mem_pool = memory.use_mem_pool
