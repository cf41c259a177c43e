"""The shared library: finding it, loading it, and the types of its functions.

The library is loaded once for each process, when it is first needed. `CUVMM_LIBRARY` names another
file than the one in the package.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import threading
from typing import Any

# Without the enumerations of `signal`, whose lookups take ten times as long as the calls.
import _signal

from ._errors import Error, NotPublishedError, OutOfMemoryError

_int, _size, _text, _pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_void_p
_number, _result, _u32 = ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint32

# What a function returns that has failed for a reason of its own class.
_CLASSES: dict[int, type[Error]] = {-3: OutOfMemoryError, -4: NotPublishedError}

# The functions that this package calls: the type of the result, and those of the arguments.
_TYPES: dict[str, tuple[Any, list[Any]]] = {
    "cuvmm_try_malloc": (_pointer, [ctypes.c_ssize_t, _int, _pointer]),
    "cuvmm_collecting_malloc": (_pointer, [ctypes.c_ssize_t, _int, _pointer, _pointer]),
    "cuvmm_free": (None, [_pointer, ctypes.c_ssize_t, _int, _pointer]),
    "cuvmm_try_record_stream": (_int, [_pointer, _pointer]),
    "cuvmm_reset": (None, []),
    "cuvmm_write": (_int, [_int, _number, _pointer, _size, _pointer]),
    "cuvmm_read": (_int, [_int, _pointer, _number, _size, _pointer]),
    "cuvmm_set_collector": (None, [_pointer]),
    "cuvmm_set_observer": (None, [_pointer]),
    "cuvmm_history_begin": (_int, [_number, _int, _int, _pointer]),
    "cuvmm_history_end": (None, []),
    "cuvmm_history": (_size, [_int, _text, _size]),
    "cuvmm_profile": (_int, []),
    "cuvmm_stats": (_size, [_int, _text, _size]),
    "cuvmm_table": (_size, [_int, _text, _size]),
    "cuvmm_memory_stats": (_size, [_int, _text, _size]),
    "cuvmm_snapshot": (_size, [_int, _text, _size]),
    "cuvmm_last_error": (_size, [_text, _size]),
    "cuvmm_last_status": (_int, []),
    "cuvmm_version": (_text, []),
    "cuvmm_configure": (_int, [_text]),
    "cuvmm_memory_fraction": (None, [ctypes.c_double, _int]),
    "cuvmm_get_memory_fraction": (ctypes.c_double, [_int]),
    "cuvmm_reset_peak_stats": (None, [_int]),
    "cuvmm_reset_accumulated_stats": (None, [_int]),
    "cuvmm_mem_get_info": (_int, [_int, _result, _result]),
    "cuvmm_access": (_int, [_pointer, _int]),
    "cuvmm_tag_begin": (_int, [_text, _result]),
    "cuvmm_tag_end": (None, [_number]),
    "cuvmm_graphs_begin": (_int, [_text, _int, _result]),
    "cuvmm_synchronize": (_int, [_int, _pointer]),
    "cuvmm_settle": (_int, [_int, _pointer]),
    "cuvmm_stream_end": (_int, [_pointer, _int]),
    "cuvmm_asleep": (_size, [_text, _size]),
    "cuvmm_sleep": (_int, [_text, _int]),
    "cuvmm_sleep_each": (_int, [_text]),
    "cuvmm_read_kept": (_int, [_pointer, _size, _pointer]),
    "cuvmm_wake": (_int, [_text]),
    "cuvmm_sleep_within": (_int, [_text, _int, ctypes.c_double]),
    "cuvmm_wake_within": (_int, [_text, ctypes.c_double]),
    "cuvmm_keep": (_int, [_pointer, _number, _result]),
    "cuvmm_keep_end": (None, [_number]),
    "cuvmm_tag_of": (_size, [_pointer, _text, _size]),
    "cuvmm_extents": (_size, [_pointer, _number, _int, _text, _size]),
    "cuvmm_trim": (_int, [_int, _result]),
    "cuvmm_exchange": (_int, [_text, _text, _int]),
    "cuvmm_host_prepare": (_int, [_text]),
    "cuvmm_host_release": (_int, [_text, _result]),
    "cuvmm_host_limit": (None, [_number]),
    "cuvmm_group_join": (_int, [_text, _result]),
    "cuvmm_group": (_size, [_number, _text, _size]),
    "cuvmm_group_sleep": (_int, [_number, _text, _int, _number]),
    "cuvmm_group_wake": (_int, [_number, _text, _number]),
    "cuvmm_group_leave": (None, [_number]),
    "cuvmm_paged_new": (_int, [_text, _result]),
    "cuvmm_paged_end": (None, [_number]),
    "cuvmm_paged": (_size, [_number, _text, _size]),
    "cuvmm_paged_view": (_size, [_number, _u32, _u32, _u32, _text, _size]),
    "cuvmm_paged_stats": (_size, [_number, _text, _size]),
    "cuvmm_paged_back": (_int, [_number, _pointer, _size, _int, _pointer]),
    "cuvmm_paged_try_back": (_int, [_number, _pointer, _size, _int]),
    "cuvmm_paged_request": (_int, [_number, _pointer, _size, _int, _result]),
    "cuvmm_paged_request_done": (_int, [_number]),
    "cuvmm_paged_request_wait": (_int, [_number, ctypes.c_double]),
    "cuvmm_paged_request_take": (_int, [_number]),
    "cuvmm_paged_request_end": (_int, [_number]),
    "cuvmm_paged_reserve": (_int, [_number, _u32, _pointer]),
    "cuvmm_paged_release": (_int, [_number, _pointer, _size, _int]),
    "cuvmm_paged_step_begin": (_int, [_number, _result]),
    "cuvmm_paged_step_end": (None, [_number, _number]),
    "cuvmm_paged_can_allocate": (_int, [_number, _u32]),
    "cuvmm_paged_emptiest": (_int, [_number, _number, _pointer, _size, _int, _pointer, _pointer]),
    "cuvmm_paged_record": (_int, [_number, _pointer]),
    "cuvmm_paged_purge": (_int, [_number, _result]),
    "cuvmm_paged_on_pressure": (_int, [_number, _pointer]),
    "cuvmm_socket": (_size, [_text, _size]),
    "cuvmm_publish": (_int, [_text, _result]),
    "cuvmm_publication_keep": (_int, [_text, _text, _text, _result]),
    "cuvmm_withdraw": (_int, [_text, _text]),
    "cuvmm_keeper_begin": (_int, [_text, _text, _result]),
    "cuvmm_keeper_end": (None, [_number]),
    "cuvmm_keeper_drop": (_int, [_text, _text]),
    "cuvmm_attach": (_int, [_text, _result]),
    "cuvmm_attached": (_size, [_number, _text, _size]),
    "cuvmm_newer": (_int, [_number, _number, _result]),
    "cuvmm_detach": (_int, [_number]),
    "cuvmm_detach_later": (_int, [_number]),
    "cuvmm_tag_shareable": (_int, [_text]),
    "cuvmm_offer": (_int, [_pointer, _number, _result]),
    "cuvmm_offered": (_size, [_number, _text, _size]),
    "cuvmm_offer_handles": (_int, [_number, ctypes.POINTER(_int), _size]),
    "cuvmm_offer_end": (None, [_number]),
    "cuvmm_receive": (_int, [_text, ctypes.POINTER(_int), _size, _int, _result]),
}


#: Held while garbage is collected. A thread that lacks memory meanwhile waits for what that frees: Python's
#: collector does nothing while another thread collects.
_collecting = threading.Lock()
#: The most seconds that it waits: a finalizer may wait for that thread.
PATIENCE = 5.0


@ctypes.CFUNCTYPE(None)
def _collect() -> None:
    """Collects garbage. Takes the interpreter's lock, which the thread that allocates may have or not.

    The library calls it from within itself on no thread, as where a finalizer allocates.
    """
    if _collecting.acquire(timeout=PATIENCE):
        try:
            gc.collect()
        finally:
            _collecting.release()


#: The address of the function that collects garbage.
COLLECT = ctypes.cast(_collect, _pointer)


def interrupted_later(function: Any, *arguments: Any) -> Any:
    """Calls a function of the library that may wait, and then call functions of Python. Ctrl-C raises KeyboardInterrupt
    when it has returned.

    Raised within a function that the library calls it would be lost: ctypes prints what these raise. A handler of
    the program's own, such as that of asyncio, stays.
    """
    of, usual = _signal.SIGINT, _signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or _signal.getsignal(of) is not usual:
        return function(*arguments)
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        came.append(number)

    _signal.signal(of, note)
    try:
        return function(*arguments)
    finally:
        # A hook may have set another one.
        if _signal.getsignal(of) is note:
            _signal.signal(of, usual)
        if came:
            raise KeyboardInterrupt


def path() -> str:
    """Returns the path of the shared library.

    PyTorch's `CUDAPluggableAllocator` takes it, for programs that set up the allocator by hand.

    >>> torch.cuda.memory.CUDAPluggableAllocator(  # doctest: +SKIP
    ...     cuvmm.library_path(), "cuvmm_malloc", "cuvmm_free")
    """
    chosen = os.environ.get("CUVMM_LIBRARY")
    if chosen:
        return os.path.abspath(chosen)
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "libcuvmm_torch.so")


class Library:
    """The loaded library."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._ends = False
        try:
            self._loaded = ctypes.CDLL(file)
        except OSError as error:
            # The loader's text begins with the path, except where the file is damaged.
            reason = str(error)
            text = reason if reason.startswith(file) else f"{file}: {reason}"
            raise Error(f"cannot load {text}") from error

    def __getattr__(self, name: str) -> Any:
        """Returns a function by its name without the prefix."""
        full = "cuvmm_" + name
        if full not in _TYPES:
            raise AttributeError(name)
        result, arguments = _TYPES[full]
        function = self._found(full)
        function.restype, function.argtypes = result, arguments
        setattr(self, name, function)
        return function

    def _found(self, name: str) -> Any:
        try:
            return getattr(self._loaded, name)
        except AttributeError:
            raise Error(f"{self.file} has no {name}: it is of another version") from None

    def address(self, name: str) -> int:
        """Returns the address of a function, for PyTorch."""
        return ctypes.cast(self._found(name), ctypes.c_void_p).value or 0

    def text(self, name: str, *arguments: Any) -> str:
        """Returns the text that a function writes. Asks again if the text has grown meanwhile."""
        function, needed = getattr(self, name), 1 << 12
        while True:
            buffer = ctypes.create_string_buffer(needed)
            found = function(*arguments, buffer, needed)
            if found <= needed:
                return buffer.value.decode(errors="replace") if found else ""
            # The figures of a busy process can grow between two calls.
            needed = found + (found >> 3)

    def required(self, name: str, *arguments: Any) -> str:
        """Returns the text that a function writes, or raises the library's last error."""
        text = self.text(name, *arguments)
        if not text:
            raise Error(self.reason())
        return text

    def figures(self, name: str, device: int) -> dict[str, Any]:
        """Returns the figures that a function writes as JSON; empty if the device has none yet."""
        text = self.text(name, device)
        return json.loads(text) if text else {}

    def allocate(self, size: int, device: int, stream: int) -> int:
        """Allocates memory; returns 0 if that fails.

        If memory is short, garbage is collected once: arrays in reference cycles keep theirs until then.
        """
        self.end_calls_at_exit()
        return self.collecting_malloc(size, device, stream, COLLECT) or 0

    def end_calls_at_exit(self) -> None:
        """Ends the library's calls of Python before the interpreter ends: a thread that asked for its lock later would
        end in the middle of its work."""
        if not self._ends:
            self._ends = True
            atexit.register(self.set_collector, None)

    def reason(self) -> str:
        """Returns why the last call of this thread failed."""
        return self.text("last_error") or "the library gave no reason"

    def failure(self, doing: str) -> Error:
        """Returns the exception for the last error of this thread, with what was being done."""
        return _CLASSES.get(self.last_status(), Error)(f"{doing}: {self.reason()}")

    def check(self, code: int) -> None:
        """Raises the library's last error if a function failed."""
        if code < 0:
            raise _CLASSES.get(code, Error)(self.reason())

    def headroom(self, device: int) -> tuple[int, int]:
        """Returns what this process could still allocate on a device, and its limit there."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self.check(self.mem_get_info(device, ctypes.byref(free), ctypes.byref(total)))
        return free.value, total.value

    def number(self, name: str, *arguments: Any) -> int:
        """Returns the number that a function writes, or raises the library's last error."""
        result = ctypes.c_uint64()
        self.check(getattr(self, name)(*arguments, ctypes.byref(result)))
        return result.value


_library: Library | None = None


def get() -> Library:
    """Returns the library, which is loaded now if it was not."""
    global _library
    if _library is None:
        # Two threads may both load it: it is one file, and a lock here could be held by a thread whose
        # garbage collector then ends an array.
        _library = Library(path())
    return _library
