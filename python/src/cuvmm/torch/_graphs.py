"""Memory of captured graphs that sleeps and wakes with a pool's name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._errors import Error
from .._sleeping import check, graphs_tag
from . import _install
from ._pools import keep_for_graphs, make_mem_pool, make_workspace
from ._replacing import replace


class _Entered:
    """A block of `graphs` that a thread is in, and the pool that its captures share, for each device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._handles: dict[int, tuple[int, int]] = {}
        # PyTorch's pools by device.
        self._mem_pools: dict[int, Any] = {}

    def handle(self, device: int) -> tuple[int, int]:
        """Returns the handle of the pool on a device, which is made if needed."""
        if device not in self._handles:
            if _install.is_installed():
                handle = _originals["graph_pool_handle"]()
            else:
                mem_pool = make_mem_pool("graphs", device)
                self._mem_pools[device] = mem_pool
                handle = mem_pool.id
            self._handles[device] = handle
            _owners[tuple(handle)] = self
        return self._handles[device]

    def end(self) -> None:
        for handle in self._handles.values():
            _owners.pop(tuple(handle), None)
        while self._mem_pools:
            keep_for_graphs(self.name, *self._mem_pools.popitem())


class _Thread(threading.local):
    """The blocks that a thread is in, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []


_thread = _Thread()
#: The blocks that have not ended, by the handles of their pools.
_owners: dict[tuple[int, ...], _Entered] = {}
#: PyTorch's functions, once they are replaced.
_originals: dict[str, Callable[..., Any]] = {}
_replacing = threading.Lock()


@contextlib.contextmanager
def graphs(name: str, keep: bool = True, device: Any = None) -> Iterator[tuple[int, int]]:
    """Puts the memory of graphs that the calling thread captures inside into the pool of that name.

    keep: True keeps the contents of that memory however the pool sleeps. False says that each graph writes
        what it reads, and that nothing else reads it before: the contents are never kept, and take no host
        memory.
    device: the device whose pool is returned; the current one by default. Captures on other devices inside
        have pools of their own under the name.

    `torch.cuda.graph`, `CUDAGraph.capture_begin` and `torch.cuda.make_graphed_callables` use the pool where no
    other one is named; `torch.cuda.graph_pool_handle` returns it. All captures inside share it, so one
    graph may use memory that another one's intermediate values had: replay them in turn, and keep what a graph
    returns while others are captured, as with every pool that graphs share. Enter it again for graphs that
    run at the same time: each block has a pool of its own.

    `cuvmm.sleep(name)` gives the memory up with that of `cuvmm.torch.pool(name)`, and `cuvmm.wake(name)` brings
    it back at its addresses, after which the graphs are replayed again. Do not replay them between. The memory
    lives as long as the graphs; without `install` it goes back with `cuvmm.trim(name)` once they are gone.

    What libraries keep is made before a capture where that can be known: cuBLAS' workspace of the stream that
    captures. README names the rest.

    Returns the handle of the pool, for `torch.cuda.graph(graph, pool=...)` inside of the block.

    >>> with cuvmm.torch.graphs("decode"):  # doctest: +SKIP
    ...     with torch.cuda.graph(graph):
    ...         result = model(inputs)
    >>> cuvmm.sleep("decode")  # doctest: +SKIP
    >>> cuvmm.wake("decode")  # doctest: +SKIP
    >>> graph.replay()  # doctest: +SKIP

    Raises `cuvmm.Error` if the pool's memory is asleep or the current stream captures a graph, ValueError for
    an empty name, and TypeError for another `keep` than True or False.
    """
    if not isinstance(keep, bool):
        raise TypeError(f"keep is True or False, not {keep!r}")
    check(name)
    torch.cuda.init()
    if torch.cuda.is_current_stream_capturing():
        raise Error(f"the graphs of {name!r} cannot begin while a graph is captured: enter them before the capture")
    _replace()
    ordinal = torch.cuda._utils._get_device_index(device, optional=True)
    entered, all_entered = _Entered(name), _thread.entered
    with graphs_tag(name, keep):
        all_entered.append(entered)
        try:
            yield entered.handle(ordinal)
        finally:
            all_entered.remove(entered)
            entered.end()


def _innermost() -> _Entered | None:
    entered = _thread.entered
    return entered[-1] if entered else None


def _replace() -> None:
    """Makes PyTorch's captures ask for the pool of the block that their thread is in."""
    with _replacing:
        if _originals:
            return
        _originals["capture_begin"] = torch.cuda.CUDAGraph.capture_begin
        _originals["graph_pool_handle"] = torch.cuda.graphs.graph_pool_handle
        replace(torch.cuda.CUDAGraph, "capture_begin", _capture_begin)
        for module in (torch.cuda.graphs, torch.cuda):
            replace(module, "graph_pool_handle", _graph_pool_handle)


def _capture_begin(graph: Any, pool: Any = None, *arguments: Any, **named: Any) -> Any:
    entered = _innermost()
    if entered is not None and pool is None:
        pool = entered.handle(torch.cuda.current_device())
    owner = _owners.get(tuple(pool)) if isinstance(pool, tuple) else None
    if owner is not None and owner is not entered:
        raise Error(
            f"a graph is captured into the pool of cuvmm.torch.graphs({owner.name!r}) only by the thread that"
            " is in that block, and in no other one inside of it"
        )
    if entered is not None:
        make_workspace(torch.cuda.current_device())
    return _originals["capture_begin"](graph, pool, *arguments, **named)


def _graph_pool_handle() -> Any:
    entered = _innermost()
    if entered is None:
        return _originals["graph_pool_handle"]()
    return entered.handle(torch.cuda.current_device())
