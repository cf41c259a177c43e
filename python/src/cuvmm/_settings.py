"""Settings of the library, before its first allocation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any, Literal

from . import _library
from ._arrays import device_of
from ._sizes import bytes_of

#: The names that the library has for the values of `rdma`.
_RDMA: dict[bool | str, str] = {"auto": "auto", True: "on", False: "off"}

_is_shareable = False


def configure(
    limit: int | str | None = None,
    preset: str | None = None,
    tenant: str | None = None,
    ledger: str | os.PathLike[str] | None = None,
    ledger_limit: int | str | None = None,
    peers: Iterable[int] | None = None,
    aliases: bool | None = None,
    stream_waits: bool | None = None,
    rdma: bool | Literal["auto"] | None = None,
    shareable: bool | None = None,
    guarantee: int | str | None = None,
    priority: int | None = None,
) -> None:
    """Sets up the library, before it allocates on any device.

    `cuvmm.torch.install` and `cuvmm.cupy.install` take the same settings and call this. Call it
    yourself before `cuvmm.empty`, and before `cuvmm.torch.pool` without `install`. A setting that is
    None stays as an earlier call has set it.

    limit: the most that each device's heap and pools may hold, in bytes or as text such as
        "60GiB". By default, all memory but what libraries need. More than the device has is refused
        at the first allocation there, which starts the driver.
    preset: "tight", the default, holds little more than what is live; "fast" maps seldom and holds
        more.
    tenant: the name in messages and in the ledger.
    ledger: the directory of a ledger. Processes that name the same one share the device's memory.
    ledger_limit: the most that all processes of the ledger may have together. The first process
        sets it, and others name the same or none.
    guarantee: the memory that this process can always have of the ledger, in bytes or as text. It is charged at
        the first allocation on a device. If other processes have it, that waits for at most 60 s, while they give
        back what is idle and may not grow, and fails then. Above their guarantees, memory goes to the process that
        asks first.
    priority: a whole number, 0 by default. The process furthest above its guarantee gives memory first that
        another process of the ledger needs; of those equally far above, the one of the lowest priority.
    peers: the ordinals of devices that may read and write the memory of every other one, that of pools
        too, for copies between them in one process. Mapping memory takes many times as long then.
    aliases: False if memory must never be mapped at several addresses at once.
    stream_waits: False if a stream must never wait for another's work to use its memory.
    rdma: False, the default, makes ordinary memory. "auto" makes memory that network cards can read and write
        (GPUDirect RDMA) where the device has such memory: a granule is tried once for each device. True requires
        it, so that the first allocation on another device fails.
    shareable: True makes the heap's memory shareable with other processes, as that of
        `cuvmm.torch.pool(name, shareable=True)` is: tensors are sent and published in place. Memory of graphs is
        not. A process that gets a tensor gets the whole pieces of memory that it lies in (`cuvmm.extents`), with what
        else is there. The driver fixes this when it creates memory, which it may need longer for.

    >>> cuvmm.configure(limit="60GiB", ledger="/run/cuvmm", tenant="chat")  # doctest: +SKIP

    Raises TypeError or ValueError for a wrong setting, and `cuvmm.Error` if memory was allocated
    before, or for a setting of a ledger without its directory. Nothing is changed then.
    """
    settings: dict[str, Any] = {}
    if preset is not None:
        if preset not in ("tight", "fast"):
            raise ValueError(f"preset is 'tight' or 'fast', not {preset!r}")
        settings["preset"] = preset
    if limit is not None:
        settings["limit"] = bytes_of(limit)
    if tenant is not None:
        settings["tenant"] = _name_of(tenant)
    if ledger is not None:
        settings["ledger"] = os.fsdecode(ledger)
        if not settings["ledger"]:
            raise ValueError("ledger is a directory, and its path is empty")
    if ledger_limit is not None:
        settings["ledger_limit"] = bytes_of(ledger_limit)
    if guarantee is not None:
        settings["guarantee"] = 0 if guarantee == 0 else bytes_of(guarantee)
    if priority is not None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"priority is a whole number, not {priority!r}")
        if not -(1 << 31) <= priority < 1 << 31:
            raise ValueError(f"priority is a number of 32 bits, not {priority}")
        settings["priority"] = priority
    if peers is not None:
        settings["peers"] = _ordinals_of(peers)
    switches = {"aliases": aliases, "stream_waits": stream_waits, "shareable": shareable}
    for name, value in switches.items():
        if value is not None:
            if not isinstance(value, bool):
                raise TypeError(f"{name} is True or False, not {value!r}")
            settings[name] = value
    if rdma is not None:
        if not isinstance(rdma, (bool, str)) or rdma not in _RDMA:
            raise ValueError(f"rdma is 'auto', True or False, not {rdma!r}")
        settings["rdma"] = _RDMA[rdma]
    library = _library.get()
    library.check(library.configure(json.dumps(settings).encode()))
    global _is_shareable
    if shareable is not None:
        _is_shareable = shareable


def is_shareable() -> bool:
    """Returns True if the heap's memory is shareable with other processes."""
    return _is_shareable


def _ordinals_of(peers: object) -> list[int]:
    if not isinstance(peers, Iterable):
        raise TypeError(f"peers names several devices, such as [0, 1], not {peers!r}")
    ordinals = [device_of(peer) for peer in peers]
    if len(set(ordinals)) < len(ordinals):
        raise ValueError(f"peers names a device twice: {ordinals}")
    return ordinals


def _name_of(tenant: object) -> str:
    if not isinstance(tenant, str):
        raise TypeError(f"tenant is text, not {tenant!r}")
    if not tenant or not tenant.isprintable():
        raise ValueError(f"tenant is a name of characters that can be printed, not {tenant!r}")
    return tenant
