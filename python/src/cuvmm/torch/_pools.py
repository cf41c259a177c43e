"""Pools: memory of some tensors under a name, for sleep and wake."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .. import _library
from .._sleeping import tag
from . import _install

_lock = threading.Lock()
# Pools that no thread uses now, by name and device. PyTorch lets one block of code at a time use a
# pool, so a thread takes one and puts it back. They are kept, because tensors may outlive the code.
_unused: dict[tuple[str, int], list[Any]] = {}
# Kept, because PyTorch calls its functions until the process ends.
_allocator: Any = None


class _Thread(threading.local):
    """The pools that a thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []


_thread = _Thread()


class _Entered:
    """A pool of PyTorch that a thread has entered. Only the innermost is in use."""

    def __init__(self, mem_pool: Any, device: int) -> None:
        self._mem_pool, self._device = mem_pool, device
        self._context: Any = None

    def resume(self) -> None:
        self._context = torch.cuda.use_mem_pool(self._mem_pool, self._device)
        self._context.__enter__()

    def pause(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


@contextlib.contextmanager
def pool(name: str, device: Any = None) -> Iterator[None]:
    """Allocates the CUDA tensors that the calling thread makes from the pool of that name.

    device: the device whose tensors are meant; the current one by default. With `install`, tensors
        of every device.

    Entered again with the same name, the same pool is used. Pools may be nested; the innermost is
    used. Other threads, such as those of a backward pass, do not use it. Works with and without
    `cuvmm.torch.install`: without it, PyTorch's own allocator divides the pool's memory, so
    everything of PyTorch works, and its statistics include the pool.

    What other streams have used (`record_stream`) and is freed inside is used again only after an
    allocation outside of every pool, if there is no `install`: PyTorch keeps it until then, in
    pools of its own too. Leave the block between the steps of a program.

    Do not capture a graph inside: a capture has a pool of its own, and this one would replace it.

    >>> with cuvmm.torch.pool("weights"):  # doctest: +SKIP
    ...     model = Model().cuda()
    >>> cuvmm.sleep("weights")  # doctest: +SKIP

    Raises `cuvmm.Error` if the pool's memory is asleep, and ValueError for an empty name.
    """
    with tag(name):
        if _install.is_installed():
            yield
        else:
            torch.cuda.init()
            ordinal = torch.cuda._utils._get_device_index(device, optional=True)
            with _use(name, ordinal):
                yield


@contextlib.contextmanager
def _use(name: str, device: int) -> Iterator[None]:
    """Replaces the pool that the thread uses, until the end."""
    mem_pool = _take(name, device)
    outer = _thread.entered[-1] if _thread.entered else None
    mine = _Entered(mem_pool, device)
    if outer is not None:
        outer.pause()
    try:
        mine.resume()
        _thread.entered.append(mine)
        try:
            yield
        finally:
            _thread.entered.pop()
            mine.pause()
    finally:
        if outer is not None:
            outer.resume()
        with _lock:
            _unused[name, device].append(mem_pool)


def _take(name: str, device: int) -> Any:
    """Returns a pool of PyTorch that no thread uses. Its memory is the library's."""
    global _allocator
    with _lock:
        unused = _unused.setdefault((name, device), [])
        if unused:
            return unused.pop()
        if _allocator is None:
            library = _library.get()
            _allocator = _install.pluggable(library, "cuvmm_tag_malloc", "cuvmm_tag_free")
        # PyTorch notes the allocator of a pool for the device that is current.
        with torch.cuda.device(device):
            return torch.cuda.MemPool(_allocator.allocator())
