"""The parts of `cupy.cuda` that the package calls."""

import ctypes
import types


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(f"{size} {total} {limit}")
        self.size, self.total, self.limit = size, total, limit


memory = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
current = None


class Stream:
    """A stream of the driver, which is destroyed with this object, or one with the handle `ptr`."""

    def __init__(self, ptr=None):
        self._own = ptr is None
        self.ptr = _created() if self._own else ptr

    def __del__(self):
        if self._own:
            assert ctypes.CDLL("libcuda.so.1").cuStreamDestroy_v2(ctypes.c_void_p(self.ptr)) == 0


def _enter(device):
    libcuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert libcuda.cuInit(0) == 0
    assert libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert libcuda.cuCtxSetCurrent(context) == 0
    return libcuda


def _created():
    libcuda, created = _enter(current_device), ctypes.c_void_p()
    assert libcuda.cuStreamCreate(ctypes.byref(created), 1) == 0
    return created.value


#: The current stream of device 0, and the current device.
stream = Stream(0)
current_device = 0
#: The current streams of the other devices.
streams = {}


def get_current_stream(device_id=-1):
    device_id = current_device if device_id == -1 else device_id
    return stream if device_id == 0 else streams.setdefault(device_id, Stream(0))


class _Memory:
    def __init__(self, malloc, free, size):
        self._free, self._device = free, current_device
        self.ptr = malloc(size, self._device)

    def __del__(self):
        if hasattr(self, "ptr"):
            self._free(self.ptr, self._device)


class PythonFunctionAllocator:
    def __init__(self, malloc, free):
        self._malloc, self._free = malloc, free

    def malloc(self, size):
        return _Memory(self._malloc, self._free, size)


def set_allocator(function):
    global current
    current = function
