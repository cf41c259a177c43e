"""CuPy's memory from the heap.

    import cuvmm.cupy

    cuvmm.cupy.install(limit="20GiB")

Arrays are then allocated for work of CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

from . import _library
from ._errors import OutOfMemoryError
from ._settings import configure

_installed: Any = None


def install(
    limit: int | str | None = None,
    preset: str | None = None,
    tenant: str | None = None,
    ledger: str | PathLike[str] | None = None,
    ledger_limit: int | str | None = None,
    peers: Iterable[int] | None = None,
) -> None:
    """Makes CuPy allocate from the heap, for work of the current stream.

    The settings are those of `cuvmm.configure`. If PyTorch already uses the heap
    (`cuvmm.torch.install`), call this without settings: both share it, under one limit.

    Streams on which arrays were made or freed stay alive until the process ends. A stream of another
    library (`cupy.cuda.ExternalStream`) must not be destroyed before that.

    A failed allocation raises `cupy.cuda.memory.OutOfMemoryError`. Arrays that exist keep their
    memory from CuPy's own pool.

    >>> cuvmm.cupy.install(limit="20GiB")  # doctest: +SKIP

    Raises RuntimeError if it is installed already.
    """
    global _installed
    if _installed is not None:
        raise RuntimeError("cuvmm is already CuPy's allocator")
    import cupy

    library = _library.get()
    configure(limit, preset, tenant, ledger, ledger_limit, peers)

    # The heap asks a stream for its progress after the last array was freed on it, and the driver
    # crashes if the stream is gone by then. So streams that arrays were used on stay alive.
    streams: dict[int, Any] = {}

    def current() -> int:
        stream = cupy.cuda.get_current_stream()
        return streams.setdefault(stream.ptr, stream).ptr

    def malloc(size: int, device: int) -> int:
        address = library.try_malloc(size, device, current())
        if not address and size > 0:
            failed = library.failure(f"cannot allocate {size} bytes on device {device}")
            if not isinstance(failed, OutOfMemoryError):
                raise failed
            figures = library.figures("stats", device)
            raise cupy.cuda.memory.OutOfMemoryError(
                size, figures.get("heap", {}).get("held", 0), figures.get("limit", 0)
            )
        return address or 0

    def free(address: int, device: int) -> None:
        # The stream that is current now may be another one than the array was made on.
        library.free(address, 0, device, current())

    allocator = cupy.cuda.PythonFunctionAllocator(malloc, free)
    cupy.cuda.set_allocator(allocator.malloc)
    _installed = allocator


def is_installed() -> bool:
    """Returns True if CuPy allocates from the heap.

    >>> cuvmm.cupy.is_installed()  # doctest: +SKIP
    """
    return _installed is not None
