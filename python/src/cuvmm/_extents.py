"""The physical memory under a tensor, for libraries that register memory."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

from . import _dlpack, _library
from ._arrays import from_dlpack
from ._sources import of_torch


class Extent(NamedTuple):
    """A piece of physical memory, and where it is mapped."""

    #: The first address.
    address: int
    #: The size, in bytes.
    nbytes: int


def extents(tensor: Any) -> list[Extent]:
    """Returns each piece of physical memory under a tensor, in the order of the addresses.

    tensor: a tensor of PyTorch on a CUDA device, an array of `cuvmm.empty`, or one of any library with DLPack.

    Libraries that register memory with a network card or with NCCL (`ibv_reg_mr`, `ncclCommRegister`) do so for
    one piece at a time: `cuMemGetAddressRange` names only the one that an address lies in. The first may begin before
    the tensor, and the last end behind it, since tensors share pieces; a tensor without elements has none. One
    dma-buf (`cuMemGetHandleForAddressRange`) goes over several pieces.

    The pieces stay while the tensor lives and its pool does not sleep. A registration must end before. Makes a driver
    call for each piece.

    >>> for address, nbytes in cuvmm.extents(tensor):  # doctest: +SKIP
    ...     register(address, nbytes)

    Raises ValueError for a tensor in host memory or without memory of its own, TypeError for what is none, and
    `cuvmm.Error` if its pool sleeps, or if nothing was allocated here yet.
    """
    torch: Any = sys.modules.get("torch")
    device: int | None
    if torch is not None and isinstance(tensor, torch.Tensor):
        source = of_torch(torch, "the tensor", tensor)
        address, nbytes, device = source.address, source.span, source.device
    else:
        there = from_dlpack(tensor)
        address, nbytes = there.address, there.nbytes
        device = there.device if there.device_type == _dlpack.CUDA else None
    if device is None:
        raise ValueError("the tensor is in host memory, which has no pieces of a device")
    listed = _library.get().required("extents", address, nbytes, device)
    return [Extent(*piece) for piece in json.loads(listed)]
