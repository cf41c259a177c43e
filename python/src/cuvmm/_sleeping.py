"""Sleep and wake of tagged memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator

from . import _library
from ._errors import Error


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """Gives a name to the pool allocations of the calling thread while it is entered.

    `cuvmm.torch.pool` enters it.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a pool is text, not {name!r}")
    if not name or "\0" in name:
        raise ValueError(f"the name of a pool has a character, and no zero byte: {name!r}")
    if name in asleep():
        raise Error(f"the memory of tag {name!r} is asleep: call cuvmm.wake({name!r}) first")
    library = _library.get()
    token = library.number("tag_begin", name.encode())
    try:
        yield
    finally:
        # Blocks end in any order, and the garbage collector may end an abandoned one in any thread.
        library.tag_end(token)


def _names(tags: str | Iterable[str] | None) -> bytes:
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


def sleep(tags: str | Iterable[str] | None = None, keep: bool = True) -> None:
    """Gives up the device memory of pools, which keep their addresses.

    tags: the name of a pool (its tag), several, or None for all that are awake.
    keep: True copies the contents to host memory; False discards them: after `wake` they are not set.

    Tensors of these pools must not be used until `wake`, and `cuvmm.torch.pool` refuses the names.
    Waits for the work that PyTorch has queued, and is refused while a graph is captured.

    >>> with cuvmm.torch.pool("weights"):  # doctest: +SKIP
    ...     model = Model().cuda()
    >>> cuvmm.sleep("weights")  # doctest: +SKIP
    >>> cuvmm.wake("weights")  # doctest: +SKIP

    Raises `cuvmm.Error` if a tag is unknown or asleep, work does not end, there is too little host
    memory, or the driver refuses. All tags are then as before, with their contents. (If the driver
    refuses to map memory again too, that tag sleeps: see `asleep`.)
    """
    names = _names(tags)
    library = _library.get()
    library.check(library.sleep(names, int(keep)))


def wake(tags: str | Iterable[str] | None = None) -> None:
    """Gives pools their memory back at its addresses, with its contents if `sleep` kept them.

    tags: the name of a pool (its tag), several, or None for all that are asleep.

    Waits for memory for at most 60 s for each tag. Refused while a graph is captured, also if
    the capture begins meanwhile.

    >>> cuvmm.wake(["weights", "cache"])  # doctest: +SKIP

    Raises `cuvmm.OutOfMemoryError` if the memory is not to be had, and `cuvmm.Error` if a tag is
    unknown or awake, or the driver refuses. All tags sleep then as before.
    """
    names = _names(tags)
    library = _library.get()
    library.check(library.wake(names))


def asleep() -> frozenset[str]:
    """Returns the names of the pools that are asleep.

    >>> cuvmm.sleep("weights")  # doctest: +SKIP
    >>> cuvmm.asleep()  # doctest: +SKIP
    frozenset({'weights'})
    """
    return frozenset(json.loads(_library.get().text("asleep")))
