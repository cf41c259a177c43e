"""Snapshots in the structure that PyTorch's memory viewer opens.

Live allocations that lie side by side are a segment. Free memory of the heap has no lasting address,
because it can be mapped at several: it is one segment for each device, at an address that nothing
has. The sizes of a device's segments add up to what it holds.
"""

from __future__ import annotations

from typing import Any

from ._traces import Trace

#: The small pool of PyTorch's own allocator has allocations up to this.
SMALL = 1 << 20

Figures = dict[str, Any]


def make(
    devices: list[Figures],
    pool: tuple[int, int] | None = None,
    histories: list[Figures] | None = None,
) -> dict[str, Any]:
    """Returns a snapshot of all devices, of whose figures the place is the ordinal.

    pool: the id of the pool to show, without traces, or None for all memory. histories: what was
    recorded of each device, if anything, at a moment behind the figures.
    """
    segments: list[dict[str, Any]] = []
    traces: list[list[dict[str, Any]]] = []
    for device, figures in enumerate(devices):
        trace = Trace(histories[device] if histories else {})
        live = trace.settle([_block(it) for it in figures.get("allocations", ())])
        shown = [it for it in live if pool is None or it["pool"] == pool]
        segments += _segments(device, shown, trace)
        size = sum(it["size"] for it in live)
        free = max(int(figures.get("held", 0)) - size, 0) if pool is None else 0
        beyond = _beyond(live, trace)
        if free > 0:
            segments.append(_segment(device, beyond, [_free(free)], 0, (0, 0)))
        traces.append(trace.entries(size, free, beyond) if pool is None else [])
    return {
        "segments": segments,
        # The viewer wants a list for each device, also where nothing was recorded.
        "device_traces": traces,
        "external_annotations": [],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "expandable_segments": False,
            "allocator": "cuvmm",
        },
    }


def _block(found: Figures) -> dict[str, Any]:
    size = int(found["size"])
    requested = int(found.get("requested") or size)
    return {
        "address": int(found["address"]),
        "size": max(size, requested),
        "requested_size": requested,
        "stream": int(found.get("stream") or 0),
        "pool": _pool_of(found.get("pool")),
    }


def _pool_of(found: Any) -> tuple[int, int]:
    if isinstance(found, (list, tuple)) and len(found) == 2:
        return (int(found[0]), int(found[1]))
    return (0, 0)


def _segments(device: int, blocks: list[dict[str, Any]], trace: Trace) -> list[dict[str, Any]]:
    """Joins blocks that lie side by side and have the same stream, pool and kind of size."""
    segments: list[dict[str, Any]] = []
    run: list[dict[str, Any]] = []
    for block in sorted(blocks, key=lambda block: block["address"]):
        if run and not _joins(run[-1], block):
            segments.append(_closed(device, run, trace))
            run = []
        run.append(block)
    if run:
        segments.append(_closed(device, run, trace))
    return segments


def _joins(last: dict[str, Any], block: dict[str, Any]) -> bool:
    alike = all(last[key] == block[key] for key in ("stream", "pool"))
    sizes = (last["size"] <= SMALL) == (block["size"] <= SMALL)
    return alike and sizes and last["address"] + last["size"] == block["address"]


def _closed(device: int, run: list[dict[str, Any]], trace: Trace) -> dict[str, Any]:
    blocks = [
        {
            "address": block["address"],
            "size": block["size"],
            "requested_size": block["requested_size"],
            "state": "active_allocated",
            "frames": trace.frames(block["address"]),
        }
        for block in run
    ]
    return _segment(device, run[0]["address"], blocks, run[0]["stream"], run[0]["pool"])


def _free(size: int) -> dict[str, Any]:
    return {"address": 0, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


def _beyond(live: list[dict[str, Any]], trace: Trace) -> int:
    """Returns an address behind all allocations, so that no two segments overlap."""
    end = max((block["address"] + block["size"] for block in live), default=0)
    end = max(end, trace.addresses())
    return (end >> 40 << 40) + (1 << 40)


def _segment(
    device: int, address: int, blocks: list[dict[str, Any]], stream: int, pool: tuple[int, int]
) -> dict[str, Any]:
    active = [block for block in blocks if block["state"] != "inactive"]
    for block in blocks:
        block["address"] = block["address"] or address
    return {
        "device": device,
        "address": address,
        "total_size": sum(block["size"] for block in blocks),
        "allocated_size": sum(block["size"] for block in active),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": stream,
        "segment_type": "small" if blocks[0]["size"] <= SMALL else "large",
        "segment_pool_id": pool,
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
