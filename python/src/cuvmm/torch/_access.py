"""Whether other devices can use a tensor's memory."""

from __future__ import annotations

from typing import Any

import torch

from .. import _library
from .._arrays import device_of
from .._errors import Error


def check_access(tensor: Any, device: Any) -> None:
    """Raises an error that says what to do if a device has no access to a tensor's memory.

    device: an ordinal, "cuda:1", or a device of PyTorch.

    PyTorch copies between devices with access of one to the memory of the other. For its own memory it
    arranges that itself; for memory of cuvmm it was arranged when the memory was mapped, or a copy
    fails with `CUDA error: invalid argument`, which does not say why. Call this where such an error
    came from, or before work that uses several devices.

    >>> cuvmm.torch.check_access(tensor, "cuda:1")  # doctest: +SKIP

    Raises `cuvmm.Error` if the device has no access, and ValueError if the tensor is on no device or there
    is no such device.
    """
    if tensor.device.type != "cuda":
        raise ValueError(f"the tensor is on {tensor.device}, and not on a CUDA device")
    here, there, count = int(tensor.device.index or 0), device_of(device), torch.cuda.device_count()
    if there >= count:
        raise ValueError(f"there is no device {there}: PyTorch sees {count}")
    address = tensor.data_ptr()
    # PyTorch's own memory is not asked for: it gives access when it copies.
    if here == there or not address or _library.get().access(address, there) != 0:
        return
    raise Error(
        f"device {there} has no access to this tensor of device {here}: name both devices in"
        f" cuvmm.torch.install(peers=[{min(here, there)}, {max(here, there)}]), or copy by way of"
        f' host memory (tensor.cpu().to("cuda:{there}")). Memory of cuvmm.torch.pool and'
        " cuvmm.attach has access with peers too"
    )
