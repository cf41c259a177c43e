"""Memory of pools that is kept when the rest is discarded, and memory that pools give back."""

from __future__ import annotations

import sys
import weakref
from typing import Any, TypeVar

from . import _library
from ._errors import Error
from ._sleeping import _figures, _native_torch, _torch, check_name

_Tensor = TypeVar("_Tensor")

# The marks by the address of the storage: the library's number, and what ends the mark with the storage.
_marks: dict[int, tuple[int, weakref.finalize]] = {}


def keep(tensor: _Tensor, kept: bool = True) -> _Tensor:
    """Marks a tensor of a pool: a sleep that discards contents keeps this tensor's.

    tensor: a tensor whose memory was allocated in a pool. The mark is that of its storage: all of it is kept
        with a view.
    kept: False ends the mark.

    The mark lasts until the storage's memory is freed, over any number of sleeps. Marked contents take host
    memory, in whole parts of 2 MiB for each block of the pool. `cuvmm.stats().kept` says how many bytes
    are marked. A tensor without bytes has nothing to keep, and gets no mark.

    Returns the tensor.

    >>> with cuvmm.torch.pool("weights"):  # doctest: +SKIP
    ...     model = Model().cuda()
    >>> for name in cuvmm.torch.lost_buffers(model, "weights"):  # doctest: +SKIP
    ...     cuvmm.keep(model.get_buffer(name))
    >>> cuvmm.sleep("weights", keep=False)  # doctest: +SKIP

    Raises `cuvmm.Error` if the memory is of no pool, or the pool sleeps, and TypeError for what is no tensor.
    """
    storage = _storage(tensor)
    address, size = storage.data_ptr(), storage.nbytes()
    if is_kept(tensor):
        if not kept:
            _marks[address][1]()
        return tensor
    if kept and size > 0:
        if storage is not _storage(tensor):
            raise Error("this PyTorch does not say when a storage ends: keep needs PyTorch 2.1 or newer")
        token = _library.get().number("keep", address, size)
        ends = weakref.finalize(storage, _end, address, token)
        ends.atexit = False
        _marks[address] = token, ends
    return tensor


def is_kept(tensor: Any) -> bool:
    """Returns True if a tensor's storage is marked."""
    storage = _storage(tensor)
    _, ends = _marks.get(storage.data_ptr(), (0, None))
    alive = ends.peek() if ends is not None else None
    # A storage that has ended may be here still while another one has its memory.
    return alive is not None and alive[0] is storage


def _storage(tensor: Any) -> Any:
    try:
        return tensor.untyped_storage()
    except AttributeError:
        raise TypeError(f"a tensor of PyTorch is kept, and not {type(tensor).__name__}") from None


def _end(address: int, token: int) -> None:
    _library.get().keep_end(token)
    if _marks.get(address, (0,))[0] == token:
        del _marks[address]


def trim(name: str) -> int:
    """Gives what is free in a pool back to the driver, and what else is free here on its devices.

    name: the name of the pool (its tag). It may sleep.

    Without `cuvmm.torch.install`, PyTorch keeps a pool's segments when their tensors are gone, and neither joins
    nor frees them when a tensor does not fit. This drops PyTorch's pool, and the next block takes a new one with
    the same name: segments without tensors go back now, and tensors that live keep theirs. A segment that is
    partly in use goes back with the first `trim` of the pool, or `torch.cuda.empty_cache`, after all its tensors
    are gone; if there is one, PyTorch's own free memory goes back too. Waits for the work of the devices.

    Returns the bytes that the driver got back.

    >>> cuvmm.trim("activations")  # doctest: +SKIP
    2147483648

    Do not call it while another thread captures a graph or uses a `torch.cuda.MemPool` of its own: PyTorch ends
    the process if a pool is dropped then.

    Raises `cuvmm.Error` if no pool has the name, another thread is inside of a pool of the device, the current
    stream captures a graph, or PyTorch is older than 2.8.
    """
    check_name(name)
    torch = _torch()
    if torch is not None and torch.cuda.is_current_stream_capturing():
        raise Error("a graph is captured, which giving memory back would break: call this before or after it")
    pools = sys.modules.get("cuvmm.torch._pools") if _native_torch() is not None else None
    entered: set[int] = pools.devices(name) if pools is not None else set()
    known = {device for device, found in _figures().items() if name in [it["name"] for it in found["pools"]]}
    if not entered | known:
        raise Error(f"no memory was allocated under the tag {name!r}")
    for device in sorted(entered):
        assert pools is not None
        if not pools.give_back(name, device):
            raise Error(
                f"the pool {name!r} cannot be trimmed while another thread is inside of a pool of device {device}"
            )
        pools.give_back_left(name, device)
    return sum(_library.get().number("trim", device) for device in sorted(entered | known))
