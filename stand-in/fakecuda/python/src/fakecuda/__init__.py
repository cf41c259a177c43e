"""fakecuda for tests in Python: holds streams back, makes calls fail, counts and reports.

fakecuda is a libcuda.so.1 over host memory. The command `fakecuda -- COMMAND` runs a program on it.
In that program, the functions of this module control the library:

    import fakecuda

    with fakecuda.failing("cuMemCreate:2"):
        ...                                  # the second allocation from here on fails
    with fakecuda.held(stream):
        ...                                  # work on the stream is queued and does not run
    assert fakecuda.live().physicals == 0
    assert not fakecuda.report()["findings"]

Where the program runs on a real driver, `is_here()` is False and the other functions raise
`NotHere`, so a test can be skipped.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import typing
from collections.abc import Iterator

__all__ = [
    "Live",
    "NotHere",
    "Refused",
    "environment",
    "failing",
    "findings",
    "forget",
    "held",
    "include_path",
    "injected",
    "is_here",
    "library_path",
    "live",
    "lose_context",
    "report",
    "step",
    "watch",
]

_HERE = os.path.dirname(os.path.abspath(__file__))
_NOT_READY = 600


class NotHere(RuntimeError):
    """The program does not run on fakecuda, but on a real driver or on none."""


class Refused(RuntimeError):
    """The library refused a call. `code` is the driver's number."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} returned {code}")
        self.code = code


class Live(typing.NamedTuple):
    """The numbers of live objects."""

    reservations: int
    physicals: int
    mappings: int
    allocations: int
    streams: int
    events: int
    queued: int
    contexts: int


def library_path() -> str:
    """Returns the path of the library of this package."""
    return os.path.join(_HERE, "lib", "libcuda.so.1")


def include_path() -> str:
    """Returns the folder with `fakecuda.h`."""
    return os.path.join(_HERE, "include")


def environment(
    base: typing.Mapping[str, str] | None = None, /, **settings: object
) -> dict[str, str]:
    """Returns the variables with which a program runs on fakecuda.

    `base` is `os.environ` if it is not given. A setting has the name of the variable without
    FAKECUDA_, in any case: `environment(devices=2, capacity="80GiB", report="-")`.
    """
    made = dict(os.environ if base is None else base)
    folders = [os.path.dirname(library_path()), made.get("LD_LIBRARY_PATH", "")]
    made["LD_LIBRARY_PATH"] = ":".join(folder for folder in folders if folder)
    for name, value in settings.items():
        text = str(int(value)) if isinstance(value, bool) else str(value)
        made["FAKECUDA_" + name.upper()] = text
    return made


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotHere(f"there is no libcuda.so.1: {error}") from None
    if not hasattr(library, "fakecuda_live"):
        raise NotHere("libcuda.so.1 is a real driver")
    return library


def _call(name: str, *arguments: object) -> None:
    code = getattr(_library(), name)(*arguments)
    if code != 0:
        raise Refused(name, code)


def _stream(stream: object) -> ctypes.c_void_p:
    """Returns a stream's handle: a number, or what `int` makes one of. None is the default stream."""
    return ctypes.c_void_p(0 if stream is None else int(stream))


def is_here() -> bool:
    """Returns True if the program runs on fakecuda."""
    try:
        _library()
    except NotHere:
        return False
    return True


def live() -> Live:
    """Counts the live objects."""
    counts = (ctypes.c_uint64 * len(Live._fields))()
    _call("fakecuda_live", counts)
    return Live(*counts)


@contextlib.contextmanager
def held(stream: object = None, *, all_streams: bool = False) -> Iterator[None]:
    """Holds a stream of the current context back: its work is queued, and runs at the end.

    With `all_streams`, holds every stream of the current context's device.
    """
    if all_streams:
        name, first = "fakecuda_hold_all", ()
    else:
        name, first = "fakecuda_hold", (_stream(stream),)
    _call(name, *first, ctypes.c_bool(True))
    try:
        yield
    finally:
        _call(name, *first, ctypes.c_bool(False))


def step(stream: object = None) -> bool:
    """Runs the next piece of work of a held stream. Returns False if there is none that can run."""
    try:
        _call("fakecuda_step", _stream(stream))
    except Refused as error:
        if error.code == _NOT_READY:
            return False
        raise
    return True


def lose_context() -> None:
    """Loses the current context, as a kernel that faults does."""
    _call("fakecuda_lose")


@contextlib.contextmanager
def failing(*faults: str) -> Iterator[None]:
    """Makes calls fail, until the end: "cuMemCreate:3", "cuMemMap:2-:INVALID_VALUE".

    At the end no call fails any more, those that a setting made fail included.
    """
    _call("fakecuda_fail", ",".join(faults).encode())
    try:
        yield
    finally:
        _call("fakecuda_fail", None)


def injected() -> int:
    """Counts the calls that were made to fail."""
    count = ctypes.c_uint64()
    _call("fakecuda_injected", ctypes.byref(count))
    return count.value


def watch(on: bool = True) -> None:
    """Turns the diagnosis on or off. With a report it is on from the start."""
    _call("fakecuda_watch", ctypes.c_bool(on))


def findings() -> int:
    """Counts the findings: misuse so far, and what would be leaked if the process ended now."""
    count = ctypes.c_uint64()
    _call("fakecuda_findings", ctypes.byref(count))
    return count.value


def forget() -> None:
    """Forgets all findings. What lives now is no leak from then on."""
    _call("fakecuda_forget")


def report() -> dict[str, typing.Any]:
    """Returns the report of this moment."""
    fd = os.memfd_create("fakecuda-report")
    try:
        _call("fakecuda_report_json", ctypes.c_int(fd))
        with open(fd, "rb", closefd=False) as file:
            file.seek(0)
            return json.load(file)
    finally:
        os.close(fd)
