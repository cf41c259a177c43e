"""A stand-in for CuPy: see README.md in the folder above."""

from . import cuda


class ndarray:
    """Bytes from CuPy's current allocator."""

    def __init__(self, size):
        self._memory = cuda.current(size)
        self.ptr = self._memory.ptr


def empty(size):
    return ndarray(size)
