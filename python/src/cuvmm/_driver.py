"""The few calls of libcuda that this package makes itself."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from ._errors import Error

_loading = threading.Lock()
_loaded: ctypes.CDLL | None = None


def _libcuda() -> ctypes.CDLL:
    global _loaded
    with _loading:
        if _loaded is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise Error(f"there is no NVIDIA driver: {error}") from error
            library.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
            library.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
            library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.c_void_p, ctypes.c_int]
            library.cuDevicePrimaryCtxRelease_v2.argtypes = [ctypes.c_int]
            _must(library, "cuInit", 0)
            _loaded = library
        return _loaded


def _must(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise Error(f"{name} failed with CUDA error {code}")


@contextlib.contextmanager
def _primary_context(device: int) -> Iterator[ctypes.CDLL]:
    """Makes a device's primary context current. The device is its ordinal."""
    library = _libcuda()
    context = ctypes.c_void_p()
    _must(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _must(library, "cuCtxPushCurrent_v2", context)
        try:
            yield library
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)


def synchronize_stream(device: int, stream: int) -> None:
    """Waits for the work of a stream."""
    with _primary_context(device) as library:
        _must(library, "cuStreamSynchronize", stream)
