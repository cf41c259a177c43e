"""Traces of allocations in the structure that PyTorch's memory viewer opens, from the library's history.

The addresses of a live allocation are a segment of their own, which is mapped before it and unmapped
behind it. Free memory has no lasting address: a segment at an address that nothing has grows and
shrinks with it. So the sizes of all segments add up to what the device held, at each event.
"""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]
Entry = dict[str, Any]

_BEGINS, _ENDS = ("alloc", "wake"), ("free", "sleep")


class Trace:
    """The events of one device, and the stacks of what is live."""

    def __init__(self, history: Figures) -> None:
        self._stacks = [_frames(text) for text in history.get("stacks", ())]
        self._events = [
            (kind, *map(int, numbers), self._stacks[stack] if stack is not None else [])
            for kind, numbers, stack in history.get("events", ())
        ]
        self._live = {address: self._stacks[stack] for address, stack in history.get("live", ())}

    def frames(self, address: int) -> list[Entry]:
        """Returns the stack of a live allocation, or an empty list."""
        return self._live.get(address, [])

    def addresses(self) -> int:
        """Returns the end of all addresses that the events name."""
        ends = (at + size for kind, at, size, *_ in self._events if kind != "oom")
        return max(ends, default=0)

    def settle(self, blocks: list[Entry]) -> list[Entry]:
        """Returns the live allocations after the last event, from those just before.

        The library makes snapshots and histories at two moments. For addresses with events the history
        says which of them are live.
        """
        last = {event[1]: event for event in self._events if event[0] != "oom"}
        known = {block["address"]: block for block in blocks}
        settled = [block for block in blocks if block["address"] not in last]
        for kind, address, size, stream, *_ in last.values():
            if kind in _BEGINS:
                block = known.get(address)
                if block is None or block["size"] != size:
                    block = {
                        "address": address,
                        "size": size,
                        "requested_size": size,
                        "stream": stream,
                        "pool": (0, 0),
                    }
                settled.append(block)
        settled.sort(key=lambda block: block["address"])
        # What ended before its event could be kept shares no address with what came after it.
        apart: list[Entry] = []
        for block in settled:
            if not apart or apart[-1]["address"] + apart[-1]["size"] <= block["address"]:
                apart.append(block)
        return apart

    def entries(self, live: int, free: int, beyond: int) -> list[Entry]:
        """Returns the events as PyTorch's recorder has them, oldest first.

        live, free: the bytes that are live, and held beside them, after the last event. beyond: the
        address of the segment of free memory.
        """
        after = self._free_after(live)
        before = after[0] if after else free
        entries: list[Entry] = []
        for event, now in zip(self._events, after):
            entries += _entries(*event)
            entries += _change(beyond, before, now, event[5])
            before = now
        if self._events:
            entries += _change(beyond, before, free, self._events[-1][5])
        return entries

    def _free_after(self, live: int) -> list[int]:
        """Returns the bytes that were held and not live after each event."""
        after = []
        for kind, _, size, _, held, *_ in reversed(self._events):
            after.append(max(held - live, 0))
            live += size * ((kind in _ENDS) - (kind in _BEGINS))
        return after[::-1]


def _frames(text: str) -> list[Entry]:
    frames = []
    # A name may have other characters at which splitlines() begins a line.
    for line in filter(None, text.split("\n")):
        number, name, file = line.split("\t")
        frames.append({"name": name, "filename": file, "line": int(number)})
    return frames


def _entry(
    action: str, address: int, size: int, stream: int, time: int, frames: list[Entry]
) -> Entry:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": stream,
        "time_us": time,
        "frames": frames,
    }


def _entries(
    kind: str, address: int, size: int, stream: int, held: int, time: int, frames: list[Entry]
) -> list[Entry]:
    """Returns what one event of the library is for PyTorch. Memory that falls asleep counts as freed, and as
    allocated when it wakes."""
    if kind == "oom":
        short = _entry("oom", 0, size, stream, time, frames)
        return [{**short, "device_free": address}]
    actions: tuple[str, ...] = ()
    if kind in _BEGINS:
        actions = ("segment_map", "alloc")
    elif kind in _ENDS:
        actions = ("free_requested", "free_completed", "segment_unmap")
    return [_entry(action, address, size, stream, time, frames) for action in actions]


def _change(beyond: int, before: int, now: int, time: int) -> list[Entry]:
    """Returns the entry for a change of the free memory at its end."""
    if before == now:
        return []
    action = "segment_map" if now > before else "segment_unmap"
    first, end = min(before, now), max(before, now)
    return [_entry(action, beyond + first, end - first, 0, time, [])]
