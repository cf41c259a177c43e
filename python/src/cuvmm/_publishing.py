"""Publication of tensors for other processes."""

from __future__ import annotations

import json
import operator
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from . import _library
from ._arrays import device_of
from ._dtypes import shape_in_files
from ._sizes import text_of
from ._sources import Source, device_of_all, lay_out, sources_of

#: The key of the metadata that has the strides of tensors that are not dense, as JSON. They count elements of the
#: tensor's type here, which for `F4` are bytes.
STRIDES = "cuvmm.strides"
#: The key of the metadata that says that the memory was published in place.
IN_PLACE = "cuvmm.in_place"

#: Held while names are published and withdrawn. The garbage collector may do so within.
_lock = threading.RLock()
#: What keeps the memory that is published in place, by path and name: a library that frees a tensor may use its
#: bytes for another one.
_kept: dict[tuple[str, str], list[Any]] = {}


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns the path of a socket, which stays right when the process changes its folder."""
    return os.path.abspath(os.fspath(path))


def checked(name: Any) -> str:
    """Returns the name of a publication, if it is text. The library checks the characters."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a publication is text, not {name!r}")
    return name


class Publication:
    """A name that this process publishes, with the version that `publish` has made.

    It stays published, with this object and without it, until it is withdrawn, the name is published
    again, or the process ends. A keeper has it for longer: see `keep`.
    """

    def __init__(self, name: str, version: int, path: str, device: int, nbytes: int) -> None:
        #: The name.
        self.name = name
        #: The version, which counts from 1 for each name.
        self.version = version
        #: The path of the socket at which other processes attach it.
        self.path = path
        #: The ordinal of the device that has the memory.
        self.device = device
        #: The bytes of all tensors; of a copy with gaps for alignment.
        self.nbytes = nbytes

    def keep(self, keeper: str | os.PathLike[str] | None = None) -> int:
        """Gives the newest version of the name to a keeper, which has it after this process has ended,
        however it ends. Returns the version.

        keeper: the keeper's socket. By default that of this user's keeper, which `python3 -m cuvmm.keeper`
            runs, and the command `cuvmm share keep`.

        `cuvmm.attach` finds it by its name as before. The keeper has it until a process gives the name
        again, it is withdrawn, or `cuvmm.drop(name)`. A version that is published later is kept only
        if it is given too.

        >>> published = cuvmm.publish(model.state_dict(), "model")  # doctest: +SKIP
        >>> published.keep()  # doctest: +SKIP
        1

        Raises `cuvmm.NotPublishedError` if it is withdrawn, and `cuvmm.Error` if it was published with
        `copy=False`, no keeper listens, or it cannot keep it. It stays published then, and what was kept before is kept.
        """
        library = _library.get()
        where = None if keeper is None else os.fsencode(absolute(keeper))
        name, path = self.name.encode(), os.fsencode(self.path)
        return library.number("publication_keep", name, path, where)

    def withdraw(self) -> None:
        """Withdraws the name, with all its versions, also from the keeper that it was given to. Processes
        that have attached it keep it.

        While a graph is captured the memory stays until a later call that may wait for the device.

        >>> published = cuvmm.publish(model.state_dict(), "model")  # doctest: +SKIP
        >>> published.withdraw()  # doctest: +SKIP

        Raises `cuvmm.NotPublishedError` if it is withdrawn already.
        """
        library = _library.get()
        with _lock:
            library.check(library.withdraw(self.name.encode(), os.fsencode(self.path)))
            kept = _kept.pop((self.path, self.name), None)
        # Tensors end without the lock.
        del kept

    def __repr__(self) -> str:
        return (
            f"<cuvmm.Publication {self.name!r} version {self.version}, {text_of(self.nbytes)}"
            f" on device {self.device}, at {self.path}>"
        )


def users_of(users: Iterable[int]) -> list[int]:
    """Returns the numbers of users. Raises ValueError or TypeError for what is none."""
    try:
        found = [operator.index(user) for user in users]
    except TypeError:
        raise TypeError(f"users names the numbers of users, such as [1000], not {users!r}") from None
    for user in found:
        if not 0 <= user < 1 << 32:
            raise ValueError(f"a user is a number from 0 to 4294967295, not {user}")
    return found


def _shape_of(source: Source) -> tuple[int, ...]:
    try:
        return shape_in_files(source.dtype, source.shape)
    except ValueError as error:
        raise ValueError(f"{source.name!r} cannot be published: {error}") from error


def publish(
    tensors: Mapping[str, Any],
    name: str,
    path: str | os.PathLike[str] | None = None,
    *,
    device: Any = None,
    users: Iterable[int] = (),
    metadata: Mapping[str, str] | None = None,
    copy: bool = True,
) -> Publication:
    """Publishes finished tensors, which other processes attach with `cuvmm.attach` without a copy.

    tensors: names and tensors, such as `model.state_dict()`: PyTorch's, or of any library with
        DLPack. Those that share memory, such as tied weights, are stored once.
    name: the name of the publication. Published again, it gets a new version.
    path: the socket at which other processes attach it. By default it is in a folder in which
        `cuvmm.attach` and the command `cuvmm share` look.
    device: the device that gets the memory. Needed if all tensors are in host memory; else it is
        theirs.
    users: the numbers of other users whose processes may attach it. They must name the path.
    metadata: texts by their names, which are attached too.
    copy: False publishes the tensors as they lie, without a copy. Their memory is that of shareable pools
        (`cuvmm.torch.pool(name, shareable=True)`), or of the heap if `cuvmm.torch.install` or `cuvmm.configure` has
        `shareable=True`.

    The tensors are copied, because memory that PyTorch allocated cannot be given to other processes.
    They are free to be changed or deleted afterwards; a process can attach its own publication. The
    copy counts against the limit of `cuvmm.configure`, and in its ledger. Of tensors whose bytes
    overlap, the bytes between their elements are copied too. A publication stays on the
    device for as long as it is published or a process has it attached.

    With `copy=False` other processes read the tensors themselves, and nothing more is held. What this process
    writes to them later is seen there, also by a kernel that is reading them, which then gets some elements from
    before and some from after: agree on when to write, or publish new tensors and keep these until all have taken
    up the newer version. The tensors may be deleted, and are kept while they are published; when the name is
    published again or withdrawn, a process that still has this version attached reads what their memory is used
    for next. Other tensors in the same pieces of memory (`cuvmm.extents`) can be read there too. Memory that was
    published in place cannot sleep. Do not resize a tensor's storage meanwhile.

    Waits for all work of the device, and is refused while a graph is captured. Without
    `cuvmm.torch.install` captures are not known here: do not call it during one.

    >>> model = Model().cuda()  # doctest: +SKIP
    >>> cuvmm.publish(model.state_dict(), "model")  # doctest: +SKIP
    <cuvmm.Publication 'model' version 1, 15.01 GiB on device 0, at /run/user/1000/cuvmm/17644.sock>

    Raises TypeError or ValueError for what cannot be published, `cuvmm.OutOfMemoryError` if there is
    too little memory, and `cuvmm.Error` if another process listens at the path, or memory is not shareable that
    is to be published in place. Nothing has changed then.
    """
    sources = sources_of(tensors, in_place=not copy)
    ordinal = device_of_all(sources, None if device is None else device_of(device))
    if copy:
        parts, nbytes = _copies_of(sources)
    else:
        parts, nbytes = _in_place(sources)
    texts = {str(key): str(value) for key, value in (metadata or {}).items()}
    strides = {source.name: source.strides for source in sources if not source.is_dense}
    if strides:
        texts[STRIDES] = json.dumps(strides)
    if not copy:
        texts[IN_PLACE] = "true"
    library = _library.get()
    others = users_of(users)
    if others and path is None:
        raise ValueError(
            "the usual folder is this user's: name a path that the other users can reach"
        )
    where = library.required("socket") if path is None else absolute(path)
    manifest = [
        {
            "name": source.name,
            "dtype": source.dtype,
            "shape": _shape_of(source),
            "offset": source.offset,
            "size": source.span,
        }
        for source in sources
    ]
    request = {
        "name": checked(name),
        "path": where,
        "users": others,
        "device": ordinal,
        "size": nbytes,
        "manifest": {"tensors": manifest, "metadata": texts},
        "parts": parts,
        "in_place": not copy,
    }
    text = json.dumps(request).encode()
    kept = [] if copy else [source.keeps for source in sources]
    with _lock:
        before = _kept.get((where, name), [])
        # An interrupt may come when the library has published. Then both are kept.
        _kept[where, name] = before + kept
        try:
            version = library.number("publish", text)
        except Exception:
            _kept[where, name] = before
            raise
        _kept[where, name] = kept
    # Tensors end without the lock.
    del before
    return Publication(name, version, where, ordinal, nbytes)


def _copies_of(sources: list[Source]) -> tuple[list[dict[str, Any]], int]:
    """Returns the bytes that are copied, and their sum with gaps for alignment."""
    runs, nbytes = lay_out(sources)
    parts = [
        {
            "address": run.start,
            "offset": run.offset,
            "size": run.end - run.start,
            "is_host": run.device is None,
        }
        for run in runs
    ]
    return parts, nbytes


def _in_place(sources: list[Source]) -> tuple[list[dict[str, Any]], int]:
    """Returns where each tensor lies, and the sum of their bytes."""
    for source in sources:
        if source.device is None:
            raise ValueError(f"{source.name!r} is in host memory: publish a copy (copy=True)")
    if not any(source.span for source in sources):
        raise ValueError("no tensor has elements: publish a copy (copy=True)")
    parts = [
        {"address": source.address, "offset": 0, "size": source.span, "is_host": False}
        for source in sources
    ]
    return parts, sum(source.span for source in sources)
