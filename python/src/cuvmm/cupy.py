"""CuPy's memory from the heap.

    import cuvmm.cupy

    cuvmm.cupy.install(limit="20GiB")

Arrays are then allocated for work of CuPy's current stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from os import PathLike
from typing import Any

from . import _library
from ._errors import OutOfMemoryError
from ._settings import configure
from ._sizes import text_of
from ._streams import kept

_installed: Any = None
#: The handle of each thread's own default stream.
_PER_THREAD = 2


class _Streams:
    """Streams that arrays were used on.

    The heap asks a stream for its progress after the last array was freed on it, and the driver crashes if
    the stream is gone by then. So a stream stays alive while arrays that were made on it live, and until the
    heap has let it go: more than a few that no array is left of are ended, once their work is complete.
    """

    #: The most streams that are kept without an array.
    KEPT = 64

    def __init__(self, library: _library.Library) -> None:
        self._library = library
        # Arrays by their addresses, with the handles of their streams, and the other way round. No lock is
        # taken: the garbage collector may free an array in the middle of each function here.
        self._homes: dict[int, int] = {}
        self._arrays: dict[int, set[int]] = {}
        self._here = _Here(library, self)

    def made(self, address: int, stream: Any) -> None:
        """Notes an array that was made on a stream."""
        self._homes[address] = stream.ptr
        self._keep(stream).add(address)

    def free(self, address: int, device: int, stream: Any) -> None:
        """Frees an array while a stream is current, behind the work of that stream."""
        if stream.ptr == _PER_THREAD:
            self._here.late.arrays.append((address, device))
            self.free_late()
            return
        self.gone(address)
        self._keep(stream)
        self._library.free(address, 0, device, stream.ptr)

    def free_late(self) -> None:
        """Frees arrays that this thread could not free before."""
        self._here.late.free()

    def gone(self, address: int) -> int:
        """Forgets an array, and returns the handle of the stream that it was made on."""
        home = self._homes.pop(address, 0)
        self._arrays.get(home, set()).discard(address)
        return home

    def _keep(self, stream: Any) -> set[int]:
        """Keeps a stream, and returns the addresses of its arrays."""
        if kept.get(stream.ptr) is None:
            kept[stream.ptr] = stream
            self._let_go(stream.ptr)
        return self._arrays.setdefault(stream.ptr, set())

    def _let_go(self, newest: int) -> None:
        """Ends streams that no array is left of, the oldest first."""
        idle = [it for it in list(kept) if not self._arrays.get(it) and it != newest]
        for handle in idle[: max(0, len(idle) - self.KEPT)]:
            # 1 is for one whose work is not complete.
            if self._library.stream_end(handle, 0) == 0:
                kept.pop(handle, None)
                self._arrays.pop(handle, None)


class _Late:
    """Arrays that were freed while the thread's own default stream was current, with their devices.

    No other thread could wait for that stream later, so it is waited for before its thread frees them: when
    that allocates or frees the next array, or ends. Nothing waits while the stream captures.
    """

    def __init__(self, library: _library.Library, streams: _Streams) -> None:
        self._library, self._streams = library, streams
        self.arrays: list[tuple[int, int]] = []

    def free(self) -> None:
        while self.arrays:
            address, device = late = self.arrays.pop()
            # 1 is for a stream that captures.
            if self._library.settle(device, _PER_THREAD) == 1:
                self.arrays.append(late)
                return
            self._library.free(address, 0, device, self._streams.gone(address))

    __del__ = free


class _Here(threading.local):
    """What each thread has of its own."""

    def __init__(self, library: _library.Library, streams: _Streams) -> None:
        self.late = _Late(library, streams)


def install(
    limit: int | str | None = None,
    preset: str | None = None,
    tenant: str | None = None,
    ledger: str | PathLike[str] | None = None,
    ledger_limit: int | str | None = None,
    peers: Iterable[int] | None = None,
    guarantee: int | str | None = None,
    priority: int | None = None,
) -> None:
    """Makes CuPy allocate from the heap, for work of the current stream.

    The settings are those of `cuvmm.configure`. If PyTorch already uses the heap
    (`cuvmm.torch.install`), call this without settings: both share it, under one limit.

    Streams on which arrays were made or freed stay alive while such an array lives, and the last 64 of them
    longer. Before a stream of another library (`cupy.cuda.ExternalStream`) is destroyed, call
    `cuvmm.end_stream`.

    An allocation that finds no memory collects garbage once and tries again, as CuPy's own pool does. If it fails
    then, it raises `cupy.cuda.memory.OutOfMemoryError`. Arrays that exist keep their
    memory from CuPy's own pool.

    >>> cuvmm.cupy.install(limit="20GiB")  # doctest: +SKIP

    Raises RuntimeError if it is installed already.
    """
    global _installed
    if _installed is not None:
        raise RuntimeError("cuvmm is already CuPy's allocator")
    import cupy

    library = _library.get()
    configure(
        limit, preset, tenant, ledger, ledger_limit, peers, guarantee=guarantee, priority=priority
    )

    streams = _Streams(library)

    def malloc(size: int, device: int) -> int:
        streams.free_late()
        stream = cupy.cuda.get_current_stream(device)
        address = library.allocate(size, device, stream.ptr)
        if address:
            streams.made(address, stream)
        elif size > 0:
            failed = library.failure(f"cannot allocate {text_of(size)} on device {device}")
            if not isinstance(failed, OutOfMemoryError):
                raise failed
            figures = library.figures("stats", device)
            raise cupy.cuda.memory.OutOfMemoryError(
                size, figures.get("total", {}).get("held", 0), figures.get("limit", 0)
            )
        return address

    def free(address: int, device: int) -> None:
        # The stream that is current now may be another one than the array was made on.
        streams.free(address, device, cupy.cuda.get_current_stream(device))

    allocator = cupy.cuda.PythonFunctionAllocator(malloc, free)
    cupy.cuda.set_allocator(allocator.malloc)
    _installed = allocator


def is_installed() -> bool:
    """Returns True if CuPy allocates from the heap.

    >>> cuvmm.cupy.is_installed()  # doctest: +SKIP
    """
    return _installed is not None
