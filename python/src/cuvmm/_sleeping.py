"""Sleep and wake of tagged memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from . import _library
from ._arrays import DEVICES
from ._errors import Error
from ._sizes import bytes_of

#: The name in `Slept.held` of what PyTorch's own allocator holds outside of pools.
_PYTORCH = "PyTorch"


@dataclasses.dataclass(frozen=True)
class Slept:
    """What `sleep` gave up, and what this process still holds. Sizes in bytes."""

    #: The memory of the pools that were put to sleep, by name.
    given: dict[str, int]
    #: The memory that stays: of pools that are awake, of the heap under its tenant's name, and of PyTorch's own
    #: allocator as "PyTorch".
    held: dict[str, int]
    #: The memory that the driver refused to take back, of all devices: it is in no use, and not free for other
    #: programs. The driver is asked again by the next `sleep`, by `empty_cache`, and when memory is short.
    quarantined: int = 0


def check_name(name: str) -> None:
    """Raises if a pool can have no such name."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a pool is text, not {name!r}")
    if not name or "\0" in name:
        raise ValueError(f"the name of a pool has a character, and no zero byte: {name!r}")


def check(name: str) -> None:
    """Raises if a pool of that name cannot be entered."""
    check_name(name)
    if name in asleep():
        raise Error(f"the memory of tag {name!r} is asleep: call cuvmm.wake({name!r}) first")


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """Gives a name to the pool allocations of the calling thread while it is entered.

    `cuvmm.torch.pool` enters it.
    """
    check(name)
    library = _library.get()
    token = library.number("tag_begin", name.encode())
    try:
        yield
    finally:
        # Blocks end in any order, and the garbage collector may end an abandoned one in any thread.
        library.tag_end(token)


@contextlib.contextmanager
def graphs_tag(name: str, keep: bool) -> Iterator[None]:
    """Gives a name to the memory of graphs that the calling thread captures while it is entered.

    `cuvmm.torch.graphs` enters it.
    """
    check(name)
    library = _library.get()
    token = library.number("graphs_begin", name.encode(), int(keep))
    try:
        yield
    finally:
        library.tag_end(token)


def names_of(tags: str | Iterable[str] | None) -> bytes:
    """Returns the names of pools as the library takes them."""
    if tags is None:
        return b"null"
    if not isinstance(tags, Iterable):
        raise TypeError(f"tags names pools, such as 'weights' or ['weights', 'cache'], not {tags!r}")
    names = [tags] if isinstance(tags, str) else list(tags)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"the name of a pool is text, not {name!r}")
    if not names:
        raise ValueError("name at least one tag, or pass None for all")
    return json.dumps(names).encode()


def seconds_of(timeout: float) -> float:
    """Returns a timeout as the library takes it, and raises if it is none."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"a timeout is a number of seconds, not {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"a timeout is not negative: {timeout!r}")
    return float(timeout)


def _torch() -> Any:
    """Returns PyTorch if it has started CUDA."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _native_torch() -> Any:
    """Returns PyTorch if it has started CUDA with its own allocator."""
    ours = sys.modules.get("cuvmm.torch")
    return None if ours is not None and ours.is_installed() else _torch()


def _figures() -> dict[int, dict[str, Any]]:
    """Returns the figures of all devices that have some."""
    library = _library.get()
    found = {device: library.figures("stats", device) for device in range(DEVICES)}
    return {device: figures for device, figures in found.items() if figures}


def _sum(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Adds sizes up by name, and leaves out what is 0."""
    sums: dict[str, int] = {}
    for name, size in parts:
        sums[name] = sums.get(name, 0) + size
    return {name: size for name, size in sums.items() if size > 0}


def _asleep(figures: dict[int, dict[str, Any]]) -> dict[tuple[int, str], int]:
    """Returns the sizes of pools that sleep, by device and name."""
    pools = [(device, it) for device, found in figures.items() for it in found["pools"]]
    return {(device, it["name"]): it["bytes"] for device, it in pools if it["asleep"]}


def _held(figures: dict[int, dict[str, Any]]) -> dict[str, int]:
    parts = []
    torch = _native_torch()
    for device, found in figures.items():
        pools = found["pools"]
        parts += [(it["name"], it["bytes"]) for it in pools if not it["asleep"]]
        graphs = found["graphs"]
        parts.append((found["tenant"], found["heap"]["held"] + graphs["held"] - graphs["tagged"]))
        if torch is not None:
            # PyTorch's figures have the memory of pools too, awake or asleep, but not that of paged caches.
            own = torch.cuda.memory_reserved(device) - sum(it["bytes"] - it["paged"] for it in pools)
            parts.append((_PYTORCH, own))
    return _sum(parts)


def sleep(
    tags: str | Iterable[str] | None = None,
    keep: bool = True,
    *,
    host: Literal["keep", "release"] = "keep",
    timeout: float = 60.0,
) -> Slept:
    """Gives up the device memory of pools, which keep their addresses.

    tags: the name of a pool (its tag), several, or None for all that are awake.
    keep: True copies the contents to host memory; False discards them: after `wake` they are not set. What
        `cuvmm.keep` has marked is kept with both, and the
        memory of graphs as `cuvmm.torch.graphs` says.
    host: the host memory of the contents is kept for the next sleep, which is then several times as fast, or
        goes back to the system after `wake`, which does not wait for that. That of marked tensors is kept if
        the rest is discarded.
    timeout: the seconds to wait for work in all, from 0 to `math.inf`.

    Tensors of these pools must not be used until `wake`, and `cuvmm.torch.pool` refuses the names. Paged caches of
    these names (`cuvmm.torch.paged_kv`) sleep with them: blocks in use are so when they wake, with their bytes or
    zeros. A cache does not fall asleep inside of its `step`.
    Waits for the work that PyTorch has queued, and is refused while a graph is captured, also if the capture
    begins meanwhile.

    Returns what was given up, and what this process still holds, by name: tensors that another thread made
    are in no pool that only this thread has entered.

    >>> with cuvmm.torch.pool("weights"):  # doctest: +SKIP
    ...     model = Model().cuda()
    >>> cuvmm.sleep("weights").given  # doctest: +SKIP
    {'weights': 2147483648}
    >>> cuvmm.wake("weights")  # doctest: +SKIP

    Raises `cuvmm.OutOfMemoryError` if there is too little host memory, and `cuvmm.Error` if a tag is unknown or
    asleep, work does not end, or the driver refuses. All tags are then as before, with their contents. (If the driver
    refuses to map memory again too, that tag sleeps: see `asleep`.)
    """
    kept, names, seconds = how(keep, host), names_of(tags), seconds_of(timeout)
    library = _library.get()
    return given_up(lambda: library.check(library.sleep_within(names, kept, seconds)))


def exchange(
    sleep: str | Iterable[str], wake: str | Iterable[str], *, host: Literal["keep", "release"] = "keep"
) -> Slept:
    """Puts pools to sleep and wakes others in their memory: both directions of the bus are used at once.

    sleep: the name of a pool (its tag) that is awake, or several. Their contents are copied to host memory.
    wake: the name of a pool that is asleep, or several.
    host: the host memory of the contents is kept for the next sleep, or goes back to the system after `wake`.

    Pools of the same sizes take about half the time of `sleep` and then `wake`. What does not fit, pools on several
    devices, and pools with memory of graphs or with paged caches, take as long as these. Memory for the larger of both
    is enough: the contents are replaced piece by piece. The rules of `sleep` and `wake` hold.

    Returns what was given up, and what this process still holds, by name.

    >>> cuvmm.exchange(sleep="chat", wake="code").given  # doctest: +SKIP
    {'chat': 2147483648}

    Raises `cuvmm.OutOfMemoryError` if there is too little memory of the host or the device, and `cuvmm.Error` if a
    tag is unknown or in the wrong state, work does not end, or the driver refuses. All tags are then as before, with
    their contents. (If the driver refuses to restore memory too, that tag sleeps: see `asleep`.)
    """
    names, waking, kept = names_of(sleep), names_of(wake), how(True, host)
    library = _library.get()
    give_back(json.loads(waking), json.loads(names))
    return given_up(lambda: library.check(library.exchange(names, waking, kept)))


def how(keep: bool, host: str) -> int:
    """Returns what becomes of contents and their host memory, as the library takes it."""
    if host not in ("keep", "release"):
        raise ValueError(f"host is 'keep' or 'release', not {host!r}")
    return (1 if host == "keep" else 2) if keep else 0


def given_up(sleeps: Callable[[], None]) -> Slept:
    """Calls a function that puts pools to sleep. Returns what it gave up."""
    before = _asleep(_figures())
    sleeps()
    figures = _figures()
    given = [(place[1], size) for place, size in _asleep(figures).items() if place not in before]
    quarantined = sum(found["quarantined"] for found in figures.values())
    return Slept(_sum(given), _held(figures), quarantined)


def wake(tags: str | Iterable[str] | None = None, *, timeout: float = 60.0) -> None:
    """Gives pools their memory back at its addresses, with its contents if `sleep` kept them.

    tags: the name of a pool (its tag), several, or None for all that are asleep.
    timeout: the seconds to wait for memory in all, from 0 to `math.inf`.

    If too little memory is free and PyTorch uses its own allocator, that gives its free memory back first
    (`torch.cuda.empty_cache`), unless the current stream captures a graph. Refused while a graph is captured,
    also if the capture begins meanwhile.

    >>> cuvmm.wake(["weights", "cache"])  # doctest: +SKIP

    Raises `cuvmm.OutOfMemoryError` if the memory is not to be had, and `cuvmm.Error` if a tag is
    unknown or awake, or the driver refuses. All tags sleep then as before.
    """
    names, seconds = names_of(tags), seconds_of(timeout)
    library = _library.get()
    give_back(json.loads(names))
    library.check(library.wake_within(names, seconds))


def prepare(tags: str | Iterable[str] | None = None) -> None:
    """Takes the host memory that `sleep` will need to keep the contents of pools, so that it is as fast as it can be.

    tags: the name of a pool (its tag), several, or None for all that are awake.

    >>> cuvmm.prepare("weights")  # doctest: +SKIP

    Raises `cuvmm.OutOfMemoryError` if there is too little host memory, and `cuvmm.Error` if a tag is unknown or
    asleep, or a graph is captured.
    """
    names = names_of(tags)
    library = _library.get()
    library.check(library.host_prepare(names))


def release_host(tags: str | Iterable[str] | None = None) -> int:
    """Gives host memory that has no contents back to the system.

    tags: the name of a pool (its tag), several, or None for all.

    Returns the bytes. The contents of pools that sleep stay.

    >>> cuvmm.release_host("weights")  # doctest: +SKIP
    2147483648

    Raises `cuvmm.Error` if a tag is unknown, or a graph is captured.
    """
    return _library.get().number("host_release", names_of(tags))


def limit_host(size: int | str | None) -> None:
    """Sets the most host memory for contents of pools that sleep, of all devices together.

    size: bytes, a text such as "64GiB", or None for no limit but the system's, as it is at first.

    A pool for whose contents too little is left does not sleep: memory that pools which are awake keep is given
    back for it first. A lower limit gives nothing back by itself: see `release_host`.

    >>> cuvmm.limit_host("64GiB")  # doctest: +SKIP
    """
    _library.get().host_limit(2**64 - 1 if size is None else bytes_of(size))


def give_back(names: list[str] | None, falling: Sequence[str] | None = ()) -> None:
    """Makes PyTorch's own allocator give its free memory back if pools that wake need more than those `falling`
    asleep give."""
    torch = _native_torch()
    if torch is None or torch.cuda.is_current_stream_capturing():
        return
    for device, found in _figures().items():
        pools = [it for it in found["pools"] if it["asleep"]]
        needed = sum(it["bytes"] for it in pools if names is None or it["name"] in names)
        awake = [it for it in found["pools"] if not it["asleep"]]
        needed -= sum(it["bytes"] for it in awake if falling is None or it["name"] in falling)
        if needed > 0 and _library.get().headroom(device)[0] < needed:
            torch.cuda.empty_cache()
            return


def asleep() -> frozenset[str]:
    """Returns the names of the pools that are asleep.

    >>> cuvmm.sleep("weights")  # doctest: +SKIP
    >>> cuvmm.asleep()  # doctest: +SKIP
    frozenset({'weights'})
    """
    return frozenset(json.loads(_library.get().text("asleep")))
