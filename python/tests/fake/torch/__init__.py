"""A stand-in for PyTorch: see README.md in the folder above."""

from . import _C, accelerator, backends, cuda, version  # noqa: F401


class UntypedStorage(_C.StorageBase):
    """A storage, of which only sharing is here."""


def empty(size):
    """Allocates bytes on the current device and stream, as a tensor would."""
    return cuda.Tensor(size)
