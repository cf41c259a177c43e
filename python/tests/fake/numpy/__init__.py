"""The parts of NumPy that the package and the README's first script use: dense arrays in host memory."""

import ctypes
import math


class ndarray:  # noqa: N801
    def __init__(self, shape, typestr, memory, strides=None):
        self.shape, self._typestr, self._memory, self._strides = tuple(shape), typestr, memory, strides

    @property
    def __array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self._typestr,
            "data": (ctypes.addressof(self._memory), False),
            "strides": self._strides,
            "version": 3,
        }

    def reshape(self, *shape):
        assert math.prod(shape) == math.prod(self.shape)
        return ndarray(shape, self._typestr, self._memory)

    def __eq__(self, other):
        return _Same(self.shape == other.shape and bytes(self._memory) == bytes(other._memory))


class _Same:
    def __init__(self, same):
        self._same = same

    def all(self):
        return self._same


def empty(shape, dtype):
    typestr = {"float32": "<f4", "uint8": "|u1"}.get(dtype, dtype)
    size = math.prod(shape) * int(typestr[2:])
    return ndarray(shape, typestr, (ctypes.c_char * max(1, size))())


def arange(count, dtype):
    assert dtype == "float32"
    return ndarray((count,), "<f4", (ctypes.c_float * count)(*range(count)))
