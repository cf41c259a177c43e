"""Figures under PyTorch's names: statistics, snapshots, the memory fraction, free memory.

PyTorch's C functions for them refuse to work with an allocator that is not its own. They are looked
up when they are called, so replacing them here reaches everything in `torch.cuda`.
"""

from __future__ import annotations

from typing import Any

import torch

from .._library import Library
from . import _snapshot
from ._replacing import replace

_STAT_ARRAYS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_MEM_GET_INFO = """Returns what this process could still allocate on a device, and its limit there.

cuvmm reports its heap's headroom here. `torch.cuda.cudart().cudaMemGetInfo` reports the memory that
is free on the device.
"""
_POOLS = ("all", "small_pool", "large_pool")
_KINDS = ("current", "peak", "allocated", "freed")
_COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_device_alloc",
    "num_device_free",
    "num_sync_all_streams",
    "num_oom_rejections",
)


def _counts(found: Any) -> dict[str, int]:
    found = found if isinstance(found, dict) else {}
    return {kind: int(found.get(kind, 0)) for kind in _KINDS}


def nested(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns the library's figures with all keys that PyTorch has. Those that are absent are 0."""
    stats: dict[str, Any] = {name: int(figures.get(name, 0)) for name in _COUNTERS}
    # The heap has no split limit, and so no allocations above it.
    stats["max_split_size"] = -1
    for name in ("oversize_allocations", "oversize_segments"):
        stats[name] = _counts(figures.get(name))
    # Pools of PyTorch's own making. Those of this library are not among them.
    stats["reserved_bytes_by_private_pools"] = {}
    for name in _STAT_ARRAYS:
        found = figures.get(name) or {}
        stats[name] = {pool: _counts(found.get(pool)) for pool in _POOLS}
    return stats


def report(library: Library) -> None:
    """Makes PyTorch report the library's figures."""

    def memory_stats(device: int) -> dict[str, Any]:
        return nested(library.figures("memory_stats", device))

    def memory_snapshot(pool: Any = None) -> dict[str, Any]:
        count = torch.cuda.device_count()
        figures = [library.figures("snapshot", device) for device in range(count)]
        # Behind the snapshots: the history then has all that has changed since.
        histories = [library.figures("history", device) for device in range(count)]
        wanted = tuple(pool[:2]) if pool is not None else (0, 0)
        chosen = None if wanted == (0, 0) else wanted
        found = _snapshot.make(figures, chosen, histories)
        # Newer versions of PyTorch ask for a snapshot without traces too.
        if pool is not None and len(pool) > 2 and not pool[2]:
            found["device_traces"] = [[] for _ in figures]
        return found

    def accelerator_is_ready() -> bool:
        return torch.cuda.is_initialized()

    def empty_cache() -> None:
        torch._C._cuda_emptyCache()

    for name, function in (
        ("_cuda_memoryStats", memory_stats),
        ("_cuda_memorySnapshot", memory_snapshot),
        ("_cuda_resetPeakMemoryStats", library.reset_peak_stats),
        ("_cuda_resetAccumulatedMemoryStats", library.reset_accumulated_stats),
        ("_cuda_getMemoryFraction", library.get_memory_fraction),
        # `torch.accelerator` has functions of its own for the same figures. It asks first if an
        # allocator has started, and PyTorch says no for one that is not its own.
        ("_accelerator_isAllocatorInitialized", accelerator_is_ready),
        ("_accelerator_emptyCache", empty_cache),
        ("_accelerator_getDeviceStats", memory_stats),
        ("_accelerator_resetPeakStats", library.reset_peak_stats),
        ("_accelerator_resetAccumulatedStats", library.reset_accumulated_stats),
        ("_accelerator_getMemoryInfo", library.headroom),
    ):
        replace(torch._C, name, function)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        torch.cuda.init()
        if device is None:
            device = torch.cuda.current_device()
        return library.headroom(torch.cuda._utils._get_device_index(device, optional=True))

    replace(torch.cuda.memory, "mem_get_info", mem_get_info)
    torch.cuda.memory.mem_get_info.__doc__ = _MEM_GET_INFO
    torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info
