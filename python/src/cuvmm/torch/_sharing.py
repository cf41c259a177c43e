"""Tensors of shareable memory, sent to other processes in place.

What `torch.multiprocessing` pickles of such a tensor is a socket (`multiprocessing.reduction.DupFd`). Over
it the process that unpickles the tensor asks for descriptors of the memory, and maps it at addresses of its
own. The sender keeps the storage until that process has let go of it, because PyTorch's allocator would use
the bytes for another tensor. A thread of the sender looks after all these sockets.

A process that lets go waits for its work first, and says so. One that was killed does not: the end of its
socket means nothing, because its work may still run, and the sender waits for the end of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import secrets
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from multiprocessing import context, reduction
from typing import Any

import torch
import torch.multiprocessing

from .. import _library
from .._arrays import DeviceArray, SharedMemory
from .._attaching import AttachedMemory
from .._dtypes import dtype_of
from .._errors import Error

# The words of the process that gets the memory: it asks for descriptors, has the memory mapped already, or
# has let go of it. The library says the last.
_WANTED, _KNOWN, _LET_GO = b"W", b"K", b"L"
#: The most descriptors in one message: Linux allows no more.
_MOST = 253
#: The largest description, in bytes: a message is no longer.
_LONGEST = 1 << 17
#: The seconds that a process waits for descriptors.
_PATIENCE = 60.0
#: The seconds between two looks for a process that has no descriptor.
_LOOK = 1.0
#: The process, user and group of the writer of a message, as Linux says.
_WRITER = struct.Struct("3i")

_Reducer = Callable[[Any], Any]
#: The arguments of `_received`.
_Given = tuple[Any, str, int, int, int, bool]


class _Sent:
    """A storage that was sent, until the process that got it has let go of it."""

    def __init__(self, storage: Any, offer: int) -> None:
        self.offer = offer
        self._storage, self._writer = storage, 0
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        # The writer's number comes with each message.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def handle(self) -> Any:
        """Returns what is pickled for the other end of the socket."""
        spawning = context.get_spawning_popen()
        handle = reduction.DupFd(self._theirs.fileno())
        if spawning is None:
            # The handle has a copy.
            self._theirs.close()
        else:
            # The new process gets this descriptor, and says a word when it has it. If it never does, the
            # descriptor is closed with the object of the process.
            weakref.finalize(spawning, self._theirs.close).atexit = False
        return handle

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self) -> int | None:
        """Reads and answers a word. Returns None if there may be another one, and after the last one the number
        of the process to wait for, or 0."""
        try:
            word, beside = self._read()
        except BlockingIOError:
            return None
        except OSError:
            word, beside = b"", []
        self._theirs.close()
        if word not in (_KNOWN, _WANTED):
            return 0 if word == _LET_GO else self._writer
        for _, kind, data in beside:
            if kind == socket.SCM_CREDENTIALS:
                self._writer = _WRITER.unpack(data)[0]
        # A process that has no number here could not be waited for, so it gets nothing.
        if self._writer and word == _WANTED:
            try:
                self._give()
            except (OSError, Error):
                # The process then lets go, or has.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
        return None if self._writer else 0

    def _read(self) -> tuple[bytes, list[tuple[int, int, bytes]]]:
        # Linux reports once, and before the last words, that the process closed its end with an answer unread.
        with contextlib.suppress(ConnectionResetError):
            return self._socket.recvmsg(1, socket.CMSG_SPACE(_WRITER.size))[:2]
        return self._socket.recvmsg(1, socket.CMSG_SPACE(_WRITER.size))[:2]

    def _give(self) -> None:
        library = _library.get()
        offered = library.required("offered", self.offer)
        count = json.loads(offered)["handles"]
        handles = (ctypes.c_int * count)()
        library.check(library.offer_handles(self.offer, handles, count))
        try:
            self._socket.send(offered.encode())
            for first in range(0, count, _MOST):
                socket.send_fds(self._socket, [b"H"], handles[first : first + _MOST])
        finally:
            for handle in handles:
                os.close(handle)

    def close(self) -> None:
        """Closes the socket. What is asked on the other end fails."""
        self._socket.close()
        self._theirs.close()

    def end(self) -> None:
        """Lets go of the storage."""
        self.close()
        _library.get().offer_end(self.offer)
        self._storage = None


class _Senders:
    """All storages that were sent and not let go of, and the thread that waits for their sockets."""

    def __init__(self) -> None:
        #: The beginning of this process's names of offers, which no other process can guess.
        self.token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._sent: dict[int, _Sent] = {}
        # Storages whose process was killed, by a descriptor of the process or, if there is none, by its number.
        self._killed: dict[int, _Sent] = {}
        self._gone: list[tuple[int, _Sent]] = []
        self._thread: threading.Thread | None = None

    def add(self, sent: _Sent) -> None:
        with self._lock:
            self._sent[sent.fileno()] = sent
            self._poll.register(sent.fileno(), select.EPOLLIN)
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="cuvmm-sharing", daemon=True)
                # If the system refuses it, the next storage tries again.
                thread.start()
                self._thread = thread

    def remove(self, sent: _Sent) -> None:
        """Forgets a storage that was not sent."""
        with self._lock:
            self._sent.pop(sent.fileno(), None)
        sent.end()

    def count(self) -> int:
        """Returns the number of storages that are kept."""
        with self._lock:
            return len(self._sent) + len(self._killed) + len(self._gone)

    def forget(self) -> None:
        """Leaves all to the process that this one was forked from. The storages are neither used nor freed here."""
        for sent in self._sent.values():
            sent.close()
        _inherited.append(self)

    def _serve(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll(_LOOK if self._gone else None):
                self._look(descriptor)
            for process, sent in list(self._gone):
                if not _exists(process):
                    self._gone.remove((process, sent))
                    sent.end()

    def _look(self, descriptor: int) -> None:
        with self._lock:
            killed = self._killed.pop(descriptor, None)
            sent = self._sent.get(descriptor)
        if killed is not None:
            self._poll.unregister(descriptor)
            os.close(descriptor)
            killed.end()
            return
        if sent is None:
            return
        process = sent.answer()
        if process is None:
            return
        with self._lock:
            self._sent.pop(descriptor, None)
        self._poll.unregister(descriptor)
        if process == 0:
            sent.end()
            return
        # Its work may run until it is gone.
        try:
            watched = os.pidfd_open(process)
        except ProcessLookupError:
            sent.end()
        except OSError:
            with self._lock:
                self._gone.append((process, sent))
        else:
            with self._lock:
                self._killed[watched] = sent
            self._poll.register(watched, select.EPOLLIN)


def _exists(process: int) -> bool:
    """Returns True while a process has its number. Files of /proc may be those of other numbers, or hidden."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It is another user's.
        return True
    return True


_inherited: list[_Senders] = []
_senders: _Senders | None = None
#: Held while the reducers are registered, and while the senders are made.
_lock = threading.Lock()
#: The reducers that were registered before.
_before: dict[type, _Reducer] = {}


def _in_child() -> None:
    global _lock, _senders
    _lock = threading.Lock()
    if _senders is not None:
        _senders.forget()
        _senders = None


os.register_at_fork(after_in_child=_in_child)


def _all_senders() -> _Senders:
    global _senders
    with _lock:
        if _senders is None:
            _senders = _Senders()
        return _senders


def sent() -> int:
    """Returns the number of storages that this process has sent and keeps for other processes.

    >>> cuvmm.torch.sent()  # doctest: +SKIP
    0
    """
    return 0 if _senders is None else _senders.count()


class ReadOnly:
    """A tensor that another process gets for reading: see `read_only`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def read_only(tensor: torch.Tensor) -> ReadOnly:
    """Returns what is sent in place of a tensor of a shareable pool: the process that gets it has a tensor
    for reading.

    An operation that writes to that tensor is an illegal memory access, after which the process cannot use the
    device any more. The sender, and processes that get the tensor itself, write to the memory as before.

    >>> queue.put(cuvmm.torch.read_only(tensor))  # doctest: +SKIP

    Sending raises `cuvmm.Error` if the tensor's memory is not of a shareable pool.
    """
    return ReadOnly(tensor)


def make_shareable(name: str) -> None:
    """Makes a pool's memory shareable, and has tensors of such pools sent in place.

    Raises `cuvmm.Error` if the pool has or had memory that is not shareable.
    """
    library = _library.get()
    library.check(library.tag_shareable(name.encode()))
    reduce_in_place()


def reduce_in_place() -> None:
    """Has tensors of shareable memory sent in place."""
    with _lock:
        if _before:
            return
        known = reduction.ForkingPickler._extra_reducers
        ours: dict[type, _Reducer] = {
            torch.Tensor: _reduce_tensor,
            torch.nn.Parameter: _reduce_tensor,
            torch.UntypedStorage: _reduce_storage,
        }
        for kind, reducer in ours.items():
            _before[kind] = known[kind]
            reduction.ForkingPickler.register(kind, reducer)
        reduction.ForkingPickler.register(ReadOnly, _reduce_read_only)


def _reduce_tensor(tensor: Any) -> Any:
    return _in_place(tensor, False) or _before[type(tensor)](tensor)


def _reduce_storage(storage: Any) -> Any:
    given = _given(storage, False) if storage.device.type == "cuda" else None
    return _before[type(storage)](storage) if given is None else (_rebuild_storage, given)


def _reduce_read_only(wrapped: ReadOnly) -> Any:
    reduced = _in_place(wrapped.tensor, True)
    if reduced is None:
        raise Error("the tensor's memory is not shareable: cuvmm.torch.pool(name, shareable=True)")
    return reduced


def _in_place(tensor: Any, read_only: bool) -> Any:
    """Returns how a tensor of a shareable pool is pickled, or None for other tensors."""
    if tensor.device.type != "cuda" or tensor.layout != torch.strided or tensor.is_nested:
        return None
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.has_names():
        return None
    if tensor.requires_grad and not tensor.is_leaf:
        # The reducer of PyTorch says so too, for tensors of all memory.
        raise RuntimeError("a tensor that is no leaf and requires a gradient is not sent: send tensor.detach()")
    given = _given(tensor.untyped_storage(), read_only)
    if given is None:
        return None
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    elements = (tensor.dtype, tensor.element_size(), shape, strides, tensor.storage_offset())
    return _rebuild_tensor, (type(tensor), given, elements, tensor.requires_grad)


def _given(storage: Any, read_only: bool) -> _Given | None:
    """Offers a storage to the process that gets the result. Returns None for other memory than pools'."""
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if nbytes == 0:
        return None
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise Error("a graph is captured: send tensors before or after it")
    library, number = _library.get(), ctypes.c_uint64()
    code = library.offer(address, nbytes, ctypes.byref(number))
    library.check(code)
    if code == 1:
        return None
    try:
        sent = _Sent(storage, number.value)
    except BaseException:
        library.offer_end(number.value)
        raise
    senders = _all_senders()
    try:
        there = json.loads(library.required("offered", sent.offer))
        handle = sent.handle()
        senders.add(sent)
    except BaseException:
        senders.remove(sent)
        raise
    key = f"{senders.token}-{sent.offer}"
    return handle, key, there["device"], address - there["address"], nbytes, read_only


def _received(
    handle: Any, key: str, device: int, offset: int, nbytes: int, read_only: bool
) -> DeviceArray:
    """Maps memory that another process gives, and returns its bytes."""
    try:
        giver = socket.socket(fileno=handle.detach())
    except (OSError, EOFError, RuntimeError) as error:
        # `multiprocessing` has a RuntimeError for a descriptor that the system did not pass on.
        _refuse_full(error)
        raise Error(f"the process that sent a tensor has ended, or it was received before: {error}") from error
    with giver:
        giver.settimeout(_PATIENCE)
        request = {"key": key, "device": device, "offset": offset, "size": nbytes, "read_only": read_only}
        try:
            number = _attached(request, None, [], giver)
            if number is None:
                number = _asked(request, giver)
            else:
                # Without a word the sender does not know whose work to wait for. It may be gone.
                with contextlib.suppress(OSError):
                    giver.send(_KNOWN)
        except BaseException:
            with contextlib.suppress(OSError):
                giver.send(_LET_GO)
            raise
    memory = AttachedMemory(number)
    there = json.loads(_library.get().required("attached", number))
    place = SharedMemory(there["address"] + offset, there["device"], memory)
    return DeviceArray(place, (nbytes,), dtype_of("uint8"))


def _refuse_full(error: BaseException) -> None:
    """Says so if a failure means that this process may open no more files."""
    if isinstance(error, RuntimeError) or (isinstance(error, OSError) and error.errno == errno.EMFILE):
        raise Error(
            "this process may open no more files, and each storage that another process sends takes one: raise the"
            " limit (RLIMIT_NOFILE), or send one large tensor and its views"
        ) from error


def _asked(request: dict[str, Any], giver: socket.socket) -> int:
    """Asks for descriptors, and attaches the memory."""
    handles: list[int] = []
    try:
        giver.send(_WANTED)
        offered = json.loads(giver.recv(_LONGEST) or b"null")
        if not isinstance(offered, dict):
            raise Error("the process that sent a tensor does not give its memory: it has ended, or has failed to")
        count, flags = offered["handles"], getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        while len(handles) < count:
            word, some, *_ = socket.recv_fds(giver, 1, min(_MOST, count - len(handles)), flags)
            handles += some
            if not word or not some:
                raise Error(
                    f"of {count} descriptors of a tensor {len(handles)} came: the process that sent it has ended,"
                    " or this one may open no more files (RLIMIT_NOFILE)"
                )
        number = _attached(request, offered["description"], handles, giver)
    except (OSError, ValueError, KeyError, TypeError) as error:
        _refuse_full(error)
        raise Error(f"the process that sent a tensor does not give its memory: {error!r}") from error
    finally:
        for handle in handles:
            os.close(handle)
    if number is None:
        raise Error("the process that sent a tensor does not describe its memory")
    return number


def _attached(
    request: dict[str, Any], description: str | None, handles: list[int], giver: socket.socket
) -> int | None:
    """Attaches memory. Returns the attachment's number, or None if there is no description, and it is not mapped."""
    library, number = _library.get(), ctypes.c_uint64()
    text = json.dumps({**request, "description": description}).encode()
    numbers = (ctypes.c_int * len(handles))(*handles)
    code = library.receive(text, numbers, len(handles), giver.fileno(), ctypes.byref(number))
    library.check(code)
    return None if code == 1 else number.value


def _rebuild_storage(*given: Any) -> Any:
    return torch.from_dlpack(_received(*given)).untyped_storage()


def _rebuild_tensor(kind: type, given: _Given, elements: tuple[Any, ...], requires_grad: bool) -> Any:
    dtype, itemsize, shape, strides, offset = elements
    array = _received(*given)
    steps = zip(shape, strides, strict=True)
    last = offset + sum((size - 1) * step for size, step in steps)
    if min((offset, *shape, *strides)) < 0 or (0 not in shape and (last + 1) * itemsize > array.nbytes):
        raise Error(f"a tensor of shape {shape} is said to be in {array.nbytes} bytes")
    whole = DeviceArray(array._memory, (array.nbytes - array.nbytes % itemsize,), dtype_of("uint8"))
    # DLPack has no name for some of PyTorch's types, so it gets the bytes.
    tensor = torch.from_dlpack(whole).view(dtype).as_strided(shape, strides, offset)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor.requires_grad = requires_grad
    return tensor
