"""The parts of `cupy.cuda` that the package calls."""

import types


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(f"{size} {total} {limit}")
        self.size, self.total, self.limit = size, total, limit


memory = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
current = None


class Stream:
    def __init__(self, ptr):
        self.ptr = ptr


#: The current stream.
stream = Stream(0)


def get_current_stream():
    return stream


class _Memory:
    def __init__(self, malloc, free, size):
        self._free = free
        self.ptr = malloc(size, 0)

    def __del__(self):
        if hasattr(self, "ptr"):
            self._free(self.ptr, 0)


class PythonFunctionAllocator:
    def __init__(self, malloc, free):
        self._malloc, self._free = malloc, free

    def malloc(self, size):
        return _Memory(self._malloc, self._free, size)


def set_allocator(function):
    global current
    current = function
