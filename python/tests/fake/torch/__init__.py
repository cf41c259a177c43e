"""A stand-in for PyTorch: see README.md in the folder above."""

from . import _C, accelerator, backends, cuda, multiprocessing, nn, tensors, version  # noqa: F401
from .tensors import Tensor, device, dtype, from_dlpack, sparse_coo, strided  # noqa: F401

globals().update(tensors.types)


class _dynamo:  # noqa: N801
    @staticmethod
    def mark_static_address(tensor):
        assert isinstance(tensor, Tensor)


UntypedStorage = tensors.Storage


def empty(size, dtype=None, device="cpu"):
    """Makes a tensor; without a type, bytes on the current device and stream from its allocator."""
    return cuda.Tensor(size) if dtype is None else tensors.empty(size, dtype, device)
