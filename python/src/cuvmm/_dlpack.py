"""DLPack's structures, and capsules of them, through ctypes.

An exported structure owns a reference to all that it needs until its deleter is called, by the library
that took the tensor, or by the capsule if none did. Both may happen in any thread, and while an exception
is raised, so these two functions are of the library and not of Python.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from . import _library

CUDA = 2

_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
#: The oldest version of versioned capsules.
VERSION = (1, 0)
#: The version that they have here: the first one with elements of 8 and 4 bits.
_WRITTEN = (1, 1)
#: The flag of a tensor whose elements of less than a byte take one each.
_PADDED = 4
#: The most dimensions of a tensor, as in NumPy and PyTorch.
MOST_DIMENSIONS = 64


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    """A tensor's description."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("dl_tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    ]


# Prototypes of our own: those of `ctypes.pythonapi` are shared with other packages.
_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_keep = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", _api))
_let_go = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_DecRef", _api))


def export(
    address: int,
    device: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: tuple[int, int, int],
    versioned: bool,
    memory: Any,
) -> Any:
    """Returns a capsule of a tensor on a CUDA device, which keeps `memory` until its end.

    strides: elements from one to the next of each dimension.
    dtype: code, bits and lanes of an element.
    """
    managed = _ManagedVersioned() if versioned else _Managed()
    if versioned:
        managed.major, managed.minor = _WRITTEN
    tensor = managed.dl_tensor
    tensor.data = address
    tensor.device = _DLDevice(CUDA, device)
    tensor.ndim = len(shape)
    tensor.dtype = _DLDataType(*dtype)
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    steps = (ctypes.c_int64 * max(1, len(shape)))(*strides)
    tensor.shape, tensor.strides = sizes, steps
    library = _library.get()
    deleter = "cuvmm_dlpack_delete_versioned" if versioned else "cuvmm_dlpack_delete"
    managed.deleter = library.address(deleter)
    kept = (managed, sizes, steps, memory)
    managed.manager_ctx = id(kept)
    _keep(kept)
    name = _NAME_VERSIONED if versioned else _NAME
    try:
        return _new(ctypes.addressof(managed), name, library.address("cuvmm_dlpack_destroy"))
    except BaseException:
        _let_go(kept)
        raise


def read(capsule: Any) -> tuple[DLTensor, bool]:
    """Returns the description in a capsule that no library took, which is valid as long as the capsule, and True if
    its elements of less than a byte take one each.

    Raises ValueError for what is none, and BufferError for a version that is not known here.
    """
    if _is_valid(id(capsule), _NAME):
        return _Managed.from_address(_pointer(id(capsule), _NAME)).dl_tensor, False
    if not _is_valid(id(capsule), _NAME_VERSIONED):
        raise ValueError(f"{capsule!r} is not a capsule of a tensor, or its tensor was taken")
    managed = _ManagedVersioned.from_address(_pointer(id(capsule), _NAME_VERSIONED))
    if managed.major != VERSION[0]:
        # Nothing behind the version is where it is expected.
        found = f"{managed.major}.{managed.minor}"
        raise BufferError(f"a tensor of version {found} of DLPack cannot be read here")
    return managed.dl_tensor, bool(managed.flags & _PADDED)


def sizes(pointer: Any, count: int) -> tuple[int, ...]:
    """Returns the numbers that a description points to."""
    return tuple(itertools.islice(pointer, count)) if pointer else ()


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a tensor of this shape whose elements lie one after the other.

    >>> dense((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))[: len(shape)]


def is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 1) -> bool:
    """Returns True if the elements lie one after the other. Strides are in elements, or in bytes with `itemsize`.

    Steps of a dimension of one element, and of an array without elements, lead nowhere.

    >>> is_dense((1, 3), (100, 1)), is_dense((2, 3), (100, 1))
    (True, False)
    """
    steps = zip(shape, strides, dense(shape), strict=False)
    dense_steps = all(size == 1 or step == usual * itemsize for size, step, usual in steps)
    return len(strides) == len(shape) and (0 in shape or dense_steps)
