"""The ends of streams."""

from __future__ import annotations

from typing import Any

from . import _library
from ._arrays import stream_of

#: Streams that are kept alive for the library, by their handles: `cuvmm.cupy` keeps those of CuPy.
kept: dict[int, Any] = {}


def end_stream(stream: Any) -> None:
    """Says that a stream is about to be destroyed, and waits for its work.

    stream: a stream of PyTorch or CuPy, or a stream's handle. The library asks streams that memory was used
        on for their progress, so call this before such a stream is destroyed. Streams that PyTorch and CuPy
        made need no call.

    Memory that was allocated for the stream stays usable. The next stream with its handle is another one.

    >>> cuvmm.end_stream(stream)  # doctest: +SKIP

    Raises `cuvmm.Error` if the stream captures or its work has failed.
    """
    handle = stream_of(stream)
    library = _library.get()
    library.check(library.stream_end(handle, 1))
    kept.pop(handle, None)
