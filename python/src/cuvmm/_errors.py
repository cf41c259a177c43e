"""The exceptions of this package."""

from __future__ import annotations


class Error(RuntimeError):
    """A call of the library failed. The text says why, with figures."""


class OutOfMemoryError(Error, MemoryError):
    """`cuvmm.empty`, `cuvmm.publish`, `cuvmm.wake` or a paged cache found too little memory, or `cuvmm.sleep` too little
    host memory.

    PyTorch's allocations raise `torch.cuda.OutOfMemoryError` instead, and CuPy's its own error.
    """


class NotPublishedError(Error, LookupError):
    """No process publishes the name, or not any more."""
