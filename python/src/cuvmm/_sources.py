"""Where the tensors to be published lie, and where they go.

Tensors whose bytes overlap, such as tied weights, are copied together, so that they share memory again
where they are attached. Each tensor is placed at a multiple of `ALIGNMENT`, wherever it lay before: a
kernel that reads an element that is not aligned ends the process's use of the GPU. Of tensors that
overlap, the one with the largest elements is placed so.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from . import _dlpack
from ._arrays import from_dlpack
from ._dtypes import name_in_files

ALIGNMENT = 512

#: DLPack's numbers for host memory, of any kind that the CPU reads.
_HOST = (1, 3)


@dataclasses.dataclass
class Source:
    """A tensor that is to be published."""

    name: str
    address: int
    #: The ordinal of its device; None for host memory.
    device: int | None
    #: The name of the element type in a manifest.
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    #: Elements from one to the next of each dimension.
    strides: tuple[int, ...]
    #: The tensor, which keeps its memory.
    keeps: Any
    #: The offset in the publication.
    offset: int = 0

    @property
    def span(self) -> int:
        """The bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return (1 + last) * self.itemsize

    @property
    def has_holes(self) -> bool:
        return self.span > math.prod(self.shape) * self.itemsize

    @property
    def is_dense(self) -> bool:
        return _dlpack.is_dense(self.shape, self.strides)


@dataclasses.dataclass
class Run:
    """Bytes that are copied together, and where they go."""

    sources: list[Source]
    start: int
    end: int
    offset: int = 0

    @property
    def device(self) -> int | None:
        return self.sources[0].device


def sources_of(tensors: Mapping[str, Any], in_place: bool = False) -> list[Source]:
    """Describes tensors by their names. In place, no tensor is made of another one's values.

    Raises TypeError for what is no tensor, and ValueError for a tensor whose bytes say too little.
    """
    if not isinstance(tensors, Mapping):
        raise TypeError(f"publish a mapping of names to tensors, not {type(tensors).__name__}")
    torch = sys.modules.get("torch")
    found = []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor is text, not {name!r}")
        if torch is not None and isinstance(tensor, torch.Tensor):
            # Without lazy conjugation and negation the bytes are the values.
            if in_place and (tensor.is_conj() or tensor.is_neg()):
                raise ValueError(
                    f"{name!r} is conjugated or negated when it is read, so that its bytes are no values:"
                    " publish a copy (copy=True)"
                )
            resolve = lambda it: it.detach().resolve_conj().resolve_neg()
            found.append(of_torch(torch, name, tensor, resolve))
        elif hasattr(tensor, "__dlpack__"):
            found.append(_of_dlpack(name, tensor))
        else:
            raise TypeError(f"{name!r} is of type {type(tensor).__name__}: it is no tensor")
    return found


def of_torch(torch: Any, name: str, tensor: Any, resolve: Callable[[Any], Any] = lambda it: it) -> Source:
    """Describes a tensor of PyTorch, of which `resolve` makes one whose bytes are wanted.

    Raises ValueError for a tensor whose bytes say too little.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{name!r} is sparse or quantized: name the tensors that it consists of"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name!r} is on device {tensor.device}: it has no bytes here")
    tensor = resolve(tensor)
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() > 0:
        raise ValueError(
            f"{name!r} has no memory of its own (it is a {type(tensor).__name__}): name the"
            " tensors that it consists of"
        )
    return Source(
        name=name,
        address=address,
        device=tensor.device.index if tensor.device.type == "cuda" else None,
        dtype=name_in_files(str(tensor.dtype).rpartition(".")[2]),
        itemsize=tensor.element_size(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        keeps=tensor,
    )


def _of_dlpack(name: str, tensor: Any) -> Source:
    try:
        there = from_dlpack(tensor)
    except BufferError as error:
        raise ValueError(f"{name!r} cannot be published: {error}") from error
    if there.device_type not in (*_HOST, _dlpack.CUDA):
        raise ValueError(f"{name!r} is neither in host memory nor on a CUDA device")
    if there.dtype.startswith("dlpack:"):
        raise ValueError(f"{name!r} has elements of a type without a name: {there.dtype}")
    elements = 1 + sum(
        (size - 1) * step for size, step in zip(there.shape, there.strides, strict=True)
    )
    return Source(
        name=name,
        address=there.address,
        device=there.device if there.device_type == _dlpack.CUDA else None,
        dtype=name_in_files(there.dtype),
        itemsize=there.nbytes // elements if there.nbytes else 1,
        shape=there.shape,
        strides=there.strides,
        keeps=there,
    )


def device_of_all(sources: Iterable[Source], device: int | None) -> int:
    """Returns the device that all sources can be copied to.

    Raises ValueError if they are on several devices, on another one than is named, or in host memory
    and none is named.
    """
    for source in sources:
        if source.device is None:
            continue
        if device is None:
            device = source.device
        elif device != source.device:
            raise ValueError(
                f"{source.name!r} is on device {source.device}, and the publication on device"
                f" {device}: publish what is on each device under a name of its own"
            )
    if device is None:
        name = next((source.name for source in sources), None)
        where = "there are no tensors" if name is None else f"{name!r} is in host memory"
        raise ValueError(f"{where}: name the device that the publication is made on")
    return device


def lay_out(sources: list[Source]) -> tuple[list[Run], int]:
    """Chooses the offset of each source. Returns what is copied, and the bytes of the publication."""
    runs = _runs(sources)
    for run in runs:
        only = run.sources[0]
        if len(run.sources) == 1 and only.has_holes and hasattr(only.keeps, "contiguous"):
            # Nothing shares its memory, so what lies between the elements is left out.
            only.keeps = only.keeps.contiguous()
            only.address, only.strides = only.keeps.data_ptr(), tuple(only.keeps.stride())
            run.start, run.end = only.address, only.address + only.span
    end = 0
    for run in runs:
        aligned = max(run.sources, key=lambda source: source.itemsize)
        rest = (run.start - aligned.address) % ALIGNMENT
        run.offset = -(-end // ALIGNMENT) * ALIGNMENT + rest
        end = run.offset + run.end - run.start
        for source in run.sources:
            source.offset = run.offset + source.address - run.start
    return runs, end


def _runs(sources: Iterable[Source]) -> list[Run]:
    """Joins sources whose bytes overlap, in the order of the first of each."""
    runs: list[Run] = []
    place = lambda source: (source.device is not None, source.address)
    for source in sorted((it for it in sources if it.span), key=place):
        last = runs[-1] if runs else None
        start, end = source.address, source.address + source.span
        if last is not None and last.device == source.device and start < last.end:
            last.sources.append(source)
            last.end = max(last.end, end)
        else:
            runs.append(Run([source], start, end))
    order = {id(source): number for number, source in enumerate(sources)}
    return sorted(runs, key=lambda run: min(order[id(source)] for source in run.sources))
