"""Keepers, which have publications after the processes that published them have ended."""

from __future__ import annotations

import os
import weakref

from . import _library
from ._publishing import absolute, checked


class Keeper:
    """Keeps publications of other processes after they have ended, until it is closed or this process ends.

    path: the socket to listen at. By default that of this user's keeper, to which `Publication.keep` gives.
    ledger: the directory with the ledgers of the processes that publish, or the file of one of them, in which what
        is kept stays charged. By default that of `cuvmm.configure`, else this user's folder.

    It has descriptors of the memory open and uses no GPU. Run it in a process of its own, which does nothing that
    may end it: `python3 -m cuvmm.keeper`, or the command `cuvmm share keep`. What running publishers had given to a
    keeper before is taken from them. What a keeper alone has is gone when it ends.

    >>> with cuvmm.Keeper() as keeper:  # doctest: +SKIP
    ...     signal.pause()

    Raises `cuvmm.Error` if another process listens there.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, ledger: str | os.PathLike[str] | None = None
    ) -> None:
        library = _library.get()
        if path is None:
            path = os.path.join(os.path.dirname(library.required("socket")), "keeper.sock")
        #: The path of the socket.
        self.path: str = absolute(path)
        ledgers = None if ledger is None else os.fsencode(absolute(ledger))
        token = library.number("keeper_begin", os.fsencode(self.path), ledgers)
        self._end = weakref.finalize(self, library.keeper_end, token)

    def close(self) -> None:
        """Ends the keeper. What only it has goes back to the driver."""
        self._end()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<cuvmm.Keeper at {self.path}{'' if self._end.alive else ', closed'}>"


def drop(name: str, keeper: str | os.PathLike[str] | None = None) -> bool:
    """Drops what a keeper has under a name, as `cuvmm share drop` does. Returns False if it has no such name.

    keeper: the keeper's socket. By default that of this user's keeper.

    Processes that have the name attached keep its memory.

    >>> cuvmm.drop("model")  # doctest: +SKIP
    True

    Raises `cuvmm.Error` if no keeper listens.
    """
    library = _library.get()
    where = None if keeper is None else os.fsencode(absolute(keeper))
    code = library.keeper_drop(checked(name).encode(), where)
    library.check(code)
    return bool(code == 0)
