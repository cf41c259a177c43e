"""The figures of a device's heap."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import _library
from ._arrays import device_of


@dataclasses.dataclass(frozen=True)
class Stats:
    """What the library has on a device: its heap, pools and graphs. All sizes are in bytes.

    `print(cuvmm.stats())` prints a table.
    """

    device: int
    #: The device's name; empty before the first allocation on it.
    name: str = ""
    #: The most that may be held. Under a limit that was set, published and shareable memory lower it.
    limit: int = 0
    #: Live allocations.
    allocations: int = 0
    #: The sizes of live allocations, as requested.
    live: int = 0
    peak_live: int = 0
    #: Memory that the driver gave.
    held: int = 0
    peak_held: int = 0
    #: The part of `held` that is free, and the part of it whose work may not be complete.
    free: int = 0
    pending_free: int = 0
    #: Mappings that were ever made, and allocations that joined memory of several places.
    mapped: int = 0
    stitches: int = 0
    #: Allocations that failed.
    failed: int = 0
    #: What `cuvmm.publish` has published, beside `held`.
    published: int = 0
    #: Allocations and paged caches of pools that sleep, which are in none of the figures above.
    sleeping: int = 0
    #: Host memory that is kept for the contents of pools.
    host: int = 0
    #: What `keep` has marked: a sleep that discards contents keeps it.
    kept: int = 0
    #: The part of `held` that the driver refused to take back. Nothing uses it, and the driver is asked
    #: again by `empty_cache`, by `sleep`, and when memory is short.
    quarantined: int = 0
    #: All that the library reports, with further figures: "pools" and "graphs" have theirs.
    all: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, hash=False)
    table: str = dataclasses.field(default="", repr=False, compare=False)

    def __str__(self) -> str:
        return self.table or f"device {self.device}: nothing was allocated yet"


_TOTAL = (
    "allocations",
    "live",
    "peak_live",
    "held",
    "peak_held",
    "free",
    "pending_free",
    "mapped",
    "stitches",
)


def stats(device: Any = 0) -> Stats:
    """Returns the figures of a device. Makes no driver call.

    device: an ordinal, "cuda:1", or a device of PyTorch or CuPy.

    >>> before = cuvmm.stats()  # doctest: +SKIP
    >>> print(before)  # doctest: +SKIP
    """
    library, device = _library.get(), device_of(device)
    figures = library.figures("stats", device)
    if not figures:
        return Stats(device)
    total = figures.get("total", {})
    return Stats(
        device=device,
        name=figures.get("name", ""),
        limit=figures.get("limit", 0),
        failed=figures.get("failed", 0),
        published=figures.get("published", 0),
        sleeping=figures.get("sleeping", 0),
        host=figures.get("host", 0),
        kept=figures.get("kept", 0),
        quarantined=figures.get("quarantined", 0),
        all=figures,
        table=library.text("table", device),
        **{name: total.get(name, 0) for name in _TOTAL},
    )


def empty_cache() -> None:
    """Gives free memory of the heap back to the driver, for other programs, where the work that used it
    is complete. `torch.cuda.empty_cache` does it too after `cuvmm.torch.install`.

    >>> cuvmm.empty_cache()  # doctest: +SKIP
    """
    _library.get().reset()
