"""The interface of torch_memory_saver, over pools of cuvmm.

    from cuvmm.torch.memory_saver import torch_memory_saver

    with torch_memory_saver.region(tag="weights", enable_cpu_backup=True):
        model = Model().cuda()
    torch_memory_saver.pause("weights")
    torch_memory_saver.resume("weights")

For programs that import `torch_memory_saver` themselves, such as SGLang, put a folder with a file
`torch_memory_saver.py` first in `PYTHONPATH`, whose one line is
`from cuvmm.torch.memory_saver import *`.

It works with and without `cuvmm.torch.install`, and nothing is preloaded. A region of tag `weights`
is the pool `weights` of `cuvmm.torch.pool`, or `weights+backup` if its contents are kept, so one tag
may have both. README lists the differences.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .. import _library, _sleeping
from .._errors import Error
from . import _install, _pools

__all__ = [
    "TorchMemorySaver",
    "configure_subprocess",
    "cuda_graph",
    "disable",
    "get_cpu_backup",
    "pause",
    "region",
    "resume",
    "torch_memory_saver",
]

_DEFAULT = "default"
_MODES = ("preload", "torch")
_BACKENDS = ("pinned", "mmap")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")


class TorchMemorySaver:
    """The methods of torch_memory_saver's class of this name. A process has one, `torch_memory_saver`."""

    def __init__(self) -> None:
        # The tag of each pool, and True if its contents are kept.
        self._of: dict[str, tuple[str, bool]] = {}
        self._hook_mode = "preload"
        self._retains = _is_on("TMS_RETAIN_CPU_BACKUP")
        self._margin = 0
        # The handles of PyTorch's pools that captures share, and the graphs in them.
        self._captured: dict[Any, tuple[Any, weakref.WeakSet[Any]]] = {}
        # The limits of devices before the margin, as fractions of their memory.
        self._fractions: dict[int, float] = {}
        # The pool of what the main thread allocates outside of regions, if the program asks for one.
        self._rest: _Rest | None = None
        if _is_on("TMS_INIT_ENABLE"):
            self._rest = _Rest(self._pool(_DEFAULT, _is_on("TMS_INIT_ENABLE_CPU_BACKUP")))

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Allocates the CUDA tensors that the calling thread makes on the current device in a pool of the tag.

        enable_cpu_backup: True keeps the contents in host memory while the tag is paused; else they are lost.
        enable_disk_backup: not provided.
        cpu_backup_backend: "pinned" and "mmap" mean the same here: pages of the process that are pinned, and go
            back to the system if `retain_cpu_backup` is False.

        Raises `cuvmm.Error` if the tag is paused, NotImplementedError for a disk, and ValueError for another backend,
        or one without backup.
        """
        _check_backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        self._ensure_initialized()
        self._keep_margin()
        with _pools.pool(self._pool(tag, enable_cpu_backup)):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Captures a graph as `torch.cuda.graph` does, whose memory is of the tag.

        pool: captures with the same pool share memory, as with `torch.cuda.graph`, while one of their graphs lives.
            It names the group only: their memory comes from a pool of cuvmm.
        enable_cpu_backup: False discards what the graph's memory contains while the tag is paused, so replays must
            write before they read, as those of a forward pass do.

        Raises what `cuvmm.torch.graphs` and `torch.cuda.graph` raise, and ValueError as `region` does.
        """
        _check_backup(enable_cpu_backup, False, cpu_backup_backend)
        # It imports parts of PyTorch that programs without graphs do not need.
        from ._graphs import graphs

        self._ensure_initialized()
        name = self._pool(tag, enable_cpu_backup)
        with graphs(name, keep=enable_cpu_backup) as handle:
            users: weakref.WeakSet[Any] = weakref.WeakSet()
            if pool is not None:
                key = (name, pool, torch.cuda.current_device())
                # PyTorch's pool lives as long as a graph that was captured into it.
                if not self._captured.get(key, ((), ()))[1]:
                    self._captured[key] = (handle, users)
                handle, users = self._captured[key]
            with torch.cuda.graph(cuda_graph, pool=handle, stream=stream, capture_error_mode=capture_error_mode):
                yield
            users.add(cuda_graph)

    @contextlib.contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Iterator[None]:
        """Makes the calling thread's allocations ordinary ones of PyTorch, which no `pause` takes.

        What is free of their memory at the end goes back to the driver.
        """
        if not dispose_mem_pool_after_use:
            raise NotImplementedError("the memory of disable() is always given back: leave the argument out")
        if _install.is_installed():
            library = _library.get()
            token = library.number("tag_begin", b"")
            try:
                yield
            finally:
                library.tag_end(token)
                torch.cuda.empty_cache()
            return
        with _pools.ordinary(torch.cuda.current_device()):
            yield

    def pause(self, tag: str | None = None) -> None:
        """Gives up the device memory of a tag, or of all. Its tensors keep their addresses, and must not be used.

        Contents of regions with backup go to host memory, those of the others are lost; all of them pause, or
        none. Waits for the work that PyTorch has queued. A tag without memory is no error.

        Raises `cuvmm.Error` if what is named is paused already, and what `cuvmm.sleep` raises.
        """
        self._ensure_initialized()
        pools = self._existing(tag)
        awake = {name: int(keeps) for name, keeps in pools.items() if name not in _sleeping.asleep()}
        if not awake:
            _refuse(pools, tag, "paused", "resume")
            return
        library = _library.get()
        rest = self._rest if self._rest is not None and self._rest.name in awake else None
        if rest is not None:
            rest.leave()
        try:
            library.check(library.sleep_each(json.dumps(awake).encode()))
        except BaseException:
            self._ensure_initialized()
            raise

    def resume(self, tag: str | None = None) -> None:
        """Gives a tag, or all that are paused, their memory back at its addresses, with the contents if kept.

        Raises `cuvmm.Error` if what is named is not paused, and what `cuvmm.wake` raises.
        """
        pools = self._existing(tag)
        paused = sorted(pools.keys() & _sleeping.asleep())
        if not paused:
            _refuse(pools, tag, "not paused", "pause")
            return
        _sleeping.wake(paused)
        if not self._retains:
            # It fails only where a capture has begun on another thread. The memory is then kept.
            with contextlib.suppress(Error):
                _sleeping.release_host(paused)
        self._ensure_initialized()

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """Returns a tensor on the CPU with the contents of one that is paused, or None if that is not paused.

        x: a contiguous CUDA tensor.
        zero_copy: has no effect. The result is always a copy, because the contents lie in parts of 2 MiB.

        Raises `cuvmm.Error` if the contents were lost, and ValueError for another tensor.
        """
        if x.device.type != "cuda" or not x.is_contiguous():
            raise ValueError(f"a contiguous CUDA tensor is needed, and this one is on {x.device}: pass its base")
        size = x.numel() * x.element_size()
        if size == 0:
            return None
        copy = torch.empty(tuple(x.shape), dtype=x.dtype, device="cpu")
        library = _library.get()
        code = library.read_kept(x.data_ptr(), size, copy.data_ptr())
        library.check(code)
        return copy if code == 0 else None

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> str:
        """The mode that was set: "preload" or "torch". Both are the same here: nothing is preloaded."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if mode not in _MODES:
            raise ValueError(f"hook_mode is 'preload' or 'torch', not {mode!r}")
        self._hook_mode = mode
        self._ensure_initialized()

    @property
    def memory_margin_bytes(self) -> int:
        """The bytes of the device's memory that cuvmm leaves to others.

        It is a limit of all that cuvmm holds on the current device, and on those where regions are entered later.
        torch_memory_saver compares with what is free at each allocation instead.
        """
        return self._margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"a margin is a number of bytes, not {value!r}")
        self._ensure_initialized()
        before, self._margin = self._margin, value
        try:
            self._keep_margin()
        except BaseException:
            self._margin = before
            raise

    @property
    def retain_cpu_backup(self) -> bool:
        """True keeps the host memory of contents for the next `pause`, which is several times as fast then.

        The contents in it can be read while their tag is paused only. False gives it back in `resume`.
        """
        return self._retains

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retains = bool(value)

    def set_disk_backup_dir(self, path: str) -> None:
        """Raises NotImplementedError: contents are kept in host memory."""
        raise NotImplementedError(_DISK)

    #: torch_memory_saver's own state, which programs ask for only if it has some.
    _impl = None

    def _ensure_initialized(self) -> None:
        """Allocates what the main thread makes outside of regions in a pool, if `TMS_INIT_ENABLE` is set."""
        if self._rest is not None and self._rest.name not in _sleeping.asleep():
            self._rest.enter()

    def _pool(self, tag: str, keeps: bool) -> str:
        """Returns the name of a tag's pool."""
        if not isinstance(tag, str):
            raise TypeError(f"a tag is text, not {tag!r}")
        name = tag + "+backup" * bool(keeps)
        its = self._of.setdefault(name, (tag, bool(keeps)))
        if its != (tag, bool(keeps)):
            raise ValueError(f"the tag {tag!r} cannot be used: its pool {name!r} is that of the tag {its[0]!r}")
        return name

    def _existing(self, tag: str | None) -> dict[str, bool]:
        """Returns the pools of a tag, or of all, that have memory, and whether their contents are kept."""
        figures = _sleeping._figures().values()
        found = {it["name"] for device in figures for it in device["pools"]}
        pools = {name: of for name, of in self._of.items() if name in found}
        return {name: keeps for name, (its, keeps) in pools.items() if tag is None or its == tag}

    def _keep_margin(self) -> None:
        if not self._margin and not self._fractions:
            return
        library, device = _library.get(), torch.cuda.current_device()
        limit, fraction = library.headroom(device)[1], library.get_memory_fraction(device)
        before = self._fractions.get(device, fraction)
        wanted = min(before, 1 - self._margin * fraction / limit)
        if wanted < 0:
            raise ValueError(f"a margin of {self._margin} bytes is more than the memory of device {device}")
        if wanted != fraction:
            library.memory_fraction(wanted, device)
        self._fractions[device] = before


class _Rest:
    """The pool of what a thread allocates outside of regions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entered: Any = None
        self._thread = 0

    def enter(self) -> None:
        """Enters the pool on the calling thread, if no thread has."""
        if self._entered is None:
            entered = _pools.pool(self.name)
            entered.__enter__()
            self._entered, self._thread = entered, threading.get_ident()
            atexit.register(self.leave)

    def leave(self) -> None:
        """Leaves the pool, if the calling thread has entered it."""
        if self._entered is not None and self._thread == threading.get_ident():
            entered, self._entered = self._entered, None
            atexit.unregister(self.leave)
            entered.__exit__(None, None, None)


_DISK = (
    "contents are not kept on a disk: use enable_cpu_backup=True, which keeps them in host memory (cuvmm.limit_host"
    " limits it)"
)


def _check_backup(keeps: bool, on_disk: bool, backend: str | None) -> None:
    if on_disk:
        raise NotImplementedError(_DISK)
    if backend is not None and backend not in _BACKENDS:
        raise ValueError(f"cpu_backup_backend is 'pinned' or 'mmap', not {backend!r}")
    if backend is not None and not keeps:
        raise ValueError("cpu_backup_backend needs enable_cpu_backup=True")


def _refuse(pools: dict[str, bool], tag: str | None, state: str, call: str) -> None:
    """Raises if there are pools, which are all in a state."""
    if pools:
        name = "all tags are" if tag is None else f"the tag {tag!r} is"
        raise Error(f"{name} {state}: call {call}({'' if tag is None else repr(tag)}) first")


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Does nothing: torch_memory_saver sets `LD_PRELOAD` here, and cuvmm preloads nothing."""
    yield


#: The one of this process.
torch_memory_saver = TorchMemorySaver()

region = torch_memory_saver.region
cuda_graph = torch_memory_saver.cuda_graph
disable = torch_memory_saver.disable
pause = torch_memory_saver.pause
resume = torch_memory_saver.resume
get_cpu_backup = torch_memory_saver.get_cpu_backup
