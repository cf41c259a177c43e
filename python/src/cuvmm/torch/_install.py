"""Putting the heap in as PyTorch's allocator."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from os import PathLike
from typing import Any, Literal

import torch

from .. import _library, _settings
from .._settings import configure
from . import _collecting, _figures, _history, _refusals, _sharing

# PyTorch's setters, and the functions that they get.
_HOOKS = {
    "set_reset_fn": "cuvmm_reset",
    "set_memory_fraction_fn": "cuvmm_memory_fraction",
    "set_base_alloc_fn": "cuvmm_base_alloc",
    "set_record_stream_fn": "cuvmm_record_stream",
    "set_begin_allocate_to_pool": "cuvmm_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "cuvmm_end_allocate_to_pool",
    "set_release_pool": "cuvmm_release_pool",
}

_lock = threading.Lock()
# Kept, because PyTorch calls its functions until the process ends.
_installed: Any = None


def is_installed() -> bool:
    """Returns True if PyTorch allocates from the heap.

    >>> if not cuvmm.torch.is_installed():  # doctest: +SKIP
    ...     cuvmm.torch.install()
    """
    return _installed is not None


def install(
    limit: int | str | None = None,
    preset: str | None = None,
    tenant: str | None = None,
    ledger: str | PathLike[str] | None = None,
    ledger_limit: int | str | None = None,
    peers: Iterable[int] | None = None,
    aliases: bool | None = None,
    stream_waits: bool | None = None,
    rdma: bool | Literal["auto"] | None = None,
    shareable: bool | None = None,
    guarantee: int | str | None = None,
    priority: int | None = None,
    *,
    collect: bool = False,
) -> None:
    """Makes PyTorch allocate all CUDA memory from the heap. Call it before CUDA starts.

    The settings are those of `cuvmm.configure`. Those that it has set before stay.

    A process that copies tensors between devices, or whose kernels read those of another device, names
    all of them as `peers`, which have access to the memory of pools too. Without it a copy between devices fails with `CUDA error: invalid
    argument`: `check_access` says why. It is left out by default because mapping memory takes many
    times as long with it; processes with one device each, as data-parallel training has, do not need
    it.

    With `shareable=True` tensors can be sent to other processes in place (`torch.multiprocessing`), and published in
    place (`cuvmm.publish(..., copy=False)`), outside of `cuvmm.torch.pool` too; pools are shareable as each says.

    With `collect=True` an allocation that finds no memory collects Python's garbage once and tries again, so that
    tensors in reference cycles are not what it lacks. PyTorch's own allocator does not. Memory of
    `cuvmm.torch.pool` and of graphs that are captured is left out, and call `gc.collect()` for it: README says why.

    An allocation that finds no memory raises `torch.cuda.OutOfMemoryError`, with a table of what is
    held. `torch.cuda.memory._record_memory_history` records allocations with their stacks, and
    `torch.profiler` reports them. `memory_stats`, `memory_summary`, `max_memory_allocated`, `memory_reserved` and snapshots
    report the heap's figures, and `torch.cuda.mem_get_info` what this process could still
    allocate. README lists what does not work with any allocator but PyTorch's own.

    >>> import cuvmm.torch  # doctest: +SKIP
    >>> cuvmm.torch.install(limit="60GiB")  # doctest: +SKIP

    Raises RuntimeError if CUDA has started, if another allocator is installed, or if this PyTorch
    has no CUDA; TypeError or ValueError for a wrong setting. Nothing is changed then.
    """
    global _installed
    if not isinstance(collect, bool):
        raise TypeError(f"collect is True or False, not {collect!r}")
    with _lock:
        _refuse_late()
        library = _library.get()
        configure(
            limit,
            preset,
            tenant,
            ledger,
            ledger_limit,
            peers,
            aliases,
            stream_waits,
            rdma,
            shareable,
            guarantee,
            priority,
        )
        allocator = pluggable(library, "cuvmm_malloc", "cuvmm_free")
        for setter, function in _HOOKS.items():
            # A PyTorch that lacks a setter does not call such a function. Uses of memory by another
            # stream must not go unnoticed.
            optional = setter != "set_record_stream_fn"
            with contextlib.suppress(*[AttributeError] * optional):
                getattr(allocator.allocator(), setter)(library.address(function))
        try:
            torch.cuda.memory.change_current_allocator(allocator)
        except RuntimeError as error:
            raise RuntimeError(
                "cuvmm cannot be installed: CUDA memory was used before. Call"
                " cuvmm.torch.install() first"
            ) from error
        _installed = allocator
        _figures.report(library)
        _refusals.explain()
        _history.replace_recorder(library)
        if collect:
            _collecting.begin(library)
        if _settings.is_shareable():
            _sharing.reduce_in_place()


def _refuse_late() -> None:
    if _installed is not None:
        raise RuntimeError("cuvmm is already PyTorch's allocator")
    if torch.version.cuda is None:
        raise RuntimeError("cuvmm cannot be installed: this PyTorch was built without CUDA")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "cuvmm cannot be installed: PyTorch has started CUDA. Call cuvmm.torch.install()"
            " before the first tensor on a GPU"
        )
    if torch.cuda.memory._get_current_allocator().allocator() is not None:
        raise RuntimeError("cuvmm cannot be installed: PyTorch has another allocator already")


def pluggable(library: _library.Library, malloc: str, free: str) -> Any:
    """Returns PyTorch's object for two functions of the library."""
    return torch.cuda.memory.CUDAPluggableAllocator(library.file, malloc, free)
