"""Pools: memory of some tensors under a name, for sleep and wake."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from .. import _library
from .._errors import Error
from .._sleeping import check, graphs_tag, tag
from . import _install, _sharing

# Pools that no block of code uses now, by name and device. PyTorch lets one block at a time use a pool, so a
# block takes one and puts it back. They are kept until they are trimmed: tensors may outlive the code, and the
# next block uses what is free. The garbage collector may end a block in the middle of each function here.
_unused: dict[tuple[str, int], deque[Any]] = {}
# Pools of PyTorch that were dropped and had tensors then, by name and device: the numbers by which PyTorch
# knows them. Their memory goes back when its tensors are gone and PyTorch's cache is emptied.
_left: dict[tuple[str, int], deque[tuple[int, int]]] = {}
# Held while PyTorch begins or ends the use of a pool, and while pools are dropped: PyTorch ends the process if
# a pool is dropped while another one is in use on its device. A block that the garbage collector ends meanwhile
# takes it again.
_turn = threading.RLock()
# The uses of PyTorch's pools by device.
_uses: dict[int, set[_Entered]] = {}
# Pools that blocks inside of captures use, by name and device. Their graphs do not hold them: they are never dropped.
_captured: dict[tuple[str, int], deque[Any]] = {}
#: The end of the names under which the pools are unused that graphs were captured into. No pool has such a name.
_OF_GRAPHS = "\0graphs"
#: The library's functions for each kind of pool: for tensors, and for what captured graphs use.
_KINDS = {"tags": ("cuvmm_tag_malloc", "cuvmm_tag_free"), "graphs": ("cuvmm_graph_malloc", "cuvmm_tag_free")}
# PyTorch's object for the functions, which is kept because PyTorch calls them until the process ends.
_allocators: dict[str, Any] = {}


class _Thread(threading.local):
    """The pools that a thread has entered and not left, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []
        # The blocks that it is in, with and without `install`.
        self.blocks: set[object] = set()
        # True while pools are dropped: it uses none.
        self.drops = False
        # The blocks that it is in whose backward passes it runs itself, and if it did not before the first.
        self.workers: set[object] = set()
        self.multithreading: bool | None = None
        # The devices whose contexts it has begun to use.
        self.contexts: set[int] = set()


_thread = _Thread()


class _Entered:
    """A pool of PyTorch that a thread has entered. Only the innermost is in use."""

    def __init__(self, mem_pool: Any, device: int) -> None:
        self._mem_pool, self._device = mem_pool, device
        self._all = _thread.entered
        #: PyTorch's context of the use, once it has begun.
        self.context: Any = None
        #: True while it begins.
        self.begins = False

    def enter(self) -> None:
        """Uses the pool instead of the innermost one."""
        self._all.append(self)
        _use_innermost()

    def leave(self) -> None:
        """Stops using the pool. Blocks end in any order, and in any thread if they were abandoned."""
        if self in self._all:
            self._all.remove(self)
        self.pause()
        # PyTorch lets a thread use a pool only from that thread: another one resumes it when it enters or
        # leaves a pool the next time.
        _use_innermost()

    def resume(self) -> None:
        with _turn:
            self._begin()
        if self not in self._all:
            self.pause()

    def pause(self) -> None:
        with _turn:
            self._end()

    def hand_back(self, unused: deque[Any]) -> None:
        """Puts PyTorch's pool back. Nothing else has it then, so that it ends where it is dropped."""
        with _turn:
            unused.append(self._mem_pool)
            self._mem_pool = None

    def _begin(self) -> None:
        context = torch.cuda.use_mem_pool(self._mem_pool, self._device)
        if self.begins or self.context is not None or self._all[-1:] != [self]:
            return
        self.begins = True
        # In use from before it begins until after it has ended.
        uses = _uses.setdefault(self._device, set())
        uses.add(self)
        try:
            context.__enter__()
            self.context = context
        finally:
            self.begins = False
            if self.context is None:
                uses.discard(self)

    def _end(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            try:
                context.__exit__(None, None, None)
            finally:
                _uses[self._device].discard(self)


def _use_innermost() -> None:
    """Uses the pool that this thread has entered last, and no other.

    The garbage collector may end a block in the middle of each step, so it looks again after each.
    """
    entered = _thread.entered
    while not _thread.drops:
        outer = [it for it in entered[:-1] if it.context is not None]
        innermost = [it for it in entered[-1:] if it.context is None and not it.begins]
        if outer:
            outer[-1].pause()
        elif innermost:
            innermost[0].resume()
        else:
            return


@contextlib.contextmanager
def pool(
    name: str, device: Any = None, *, trim: bool = False, shareable: bool = False
) -> Iterator[None]:
    """Allocates the CUDA tensors that the calling thread makes from the pool of that name.

    device: the device whose tensors are meant; the current one by default. With `install`, tensors
        of every device.
    trim: True gives what is free in the pool back before it is entered, as `cuvmm.trim` does, so that this
        block's tensors can have it in other sizes. Not while another thread is inside of a pool of the device.

    shareable: True makes the pool's memory shareable, for good: its tensors can be sent to other processes in
        place (`torch.multiprocessing`). Say so before the pool has memory. Memory that was sent cannot sleep, and
        the pool is not exchanged and serves no captures.

    Entered again with the same name, the same pool is used. Pools may be nested; the innermost is
    used. Blocks may end in any order. Other threads, such as those of a backward pass, do not use it; other
    generators and tasks of this thread do: an `await` or a `yield` inside leaves the name entered for what
    runs meanwhile. Works with and without
    `cuvmm.torch.install`: without it, PyTorch's own allocator divides the pool's memory, so
    everything of PyTorch works, and its statistics include the pool.

    What other streams have used (`record_stream`) and is freed inside is used again only after an
    allocation outside of every pool, if there is no `install`: PyTorch keeps it until then, in
    pools of its own too. Leave the block between the steps of a program.

    Do not capture a graph inside: a capture has a pool of its own, and this one would replace it. Entered
    inside of a capture, the pool serves captures only, and its contents are kept however it sleeps: the graph
    does not hold the memory, so it stays with the name, for captures that enter it later. Graphs that
    share it are replayed in turn. `cuvmm.torch.graphs` is for all memory of a graph.

    What libraries keep is made before it is entered where that can be known: cuBLAS' workspace of the
    current stream of `device`. The first product of matrices on another stream or device inside puts its
    workspace into the pool, and so do other things that outlive the block. Do these once before.

    >>> with cuvmm.torch.pool("weights"):  # doctest: +SKIP
    ...     model = Model().cuda()
    >>> cuvmm.sleep("weights")  # doctest: +SKIP

    Without `install` PyTorch gives nothing back when a tensor does not fit: it neither joins what is free in
    the pool nor tries again. So the text of an out of memory inside names `cuvmm.trim`.

    Raises `cuvmm.Error` if the pool's memory is asleep, or it is to be shareable and has memory that is not,
    and ValueError for an empty name.
    """
    check(name)
    if shareable:
        _sharing.make_shareable(name)
    captures = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    ordinal = torch.cuda._utils._get_device_index(device, optional=True)
    blocks, block = _thread.blocks, object()
    if not blocks and not captures:
        make_workspace(ordinal)
    installed = _install.is_installed()
    kind = "graphs" if captures and not installed else "tags"
    with graphs_tag(name, True) if kind == "graphs" else tag(name):
        blocks.add(block)
        try:
            if installed:
                yield
            else:
                if trim and not captures:
                    give_back(name, ordinal)
                with _use(name, ordinal, kind):
                    if trim and not captures:
                        # Inside, this leaves PyTorch's memory outside of pools as it is.
                        give_back_left(name, ordinal)
                    yield
        except torch.cuda.OutOfMemoryError as error:
            if not _install.is_installed():
                _name_trim(error, name)
            raise
        finally:
            blocks.discard(block)


def make_workspace(device: int) -> None:
    """Makes cuBLAS' workspace for the current stream of a device.

    PyTorch makes it for the first product of matrices on a stream, and keeps it. Made inside of a pool it
    would sleep with the pool, and products outside of it would use memory that is not mapped.
    """
    with torch.cuda.device(device):
        if device not in _thread.contexts:
            # Makes the device's context current: without one PyTorch warns, and takes that of device 0. It waits
            # for nothing.
            torch.cuda.cudart().cudaMemGetInfo(device)
            _thread.contexts.add(device)
        torch.cuda.current_blas_handle()


@contextlib.contextmanager
def _use(name: str, device: int, kind: str) -> Iterator[None]:
    """Replaces the pool that the thread uses, until the end."""
    unused = (_captured if kind == "graphs" else _unused).setdefault((name, device), deque())
    entered = _Entered(_taken(unused) or make_mem_pool(kind, device), device)
    try:
        entered.enter()
        yield
    finally:
        entered.leave()
        entered.hand_back(unused)


@contextlib.contextmanager
def ordinary(device: int) -> Iterator[None]:
    """Uses memory of PyTorch's own allocator in place of a pool, until the end."""
    # No other pool has this name.
    unused = _unused.setdefault(("", device), deque())
    with torch.cuda.device(device):
        entered = _Entered(_taken(unused) or torch.cuda.MemPool(), device)
    try:
        entered.enter()
        give_back_left("", device)
        yield
    finally:
        entered.leave()
        entered.hand_back(unused)
        _dropped("", device)


def _taken(unused: deque[Any]) -> Any:
    """Takes a pool that no block uses, if there is one."""
    try:
        return unused.pop()
    except IndexError:
        return None


def make_mem_pool(kind: str, device: int) -> Any:
    """Makes a pool of PyTorch, whose memory is the library's."""
    allocator = _allocators.get(kind)
    if allocator is None:
        made = _install.pluggable(_library.get(), *_KINDS[kind])
        allocator = _allocators.setdefault(kind, made)
    # PyTorch notes the allocator of a pool for the device that is current.
    with torch.cuda.device(device):
        return torch.cuda.MemPool(allocator.allocator())


def keep_for_graphs(name: str, device: int, mem_pool: Any) -> None:
    """Keeps a pool that graphs were captured into until it is trimmed. PyTorch ends the process if a pool is dropped
    while another one is in use, or a graph is captured."""
    _unused.setdefault((name + _OF_GRAPHS, device), deque()).append(mem_pool)


def _name_trim(error: BaseException, name: str) -> None:
    """Adds to the text of PyTorch's error what gives memory back."""
    text = str(error)
    if "cuvmm.trim" not in text:
        error.args = (
            f"{text} Inside of a pool PyTorch gives no free memory back before it fails:"
            f" cuvmm.trim({name!r}) does between two blocks, and"
            f" cuvmm.torch.pool({name!r}, trim=True) when it is entered.",
        )


def devices(name: str) -> set[int]:
    """Returns the devices on which a pool was entered."""
    return {device for known, device in list(_unused) if known in (name, name + _OF_GRAPHS)}


def give_back(name: str, device: int) -> bool:
    """Drops PyTorch's pools of a name on a device that no block uses: what is free in them goes back.

    Returns False, and drops none, if another thread uses a pool of the device. Blocks of this thread go on with
    new pools.
    """
    if hasattr(torch._C, "_MemPoolContext"):
        # It would free what its tensors keep with another allocator's function later.
        raise Error("this PyTorch cannot drop a pool with tensors: trim needs PyTorch 2.8 or newer")
    return _dropped(name, device)


def _dropped(name: str, device: int) -> bool:
    thread = _thread
    with _turn:
        thread.drops = True
        try:
            for it in reversed(thread.entered):
                it.pause()
            is_free = not _uses.get(device)
            if is_free:
                _drop(name, device)
        finally:
            thread.drops = False
            _use_innermost()
    return is_free


def _drop(name: str, device: int) -> None:
    left = _left.setdefault((name, device), deque())
    for known in (name, name + _OF_GRAPHS):
        unused = _unused.get((known, device))
        while unused:
            mem_pool = _taken(unused)
            if mem_pool is not None:
                first, second = mem_pool.id
                left.append((first, second))
            # The object ends here, and with it PyTorch's use of the pool.
            del mem_pool


def give_back_left(name: str, device: int) -> None:
    """Empties PyTorch's cache if a pool that was dropped has memory there whose tensors are gone."""
    left = _left.get((name, device), deque())
    free = False
    for number in list(left):
        segments = torch.cuda.memory_snapshot(number)
        free = free or any(it["active_size"] == 0 for it in segments)
        if not segments:
            with contextlib.suppress(ValueError):
                left.remove(number)
    if free:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def worker(name: str, device: Any = None, *, trim: bool = False) -> Iterator[None]:
    """Enters the pool of that name, with the backward passes that the calling thread begins inside.

    The arguments are those of `pool`. PyTorch runs a backward pass on threads of its own, which use no pool:
    the gradients that they make are outside. Inside of this block this thread runs its backward passes itself
    (`torch.autograd.set_multithreading_enabled(False)`), so their gradients are in the pool. With one device
    that takes no longer; the passes of several devices run one after the other.

    Threads that a program starts for itself, such as those of an executor, enter `worker` or `pool` each for
    its own work: they share the memory of the name, and several may be inside at a time.

    >>> with cuvmm.torch.worker("training"):  # doctest: +SKIP
    ...     model(inputs).sum().backward()

    Raises what `pool` raises.
    """
    thread, block = _thread.workers, object()
    with pool(name, device, trim=trim):
        if _thread.multithreading is None:
            _thread.multithreading = torch._C._is_multithreading_enabled()
            torch._C._set_multithreading_enabled(False)
        thread.add(block)
        try:
            yield
        finally:
            thread.discard(block)
            # If another thread ends a block that was abandoned, the next one of this thread sets it back.
            before = _thread.multithreading
            if thread is _thread.workers and not thread and before is not None:
                _thread.multithreading = None
                torch._C._set_multithreading_enabled(before)
