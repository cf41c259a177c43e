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
from .._sleeping import check, tag
from . import _install

# Pools that no block of code uses now, by name and device. PyTorch lets one block at a time use a pool, so a
# block takes one and puts it back. They are kept, because tensors may outlive the code. No lock is taken: the
# garbage collector may end a block in the middle of each function here.
_unused: dict[tuple[str, int], deque[Any]] = {}
# PyTorch's object for the functions, which is kept because PyTorch calls them until the process ends.
_allocators: dict[str, Any] = {}


class _Thread(threading.local):
    """The pools that a thread has entered and not left, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []
        # The blocks that it is in, with and without `install`.
        self.blocks: set[object] = set()


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
        context = torch.cuda.use_mem_pool(self._mem_pool, self._device)
        if self.begins or self.context is not None or self._all[-1:] != [self]:
            return
        self.begins = True
        try:
            context.__enter__()
            self.context = context
        finally:
            self.begins = False
        if self not in self._all:
            self.pause()

    def pause(self) -> None:
        context, self.context = self.context, None
        if context is not None:
            context.__exit__(None, None, None)


def _use_innermost() -> None:
    """Uses the pool that this thread has entered last, and no other.

    The garbage collector may end a block in the middle of each step, so it looks again after each.
    """
    entered = _thread.entered
    while True:
        outer = [it for it in entered[:-1] if it.context is not None]
        innermost = [it for it in entered[-1:] if it.context is None and not it.begins]
        if outer:
            outer[-1].pause()
        elif innermost:
            innermost[0].resume()
        else:
            return


@contextlib.contextmanager
def pool(name: str, device: Any = None) -> Iterator[None]:
    """Allocates the CUDA tensors that the calling thread makes from the pool of that name.

    device: the device whose tensors are meant; the current one by default. With `install`, tensors
        of every device.

    Entered again with the same name, the same pool is used. Pools may be nested; the innermost is
    used. Blocks may end in any order. Other threads, such as those of a backward pass, do not use it; other
    generators and tasks of this thread do: an `await` or a `yield` inside leaves the name entered for what
    runs meanwhile. Works with and without
    `cuvmm.torch.install`: without it, PyTorch's own allocator divides the pool's memory, so
    everything of PyTorch works, and its statistics include the pool.

    What other streams have used (`record_stream`) and is freed inside is used again only after an
    allocation outside of every pool, if there is no `install`: PyTorch keeps it until then, in
    pools of its own too. Leave the block between the steps of a program.

    Do not capture a graph inside: a capture has a pool of its own, and this one would replace it.

    What libraries keep is made before it is entered where that can be known: cuBLAS' workspace of the
    current stream of `device`. The first product of matrices on another stream or device inside puts its
    workspace into the pool, and so do other things that outlive the block. Do these once before.

    >>> with cuvmm.torch.pool("weights"):  # doctest: +SKIP
    ...     model = Model().cuda()
    >>> cuvmm.sleep("weights")  # doctest: +SKIP

    Raises `cuvmm.Error` if the pool's memory is asleep or the current stream captures a graph, and
    ValueError for an empty name.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise Error(
            f"the pool {name!r} cannot be entered while a graph is captured, whose memory does not sleep:"
            " enter it before the capture, and leave it"
        )
    check(name)
    ordinal = torch.cuda._utils._get_device_index(device, optional=True)
    blocks, block = _thread.blocks, object()
    if not blocks:
        _make_workspace(ordinal)
    with tag(name):
        blocks.add(block)
        try:
            if _install.is_installed():
                yield
            else:
                with _use(name, ordinal):
                    yield
        finally:
            blocks.discard(block)


def _make_workspace(device: int) -> None:
    """Makes cuBLAS' workspace for the current stream of a device.

    PyTorch makes it for the first product of matrices on a stream, and keeps it. Made inside of a pool it
    would sleep with the pool, and products outside of it would use memory that is not mapped.
    """
    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()


@contextlib.contextmanager
def _use(name: str, device: int) -> Iterator[None]:
    """Replaces the pool that the thread uses, until the end."""
    unused = _unused.setdefault((name, device), deque())
    mem_pool = _taken(unused) or _made(device)
    entered = _Entered(mem_pool, device)
    try:
        entered.enter()
        yield
    finally:
        entered.leave()
        unused.append(mem_pool)


def _taken(unused: deque[Any]) -> Any:
    """Takes a pool that no block uses, if there is one."""
    try:
        return unused.pop()
    except IndexError:
        return None


def _made(device: int) -> Any:
    """Makes a pool of PyTorch, whose memory is the library's."""
    allocator = _allocators.get("tags")
    if allocator is None:
        made = _install.pluggable(_library.get(), "cuvmm_tag_malloc", "cuvmm_tag_free")
        allocator = _allocators.setdefault("tags", made)
    # PyTorch notes the allocator of a pool for the device that is current.
    with torch.cuda.device(device):
        return torch.cuda.MemPool(allocator.allocator())
