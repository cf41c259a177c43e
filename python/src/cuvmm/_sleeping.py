"""Sleep and wake of tagged memory."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator

from . import _library

# Tags that were entered, and those whose memory is asleep.
_known: set[str] = set()
_asleep: set[str] = set()
# No tag has this name: one is entered by a text that ends at the first zero byte.
_NO_TAG = "\0"


@contextlib.contextmanager
def tag(name: str) -> Iterator[None]:
    """Gives a name to the pool allocations of the calling thread while it is entered.

    `cuvmm.torch.pool` enters it.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a pool is text, not {name!r}")
    if not name or "\0" in name:
        raise ValueError(f"the name of a pool has a character, and no zero byte: {name!r}")
    if name in _asleep:
        raise _library.Error(
            f"the memory of tag {name!r} is asleep: call cuvmm.wake({name!r}) first"
        )
    library = _library.get()
    library.check(library.tag_enter(name.encode()))
    _known.add(name)
    try:
        yield
    finally:
        library.tag_leave()


def _names(tags: str | Iterable[str] | None) -> tuple[set[str] | None, bytes]:
    if tags is None:
        return None, b"null"
    names = [tags] if isinstance(tags, str) else [str(name) for name in tags]
    if not names:
        raise ValueError("name at least one tag, or pass None for all")
    return set(names), json.dumps(names).encode()


def _check(library: _library.Library, code: int) -> None:
    """Raises the library's error if a call failed, which may have changed some of its tags."""
    try:
        library.check(code)
    except _library.Error:
        # Other threads may enter tags meanwhile.
        for name in tuple(_known):
            (_asleep.add if _is_asleep(library, name) else _asleep.discard)(name)
        raise


def _is_asleep(library: _library.Library, name: str) -> bool:
    """Asks the library. It looks at all names before it changes anything, and the last is unknown."""
    library.sleep(json.dumps([name, _NO_TAG]).encode(), 0)
    return library.reason().endswith("is asleep")


def _synchronize() -> None:
    """Waits for PyTorch's work: its allocator, and not the library, knows the streams of a pool."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)


def sleep(tags: str | Iterable[str] | None = None, keep: bool = True) -> None:
    """Gives up the device memory of tagged allocations. Their addresses stay theirs.

    tags: one tag, several, or None for all that were used.
    keep: True copies the contents to host memory; False discards them.

    Tensors of these tags must not be used until `wake`, and nothing must be allocated under them.
    Waits for the work that PyTorch has queued.

    >>> with cuvmm.torch.pool("weights"):  # doctest: +SKIP
    ...     model = Model().cuda()
    >>> cuvmm.sleep("weights")  # doctest: +SKIP
    >>> cuvmm.wake("weights")  # doctest: +SKIP

    Raises `cuvmm.Error` if a tag is unknown or asleep, and nothing has changed; or if there is too
    little host memory, and `asleep` tells which tags sleep.
    """
    names, text = _names(tags)
    library = _library.get()
    _synchronize()
    _check(library, library.sleep(text, int(keep)))
    _asleep.update(_known if names is None else names)


def wake(tags: str | Iterable[str] | None = None) -> None:
    """Brings tagged memory back at its addresses, with its contents if `sleep` kept them.

    tags: one tag, several, or None for all that are asleep.

    Raises `cuvmm.Error` if a tag is unknown or awake, and nothing has changed; or if the memory is
    not to be had, and `asleep` tells which tags sleep still.
    """
    names, text = _names(tags)
    library = _library.get()
    _check(library, library.wake(text))
    if names is None:
        _asleep.clear()
    else:
        _asleep.difference_update(names)


def asleep() -> frozenset[str]:
    """Returns the tags that are asleep."""
    return frozenset(_asleep)
