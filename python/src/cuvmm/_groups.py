"""Groups of processes whose pools sleep and wake in all of them or in none."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable
from typing import Any, Literal

from . import _library
from ._sleeping import Slept, give_back, given_up, how, names_of, seconds_of

#: The most milliseconds of a timeout.
_LONGEST = 2**63


class Group:
    """This process's membership in a group. Made by `group`."""

    def __init__(self, token: int, figures: dict[str, Any]) -> None:
        self._token = token
        #: The name.
        self.name: str = figures["name"]
        #: This process's number, from 0.
        self.rank: int = figures["rank"]
        #: The number of processes.
        self.ranks: int = figures["ranks"]
        #: The path of the group's file.
        self.path: str = figures["path"]

    def sleep(
        self,
        tags: str | Iterable[str] | None = None,
        keep: bool = True,
        *,
        host: Literal["keep", "release"] = "keep",
        timeout: float = 120.0,
    ) -> Slept:
        """Gives up the device memory of pools as `cuvmm.sleep` does, in all ranks or in none.

        tags, keep, host: as for `cuvmm.sleep`. All ranks pass the same tags and the same `keep`.
        timeout: the seconds to wait for the other ranks and for work in all, from 0 to `math.inf`.

        Every rank calls this, and none begins before all have. When each has done all that can fail, such as the
        copies, all give the memory up.

        >>> workers = cuvmm.group("tp0", 8)  # doctest: +SKIP
        >>> workers.sleep("weights").given  # doctest: +SKIP
        {'weights': 2147483648}

        Raises as `cuvmm.sleep` does if this rank fails, and `cuvmm.Error` if another one does, has ended, or has not
        called this in time: the message names that rank, its process and its reason. All pools of all ranks are then
        as before, with their contents.
        """
        names, kept = names_of(tags), how(keep, host)
        library, milliseconds = _library.get(), _milliseconds(timeout)
        return given_up(lambda: library.check(library.group_sleep(self._token, names, kept, milliseconds)))

    def wake(self, tags: str | Iterable[str] | None = None, *, timeout: float = 120.0) -> None:
        """Gives pools their memory back as `cuvmm.wake` does, in all ranks or in none.

        tags: as for `cuvmm.wake`, the same in all ranks.
        timeout: the seconds to wait for the other ranks and for memory in all, from 0 to `math.inf`.

        >>> workers.wake("weights")  # doctest: +SKIP

        Raises as `cuvmm.wake` does if this rank fails, and `cuvmm.Error` if another one does, as in `sleep`. All pools
        of all ranks sleep then as before.
        """
        names, milliseconds = names_of(tags), _milliseconds(timeout)
        library = _library.get()
        give_back(json.loads(names))
        library.check(library.group_wake(self._token, names, milliseconds))

    def leave(self) -> None:
        """Leaves the group, so that another process can join it as this rank. Also leaves with the process's end.

        >>> workers.leave()  # doctest: +SKIP
        """
        _library.get().group_leave(self._token)

    def __repr__(self) -> str:
        return f"<cuvmm.Group {self.name!r} rank {self.rank} of {self.ranks}, at {self.path}>"


def _milliseconds(timeout: float) -> int:
    return int(min(seconds_of(timeout) * 1000, _LONGEST))


def _count(what: str, number: Any) -> int:
    """Returns a number that fits the library's, which checks it."""
    try:
        found = operator.index(number)
    except TypeError:
        raise TypeError(f"{what} is a whole number, not {number!r}") from None
    if not 0 <= found < 1 << 32:
        raise ValueError(f"{what} is a number from 0 to 4294967295, not {found}")
    return found


def group(
    name: str,
    ranks: int,
    *,
    rank: int | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Group:
    """Joins a group of processes of this machine, such as the workers of a model that is split over devices.

    name: the group's name, such as "tp0": letters, digits, dots, hyphens and underscores.
    ranks: how many processes it has, at most 128.
    rank: this process's number, from 0. By default the first one that is free.
    directory: the directory that all ranks share. By default that of the ledger of `cuvmm.configure`, or else
        `$XDG_RUNTIME_DIR/cuvmm`, or `/tmp/cuvmm-UID` where that is not set.

    Waits for no other rank. With a ledger in the same directory, `cuvmm ctl sleep --group NAME` and `wake` ask all ranks
    from outside.

    >>> workers = cuvmm.group("tp0", 8)  # doctest: +SKIP
    >>> workers  # doctest: +SKIP
    <cuvmm.Group 'tp0' rank 3 of 8, at /run/user/1000/cuvmm/tp0.cuvmm-group>

    Raises `cuvmm.Error` if the name cannot be a file's, the group has another number of ranks, or another process has
    the rank.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a group is text, not {name!r}")
    request = {
        "name": name,
        "ranks": _count("ranks", ranks),
        "rank": None if rank is None else _count("rank", rank),
        "directory": None if directory is None else os.path.abspath(os.fspath(directory)),
    }
    library = _library.get()
    token = library.number("group_join", json.dumps(request).encode())
    return Group(token, json.loads(library.required("group", token)))
