"""Publications of other processes, attached as tensors."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import _dlpack, _library
from ._arrays import DeviceArray, SharedMemory, device_of
from ._dtypes import dtype_of, name_from_files, shape_from_files
from ._errors import Error, NotPublishedError
from ._publishing import IN_PLACE, STRIDES, absolute, checked, users_of
from ._sizes import text_of
from ._sleeping import seconds_of

if TYPE_CHECKING:
    import torch

#: How long one request waits, in seconds, so that a signal is noticed.
_PIECE = 0.5
#: The pause between two searches for a name, in seconds.
_PAUSE = 0.05


class AttachedMemory:
    """An attachment of the library. It ends when the last tensor over it is gone."""

    def __init__(self, number: int) -> None:
        self.number = number
        weakref.finalize(self, _detach, number).atexit = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("attached memory is neither pickled nor copied: attach it again")


def _detach(number: int) -> None:
    """Detaches, which waits for devices. The library does it later if a graph is captured.

    It knows PyTorch's captures only if it is installed. Garbage collection runs on any thread, also on
    one that captures.
    """
    library, torch = _library.get(), sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        stream = torch.cuda.current_stream()
        # 1 is for a stream that captures.
        if library.settle(stream.device.index, stream.cuda_stream) == 1:
            library.detach_later(number)
            return
    library.detach(number)


class Attached(Mapping[str, "torch.Tensor"]):
    """A publication that is attached: its tensors by their names.

    They are PyTorch's tensors over the memory of the publication, made when they are asked for. A
    tensor keeps the memory, also when this object and the publisher are gone.

    The memory is for reading: every process that has it attached sees the same bytes. If it was published in place
    (`in_place`), the publisher may write to it at any time, and a kernel that reads meanwhile gets some elements from
    before and some from after; when the name is published again or withdrawn, its memory is used for other tensors. An operation
    that writes to such a tensor is an illegal memory access, after which the process cannot use the
    device any more. Copy what is to be changed (`tensor.clone()`).

    A publisher that was started again counts its versions from 1 anew and has another path: after
    `cuvmm.NotPublishedError`, attach again.
    """

    # Those of a mapping compare tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, memory: AttachedMemory, described: dict[str, Any], users: list[int]) -> None:
        self._memory, self._users = memory, users
        #: The name of the publication.
        self.name: str = described["name"]
        #: The version, which counts from 1 for each name of a publisher.
        self.version: int = described["version"]
        #: The path of the publisher's socket.
        self.path: str = described["path"]
        #: The ordinal of the device, as this process counts.
        self.device: int = described["device"]
        #: The bytes that are attached.
        self.nbytes: int = described["size"]
        manifest = described["manifest"]
        #: Texts that the publisher has added.
        self.metadata: dict[str, str] = manifest["metadata"]
        self._address: int = described["address"]
        self._tensors = {tensor["name"]: tensor for tensor in manifest["tensors"]}
        self._strides = _strides_in(self.metadata.pop(STRIDES, "{}"))
        #: True if the publisher has published its tensors themselves (`copy=False`), to which it may write.
        self.in_place: bool = self.metadata.pop(IN_PLACE, "") == "true"

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        try:
            import torch
        except ImportError as error:
            raise Error("PyTorch is not installed: array(name) has an array with DLPack") from error
        kind = name_from_files(tensor["dtype"])
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise Error(f"{name!r} has elements of type {kind}, which this PyTorch does not have")
        shape = _shape_of(tensor)
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device=f"cuda:{self.device}")
        # PyTorch takes some of its types by DLPack only from a later version on, so it gets the bytes.
        there = self._at(tensor)
        span = torch.from_dlpack(DeviceArray(there, (tensor["size"],), dtype_of("uint8")))
        return span.view(dtype).as_strided(shape, self._strides_of(tensor))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def array(self, name: str) -> DeviceArray:
        """Returns a tensor as an array for other libraries than PyTorch, which read it in place.

        >>> cupy.from_dlpack(weights.array("embedding"))  # doctest: +SKIP

        Raises KeyError for an unknown name, and `cuvmm.Error` for a type that DLPack has no name for
        here, and for numbers of 4 bits whose last dimension is odd.
        """
        tensor = self._tensors[name]
        kind = name_from_files(tensor["dtype"])
        try:
            dtype = dtype_of(kind)
        except ValueError:
            raise Error(
                f"cuvmm has no type of DLPack for {kind}: take PyTorch's tensor, weights[{name!r}]"
            ) from None
        there, strides = self._at(tensor), self._strides_of(tensor)
        array = DeviceArray(there, _shape_of(tensor), dtype, strides)
        # PyTorch checks this itself for its own tensors.
        if array.span > tensor["size"]:
            raise Error(f"{name!r} is said to have {tensor['size']} bytes, and takes {array.span}")
        return array

    def _at(self, tensor: dict[str, Any]) -> SharedMemory:
        return SharedMemory(self._address + tensor["offset"], self.device, self._memory)

    def _strides_of(self, tensor: dict[str, Any]) -> tuple[int, ...]:
        shape, strides = _shape_of(tensor), self._strides.get(tensor["name"])
        if strides is None:
            return _dlpack.dense(shape)
        if len(strides) != len(shape):
            raise Error(
                f"{tensor['name']!r} has {len(shape)} dimensions and {len(strides)} strides"
            )
        return strides

    def newer(self, timeout: float = 0) -> Attached | None:
        """Attaches the newest version, if it is another one. Returns None if there is none.

        timeout: the seconds to wait for one.

        This version stays as it is, unless it is `in_place`, and both take memory on the device while tensors of both live. The
        new tensors have other addresses: graphs that were captured with the old ones must be captured
        again.

        >>> weights = cuvmm.attach("model")  # doctest: +SKIP
        >>> newer = weights.newer()  # doctest: +SKIP
        >>> if newer is not None:  # doctest: +SKIP
        ...     model.load_state_dict(newer, assign=True)
        ...     weights = newer

        Raises `cuvmm.NotPublishedError` if the name is not published any more, or the publisher has
        ended. Its tensors can be used as before. `cuvmm.attach(name)` then gets what a keeper or another
        publisher has under the name.
        """
        library = _library.get()
        until = time.monotonic() + seconds_of(timeout)
        while True:
            left = max(0.0, until - time.monotonic())
            millis = math.ceil(min(left, _PIECE) * 1000)
            if library.number("newer", self._memory.number, millis):
                return _attach(self.name, self.path, self.device, self._users)
            if left <= _PIECE:
                return None

    def __repr__(self) -> str:
        return (
            f"<cuvmm.Attached {self.name!r} version {self.version}: {len(self)} tensor{'' if len(self) == 1 else 's'},"
            f" {text_of(self.nbytes)} on device {self.device}>"
        )


def _shape_of(tensor: dict[str, Any]) -> tuple[int, ...]:
    try:
        return shape_from_files(tensor["dtype"], tuple(tensor["shape"]))
    except ValueError as error:
        raise Error(f"{tensor['name']!r} has elements of type F4, and is no tensor here: {error}") from error


def _strides_in(text: str) -> dict[str, tuple[int, ...]]:
    """Reads what a publisher, which may be any program, says about strides."""
    try:
        found = {name: tuple(map(int, strides)) for name, strides in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise Error(f"the publisher's strides are not understood: {error}") from error
    if any(step < 0 for strides in found.values() for step in strides):
        raise Error("the publisher's strides are negative")
    return found


def attach(
    name: str,
    path: str | os.PathLike[str] | None = None,
    *,
    device: Any = None,
    users: Iterable[int] = (),
    timeout: float = 0,
) -> Attached:
    """Attaches tensors that a process has published with `cuvmm.publish`, without a copy.

    It attaches too what Rust programs (`cuvmm::Publisher`) and `cuvmm share publish` publish.

    path: the publisher's or the keeper's socket. By default the one that publishes the name is looked for,
        among this user's, and if none does, the keeper that has it (`Publication.keep`).
    device: the device that has the memory; by default PyTorch's current one, or 0.
    users: the numbers of other users that the publisher may be of. They must name the path.
    timeout: the seconds to wait for the name to be published.

    The tensors are for reading: see `cuvmm.Attached`. They count against no limit of this process.

    >>> weights = cuvmm.attach("model")  # doctest: +SKIP
    >>> with torch.device("meta"):  # doctest: +SKIP
    ...     model = Model()
    >>> model.load_state_dict(weights, assign=True)  # doctest: +SKIP

    Raises `cuvmm.NotPublishedError` if no process publishes the name, and `cuvmm.Error` if several
    do, the publisher is of another user, or the memory is on another device. Nothing is attached then.
    """
    ordinal = _current_device() if device is None else device_of(device)
    where = None if path is None else absolute(path)
    others = users_of(users)
    if others and where is None:
        raise ValueError("publications of other users are attached by their path: name it")
    until = time.monotonic() + seconds_of(timeout)
    while True:
        try:
            return _attach(name, where, ordinal, others)
        except NotPublishedError:
            if not time.monotonic() < until:
                raise
        time.sleep(_PAUSE)


def _attach(name: str, path: str | None, device: int, users: list[int]) -> Attached:
    library = _library.get()
    request = {"name": checked(name), "path": path, "users": users, "device": device}
    memory = AttachedMemory(library.number("attach", json.dumps(request).encode()))
    return Attached(memory, json.loads(library.required("attached", memory.number)), users)


def _current_device() -> int:
    torch: Any = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0
