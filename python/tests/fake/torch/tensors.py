"""Tensors with the parts that `cuvmm.publish` and `cuvmm.attach` touch, in host and device memory.

The memory of the stand-in for libcuda can be read and written by the CPU.
"""

import ctypes
import math

from . import _C


class dtype:  # noqa: N801
    def __init__(self, name, itemsize):
        self.name, self.itemsize = name, itemsize

    def __str__(self):
        return f"torch.{self.name}"

    def __reduce__(self):
        return _dtype_of, (self.name,)


def _dtype_of(name):
    return types[name]


types = {
    name: dtype(name, size)
    for size, names in {
        1: ("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
            "float8_e8m0fnu", "float4_e2m1fn_x2"),
        2: ("int16", "uint16", "float16", "bfloat16"),
        4: ("int32", "uint32", "float32"),
        8: ("int64", "uint64", "float64", "complex64"),
        16: ("complex128",),
    }.items()
    for name in names
}
strided, sparse_coo = "torch.strided", "torch.sparse_coo"


class device:  # noqa: N801
    def __init__(self, type, index=None):
        self.type, self.index = type, index

    def __str__(self):
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Storage(_C.StorageBase):
    def __init__(self, address=0, size=0, place=None, keeps=None):
        self._address, self._size, self.device, self.keeps = address, size, place, keeps

    def data_ptr(self):
        return self._address

    def nbytes(self):
        return self._size


def dense(shape):
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


class Tensor:
    """A view of memory that `keeps` keeps."""

    is_quantized, is_nested, is_leaf, requires_grad, layout = False, False, True, False, strided

    def __init__(self, address, shape, dtype, place, keeps, strides=None):
        self.address, self.shape, self.dtype = address, tuple(shape), dtype
        self.device, self.keeps = place, keeps
        self.strides = dense(self.shape) if strides is None else tuple(strides)

    def untyped_storage(self):
        if hasattr(self.keeps, "untyped_storage"):
            return self.keeps.untyped_storage()
        if not hasattr(self, "_storage"):
            size = self.numel() * self.dtype.itemsize
            self._storage = Storage(self.address, size, self.device, self.keeps)
        return self._storage

    def detach(self):
        return self

    resolve_conj = resolve_neg = detach

    def is_conj(self):
        return False

    is_neg = has_names = is_conj

    def storage_offset(self):
        return (self.address - self.untyped_storage().data_ptr()) // self.dtype.itemsize

    def data_ptr(self):
        return self.address if self.numel() else 0

    def numel(self):
        return math.prod(self.shape)

    def element_size(self):
        return self.dtype.itemsize

    def stride(self):
        return self.strides

    def is_contiguous(self):
        return self.strides == dense(self.shape)

    def view(self, kind, *sizes):
        if not isinstance(kind, dtype):
            # The first two dimensions as one.
            shape = tuple(kind) if isinstance(kind, tuple) else (kind, *sizes)
            blocks, tokens, *rest = self.shape
            assert shape == (blocks * tokens, *rest) and self.strides[0] == tokens * self.strides[1]
            return Tensor(self.address, shape, self.dtype, self.device, self.keeps, self.strides[1:])
        if kind.itemsize == self.dtype.itemsize:
            return Tensor(self.address, self.shape, kind, self.device, self.keeps, self.strides)
        (size,), (step,) = self.shape, self.strides
        assert step == 1 and size * self.dtype.itemsize % kind.itemsize == 0, (size, kind)
        size = size * self.dtype.itemsize // kind.itemsize
        return Tensor(self.address, (size,), kind, self.device, self.keeps)

    def __getitem__(self, part):
        begin, end, _ = part.indices(self.shape[0])
        address = self.address + begin * self.strides[0] * self.dtype.itemsize
        return Tensor(address, (end - begin, *self.shape[1:]), self.dtype, self.device, self.keeps, self.strides)

    def fill_(self, value):
        """Sets the elements of rows without holes to zero."""
        rows, *row = self.shape
        assert value == 0 and self.strides[1:] == dense(tuple(row))
        size = self.dtype.itemsize
        for place in range(rows):
            ctypes.memset(self.address + place * self.strides[0] * size, 0, math.prod(row) * size)
        return self

    def as_strided(self, shape, strides, offset=0):
        last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        assert 0 not in shape and last < self.numel(), (shape, strides, self.shape)
        address = self.address + offset * self.dtype.itemsize
        return Tensor(address, shape, self.dtype, self.device, self.keeps, strides)

    def contiguous(self):
        copy = empty(self.shape, dtype=self.dtype, device=self.device)
        size = self.dtype.itemsize
        for place, element in enumerate(self.elements()):
            ctypes.memmove(copy.address + place * size, element, size)
        return copy

    def elements(self):
        """Returns the bytes of each element in order."""
        places = [0]
        for size, step in zip(self.shape, self.strides, strict=True):
            places = [place + at * step for place in places for at in range(size)]
        size = self.dtype.itemsize
        return [ctypes.string_at(self.address + place * size, size) for place in places]

    def bytes(self):
        return b"".join(self.elements())

    def fill(self, content):
        """Writes the bytes of a dense tensor."""
        assert (
            self.strides == dense(self.shape) and len(content) == self.numel() * self.dtype.itemsize
        )
        ctypes.memmove(self.address, content, len(content))
        return self


def empty(shape, dtype, device="cpu"):
    size = math.prod(shape) * dtype.itemsize
    text = str(device)
    if text == "cpu":
        memory = ctypes.create_string_buffer(max(1, size))
        return Tensor(ctypes.addressof(memory), shape, dtype, _place(text), memory)
    import cuvmm

    memory = cuvmm.empty(size, device=text)
    return Tensor(memory.address, shape, dtype, _place(text), memory)


def from_dlpack(array):
    import cuvmm

    there = cuvmm.from_dlpack(array)
    place = device("cuda", there.device)
    return Tensor(there.address, there.shape, types[there.dtype], place, there, there.strides)


def _place(text):
    kind, _, index = text.partition(":")
    return device(kind, int(index or 0) if kind == "cuda" else None)
