"""Device memory as arrays that other libraries read and write in place."""

from __future__ import annotations

import dataclasses
import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any

from . import _dlpack, _library
from ._dtypes import DType, dtype_of, dtype_of_code, pairs_of
from ._errors import Error, OutOfMemoryError
from ._sizes import text_of


#: The devices that the library can have a heap on.
DEVICES = 64
#: The value of an argument that the caller did not name.
_UNNAMED: Any = object()


class _Memory:
    """An allocation. It is freed when the last array and the last tensor over it are gone."""

    is_writable = True

    def __init__(self, nbytes: int, device: int, stream: int) -> None:
        library = _library.get()
        # An array without elements has an address too, which other libraries expect.
        address = library.allocate(max(1, nbytes), device, stream)
        if not address:
            raise library.failure(f"cannot allocate {text_of(nbytes)} on device {device}")
        self.address, self.device, self.stream = address, device, stream
        weakref.finalize(self, library.free, address, nbytes, device, stream).atexit = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy would have the address, and not the memory.
        raise TypeError(
            "cuvmm's device memory is neither pickled nor copied: make a tensor of it with"
            " torch.from_dlpack or cupy.from_dlpack, and copy that"
        )

    def record(self, stream: int) -> None:
        """Notes that work of a stream uses the memory."""
        library = _library.get()
        library.check(library.try_record_stream(self.address, stream))

    def hand_to(self, stream: int) -> None:
        """Makes the memory usable for work of a stream."""
        self.record(stream)
        if stream != self.stream:
            # Work that used this memory before may still be queued on its stream.
            library = _library.get()
            library.check(library.synchronize(self.device, self.stream))


class SharedMemory:
    """Part of a publication that is attached, which `keeps` keeps. No work of this process wrote it."""

    stream, is_writable = 0, False

    def __init__(self, address: int, device: int, keeps: Any) -> None:
        self.address, self.device, self._keeps = address, device, keeps

    __reduce_ex__ = _Memory.__reduce_ex__

    def record(self, stream: int) -> None:
        """Does nothing: detaching waits for all work."""

    hand_to = record


def device_of(device: Any) -> int:
    """Returns a device's ordinal, of an int, of "cuda:1", or of PyTorch's or CuPy's device.

    Raises ValueError or TypeError for what is none.
    """
    if isinstance(getattr(device, "type", None), str):
        # PyTorch's, of any kind, with or without an ordinal.
        device = str(device)
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        if kind != "cuda" or not (number or "0").isdecimal():
            raise ValueError(f"{device!r} is not a device such as 'cuda:0'")
        device = int(number or 0)
    try:
        found = operator.index(getattr(device, "id", device))
    except TypeError:
        raise TypeError(f"{device!r} is not a device such as 0 or 'cuda:0'") from None
    if not 0 <= found < DEVICES:
        raise ValueError(f"devices are numbered from 0 to {DEVICES - 1}, and {device!r} is none")
    return found


def stream_of(stream: Any) -> int:
    """Returns the handle of a stream, of an int, or of PyTorch's or CuPy's stream.

    Raises ValueError or TypeError for what is none. ctypes would take text as an address, and the rest of
    a larger number.
    """
    handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
    try:
        found = operator.index(handle)
    except TypeError:
        raise TypeError(
            f"{stream!r} is not a stream: pass its handle, such as"
            " torch.cuda.current_stream().cuda_stream"
        ) from None
    if not 0 <= found < 1 << 64:
        raise ValueError(f"{stream!r} is not the handle of a stream")
    return found


class DeviceArray:
    """An array in device memory, made by `cuvmm.empty`, or of a publication that is attached.

    Libraries take it without a copy by DLPack (`torch.from_dlpack(array)`,
    `cupy.from_dlpack(array)`) or by the CUDA array interface (`cupy.asarray(array)`). The memory
    lives as long as the array or a tensor over it. It is freed behind the work of the streams that
    were named to `__dlpack__` or `record_stream`. Before such a stream is destroyed, call
    `cuvmm.end_stream`. PyTorch's own never are; keep a `cupy.cuda.Stream` that takes an array until then.
    """

    def __init__(
        self,
        memory: _Memory | SharedMemory,
        shape: tuple[int, ...],
        dtype: DType,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._memory, self._dtype, self.shape = memory, dtype, shape
        #: Elements from one to the next of each dimension.
        self.strides = _dlpack.dense(shape) if strides is None else strides

    @property
    def address(self) -> int:
        """The address of the first element."""
        return self._memory.address

    @property
    def device(self) -> int:
        """The device's ordinal."""
        return self._memory.device

    @property
    def dtype(self) -> str:
        """The name of the element type."""
        return self._dtype.name

    @property
    def nbytes(self) -> int:
        """The size of all elements, in bytes."""
        return math.prod(self.shape) * self._dtype.itemsize

    @property
    def span(self) -> int:
        """The bytes from the first element to the end of the last; with holes, more than `nbytes`."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * self._dtype.itemsize

    def record_stream(self, stream: Any) -> None:
        """Records that work of a stream uses the memory, so that it is freed behind that work.

        stream: a stream of PyTorch or CuPy, or a stream's handle. Call `cuvmm.end_stream` before it is
            destroyed: the heap asks it for its progress.

        Raises `cuvmm.Error` for a stream whose use cannot be recorded, such as a thread's default stream. It
        must not use the memory then.
        """
        self._memory.record(stream_of(stream))

    def copy_from(self, source: Any, stream: Any = None) -> None:
        """Copies an array of NumPy into this one, and waits for the copy.

        source: an array of the same shape and element type in host memory, without holes: of NumPy, or of another
            library that has the array interface.
        stream: the stream behind whose work it is copied; by default the one that the memory was allocated for.

        >>> array.copy_from(numpy.ones((1024, 1024), "float32"))  # doctest: +SKIP

        Raises TypeError for another object or element type, ValueError for another shape, for holes, and for an
        array that is attached for reading, and `cuvmm.Error` if the driver refuses or a graph is captured.
        """
        there = getattr(source, "__array_interface__", None)
        # Pictures of Pillow have the bytes there instead of their address, and others only a buffer.
        data = there.get("data") if isinstance(there, dict) else None
        if not isinstance(data, tuple):
            raise TypeError(f"{type(source).__name__} is no array in host memory: pass numpy.asarray(...) of it")
        if not self._memory.is_writable:
            raise ValueError("the array is attached for reading")
        if tuple(there["shape"]) != self.shape:
            raise ValueError(f"an array of shape {tuple(there['shape'])} does not fit one of shape {self.shape}")
        if not self._dtype.is_type_of(source, there["typestr"]):
            found = getattr(getattr(source, "dtype", None), "name", there["typestr"])
            raise TypeError(
                f"the elements are {found}, and not {self._dtype.typestr} ({self.dtype}): convert them"
                f" with astype({self.dtype!r})"
            )
        steps = there.get("strides")
        # Some libraries name the strides of dense arrays too.
        if steps is not None and not _dlpack.is_dense(self.shape, tuple(steps), self._dtype.itemsize):
            raise ValueError("the array has holes or another order: pass numpy.ascontiguousarray(...) of it")
        self._copy("write", stream, self.address, data[0])

    def numpy(self, stream: Any = None) -> Any:
        """Returns a copy as an array of NumPy, which must be installed, behind the work of a stream.

        stream: the stream whose work is waited for; by default the one that the memory was allocated for. Work
            that other libraries have queued elsewhere must be waited for first.

        >>> array.numpy()  # doctest: +SKIP

        Raises TypeError for an element type that NumPy lacks, ValueError for an array with holes, and
        `cuvmm.Error` if the driver refuses or a graph is captured.
        """
        import numpy

        if self._dtype.typestr[1] == "V":
            raise TypeError(f"NumPy has no {self.dtype}: convert it on the device, or copy an array of uint8")
        copy = numpy.empty(self.shape, self._dtype.typestr)
        self._copy("read", stream, copy.__array_interface__["data"][0], self.address)
        return copy

    def _copy(self, function: str, stream: Any, to: int, source: int) -> None:
        if not _dlpack.is_dense(self.shape, self.strides):
            raise ValueError("the array has holes")
        stream = self._memory.stream if stream is None else stream_of(stream)
        self._memory.record(stream)
        library = _library.get()
        library.check(getattr(library, function)(self.device, to, source, self.nbytes, stream))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_dlpack.CUDA, self.device)

    def __dlpack__(
        self,
        *,
        stream: Any = _UNNAMED,
        max_version: tuple[int, int] | None = None,
        dl_device: Any = _UNNAMED,
        copy: bool | None = None,
    ) -> Any:
        """Exports the array for another library, whose first work is on `stream`.

        The memory is freed behind the work of that stream. With `stream=-1` nothing is ordered and no use is
        noted: if the library's work is still queued when its tensor is freed, it writes into the next owner's
        memory. Name the work's stream with `record_stream`, or wait for it first.

        Raises BufferError for host memory, a copy, and a stream that cannot be used.
        """
        if stream is _UNNAMED and dl_device is not _UNNAMED:
            # A library with streams names one. NumPy has none, and would refuse the tensor only then.
            raise BufferError(f"the memory is on CUDA device {self.device}, and not in host memory")
        if dl_device not in (None, _UNNAMED) and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError("the memory cannot be moved to another device")
        if copy:
            raise BufferError("the memory is not copied")
        memory = self._memory
        # None, 0 and 1 are the legacy default stream; -1 says that the taker keeps the order.
        taker = -1 if stream == -1 else stream_of(0 if stream in (None, _UNNAMED) else stream)
        taker = 0 if taker == 1 else taker
        if taker != -1:
            try:
                memory.hand_to(taker)
            except Error as error:
                raise BufferError(f"the memory cannot be handed to stream {taker:#x}: {error}") from error
        versioned = max_version is not None and tuple(max_version) >= _dlpack.VERSION
        codes = (self._dtype.code, self._dtype.bits, self._dtype.lanes)
        return _dlpack.export(
            self.address, self.device, self.shape, self.strides, codes, versioned, memory
        )

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        size = self._dtype.itemsize
        is_dense = self.strides == _dlpack.dense(self.shape)
        return {
            "shape": self.shape,
            "typestr": self._dtype.typestr,
            "data": (self.address, False),
            "strides": None if is_dense else tuple(step * size for step in self.strides),
            "stream": self._memory.stream or 1,
            "version": 3,
        }

    def __repr__(self) -> str:
        return (
            f"<cuvmm.DeviceArray {self.dtype}{list(self.shape)} at {self.address:#x}"
            f" on device {self.device}>"
        )


def _sizes_of(shape: Any) -> tuple[int, ...]:
    """Returns the sizes of all dimensions, of one size or of several."""
    try:
        return (operator.index(shape),)
    except TypeError:
        pass
    try:
        return tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"a shape is an int or a sequence of ints, not {shape!r}") from None


def empty(
    shape: int | Sequence[int], dtype: object = "uint8", device: object = 0, stream: Any = 0
) -> DeviceArray:
    """Allocates an array whose contents are not set, from the heap of a device.

    shape: the number of elements, or the size of each dimension.
    dtype: a name such as "float16" or "float8_e4m3fn", or a dtype of NumPy, CuPy or PyTorch. An element of
        "float4_e2m1fn_x2" is a byte of two numbers, so the shape counts bytes.
    device: an ordinal, "cuda:1", or a device of PyTorch or CuPy.
    stream: the stream that the memory is allocated for, of PyTorch or CuPy, or its handle. 0 is the
        default stream.

    >>> array = cuvmm.empty((1024, 1024), "bfloat16")  # doctest: +SKIP
    >>> tensor = torch.from_dlpack(array)  # doctest: +SKIP

    Raises `cuvmm.OutOfMemoryError` if there is no memory, also after garbage was collected, and `cuvmm.Error` if
    another thing fails, such as for a device that is not there.
    """
    sizes = _sizes_of(shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"a size is not negative: {sizes}")
    kind = dtype_of(dtype)
    nbytes = math.prod(sizes) * kind.itemsize
    # Sizes and strides beside a size of 0 are numbers of C too, and would be the rest of a division.
    if max(nbytes, math.prod(max(1, size) for size in sizes) * kind.itemsize) >= 1 << 63:
        raise OutOfMemoryError(f"no memory has {nbytes or sizes} bytes")
    memory = _Memory(nbytes, device_of(device), stream_of(stream))
    return DeviceArray(memory, sizes, kind)


@dataclasses.dataclass(frozen=True)
class ForeignArray:
    """Where another library's tensor lies: see `from_dlpack`. It keeps the tensor alive."""

    address: int
    #: The bytes from the first element to the end of the last; for a tensor with holes, with them.
    nbytes: int
    shape: tuple[int, ...]
    #: Elements from one to the next of each dimension.
    strides: tuple[int, ...]
    dtype: str
    #: DLPack's number for the kind of device: 1 is the CPU, 2 is CUDA.
    device_type: int
    device: int
    _keeps: Any = dataclasses.field(repr=False, compare=False)


def from_dlpack(tensor: Any) -> ForeignArray:
    """Returns where a tensor of another library lies. Nothing is copied or waited for, and nothing is ordered
    (`__dlpack__(stream=-1)`): wait for the work that is queued on the tensor before other streams use it, and
    for theirs before it is freed.

    >>> there = cuvmm.from_dlpack(torch.ones(8, device="cuda"))  # doctest: +SKIP
    >>> there.address, there.nbytes, there.device  # doctest: +SKIP

    Numbers of 4 bits are counted in bytes of two (`float4_e2m1fn_x2`), also where the tensor counts each.

    Raises TypeError for an object without `__dlpack__`, and BufferError for a tensor that lies nowhere, whose
    description is wrong, or whose rows of such numbers begin or end within a byte.
    """
    if not hasattr(tensor, "__dlpack__"):
        raise TypeError(f"{type(tensor).__name__} has no __dlpack__")
    device_type = tensor.__dlpack_device__()[0]
    # -1 asks for no synchronization. Producers of CPU memory take no stream.
    arguments: dict[str, Any] = {"stream": -1} if device_type == _dlpack.CUDA else {}
    try:
        # Memory that is only for reading is exported in this form alone.
        capsule = tensor.__dlpack__(max_version=_dlpack.VERSION, **arguments)
    except TypeError:
        # It is older than that.
        capsule = tensor.__dlpack__(**arguments)
    found, is_padded = _dlpack.read(capsule)
    ndim = max(0, found.ndim)
    if ndim > _dlpack.MOST_DIMENSIONS:
        raise BufferError(f"a tensor of {ndim} dimensions has more than {_dlpack.MOST_DIMENSIONS}")
    shape, strides = _dlpack.sizes(found.shape, ndim), _dlpack.sizes(found.strides, ndim)
    if len(shape) != found.ndim or any(size < 0 for size in shape):
        raise BufferError(f"a tensor of {found.ndim} dimensions has the sizes {shape}")
    if not strides:
        strides = _dlpack.dense(shape)
    if any(step < 0 for step in strides):
        raise Error("a tensor with negative strides has no first byte here")
    dtype = dtype_of_code(found.dtype.code, found.dtype.bits, found.dtype.lanes)
    bits = 8 * dtype.itemsize if is_padded else dtype.bits * dtype.lanes
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    address = (found.data or 0) + found.byte_offset
    nbytes = 0 if 0 in shape else -(-elements * bits // 8)
    if nbytes > 0 and (not found.data or address + nbytes > 1 << 64):
        raise BufferError(f"a tensor has {nbytes} bytes at {address:#x}")
    if not is_padded:
        try:
            dtype, shape, strides = pairs_of(dtype, shape, strides)
        except ValueError as error:
            raise BufferError(f"a tensor cannot be read here: {error}") from error
    return ForeignArray(
        address=address,
        nbytes=nbytes,
        shape=shape,
        strides=strides,
        dtype=dtype.name,
        device_type=int(found.device.device_type),
        device=int(found.device.device_id),
        _keeps=capsule,
    )
