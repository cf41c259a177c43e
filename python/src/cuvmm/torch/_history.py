"""PyTorch's recorder of allocations, its observers of shortages and its profiler, over the heap.

`torch.cuda.memory._record_memory_history`, `_dump_snapshot`, `torch.profiler.profile(profile_memory=True)`
and `torch._C._cuda_attach_out_of_memory_observer` work as with PyTorch's own allocator. The library
takes the stacks itself, by functions of Python's C interface, so that no Python code runs within an
allocation.
"""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Callable
from typing import Any

import torch

from .._library import Library
from ._replacing import replace

# The functions that `cuvmm_history_begin` takes, in its order.
_PYTHON = (
    "PyThreadState_GetUnchecked",
    "PyGILState_GetThisThreadState",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyGC_Disable",
    "PyGC_Enable",
    "PyErr_Fetch",
    "PyErr_Restore",
    "PyEval_GetFrame",
    "PyFrame_GetBack",
    "PyFrame_GetCode",
    "PyFrame_GetLineNumber",
    "PyObject_GetAttrString",
    "PyUnicode_AsUTF8",
    "Py_IncRef",
    "Py_DecRef",
)
#: The names of functions before Python 3.13.
_EARLIER = {"PyThreadState_GetUnchecked": "_PyThreadState_UncheckedGet"}

#: What an observer of shortages gets: device, bytes of the request, limit, bytes free on the device.
Observer = Callable[[int, int, int, int], object]

_MOST = (1 << 63) - 1
_observers: list[Observer] = []


def _interpreter() -> Any:
    """Returns the addresses of the functions of Python that take stacks."""
    python = ctypes.pythonapi
    found = [getattr(python, name, None) or getattr(python, _EARLIER[name]) for name in _PYTHON]
    addresses = [ctypes.cast(it, ctypes.c_void_p) for it in found]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _chosen(name: str, value: str | None, *known: str | None) -> None:
    if value not in known:
        raise RuntimeError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, known))}")


def replace_recorder(library: Library) -> None:
    """Makes PyTorch's recorder, observers and profiler see the heap's allocations."""
    interpreter = _interpreter()

    def record(
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = _MOST,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        # Without its segments the viewer cannot place what is live, so all actions stay.
        skip_actions: Any = (),
    ) -> None:
        _chosen("enabled", enabled, None, "state", "all")
        _chosen("context", context, None, "state", "alloc", "all")
        _chosen("stacks", stacks, "python", "all")
        if enabled is None:
            library.history_end()
            return
        level = {None: 0, "state": 1, "alloc": 1, "all": 2}[context]
        most = min(max_entries, _MOST) if enabled == "all" else 0
        library.check(library.history_begin(most, level, int(clear_history), interpreter))

    def record_as_before(
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        record_context_cpp: bool = False,
        clear_history: bool = False,
        *_: Any,
    ) -> None:
        context = "alloc" if trace_alloc_record_context else "state" if record_context else None
        record("all" if enabled else None, context, "all", trace_alloc_max_entries, clear_history)

    replace(torch._C, "_cuda_record_memory_history", record)
    replace(torch._C, "_cuda_record_memory_history_legacy", record_as_before)
    replace(torch._C, "_cuda_isHistoryEnabled", lambda: bool(library.text("history", 0)))

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
    def observe(device: int, size: int, limit: int, free: int) -> None:
        for observer in list(_observers):
            observer(device, size, limit, free)

    def attach(observer: Observer) -> None:
        if not callable(observer):
            raise TypeError(f"an out-of-memory observer is a function, not {observer!r}")
        _observers.append(observer)
        library.set_observer(ctypes.cast(observe, ctypes.c_void_p))

    replace(torch._C, "_cuda_attach_out_of_memory_observer", attach)
    # Called in this order, which is the reverse of theirs: nothing waits for the interpreter's lock at
    # its end, and no stack is taken after it.
    atexit.register(library.history_end)
    atexit.register(library.set_observer, None)
    library.end_calls_at_exit()
    library.profile()
