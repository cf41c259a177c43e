"""The exceptions of this package."""

from __future__ import annotations


class Error(RuntimeError):
    """A call of the library failed. The text says why, with figures."""


class OutOfMemoryError(Error, MemoryError):
    """An allocation through `cuvmm.empty` or CuPy found no memory.

    PyTorch's allocations raise `torch.cuda.OutOfMemoryError` instead.
    """
