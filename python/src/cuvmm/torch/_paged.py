"""Paged caches: keys and values by block numbers, with memory only under the blocks in use."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import operator
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from .. import _library
from .._arrays import DeviceArray, SharedMemory, stream_of
from .._dtypes import DType, dtype_of
from .._errors import Error
from .._sizes import bytes_of, text_of
from .._sleeping import check_name, seconds_of
from ._numbers import FreeNumbers, packed

Layout = Literal["block-major", "token-major", "layer-major"]

#: The caches whose hooks may be called, by the library's numbers.
_caches: weakref.WeakValueDictionary[int, PagedKv] = weakref.WeakValueDictionary()


class Part(NamedTuple):
    """What a layer keeps of each token, such as its keys."""

    heads: int
    head_size: int
    #: A dtype of PyTorch, or its name.
    dtype: Any


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers whose blocks have one shape.

    parts: what a layer keeps of each token, counted from 0: one part for MLA, keys and values, or these
        and their scales.

    A model with several kinds of layers, such as sliding windows beside full attention, has several groups. They
    share the block numbers: a block is of one group at a time, so the blocks of all groups have equal bytes.

    >>> latent = LayerGroup(60, 64, [Part(1, 576, "bfloat16")])
    >>> scaled = LayerGroup(32, 16, [Part(8, 128, "int8"), Part(8, 128, "int8"), Part(2, 8, "float32")])
    """

    layers: int
    #: The tokens of a block.
    tokens: int
    parts: Sequence[Part]

    @classmethod
    def keys_and_values(
        cls, layers: int, tokens: int, kv_heads: int, head_size: int, dtype: Any
    ) -> LayerGroup:
        """Returns a group with two equal parts: keys, part 0, and values, part 1.

        >>> LayerGroup.keys_and_values(32, 16, 8, 128, "bfloat16").parts[1].heads
        8
        """
        return cls(layers, tokens, (Part(kv_heads, head_size, dtype),) * 2)


class Evictions(NamedTuple):
    """Blocks to be evicted."""

    numbers: list[int]
    #: The bytes that come free once all of them are released.
    bytes: int


@dataclasses.dataclass(frozen=True)
class PagedStats:
    """Figures of a paged cache."""

    #: Block numbers.
    blocks: int
    #: Blocks in use, without pinned ones.
    in_use: int
    #: Blocks that are reserved and not in use.
    reserved: int
    #: Blocks that are always backed.
    pinned: int
    #: Blocks released by steps that are still being prepared.
    leaving: int
    #: Bytes of one block.
    block_bytes: int
    #: Bytes of memory that these blocks touch, and those that a request of `back_async` was granted and has not taken:
    #: nothing else gets them.
    committed: int
    #: The part of the committed bytes that only such requests have: it comes free if they are cancelled.
    granted: int
    #: Bytes that the cache gets when it wakes. It has no committed bytes while it sleeps.
    asleep: int
    #: Bytes of memory held: committed, and withdrawn but not taken yet.
    held: int
    #: Bytes of withdrawn memory, which others get once the work on it is complete.
    withdrawn: int
    #: The part of the withdrawn memory that was mapped ahead, and that no block has used yet.
    precommitted: int
    #: Mappings in use.
    mappings: int
    #: Bytes of addresses.
    reserved_addresses: int


class _Cache:
    """The library's cache. It ends with the last object that needs its memory."""

    def __init__(self, request: dict[str, Any]) -> None:
        library = _library.get()
        self.device, self.stream = request["device"], request["stream"]
        self.token = library.number("paged_new", json.dumps(request).encode())
        weakref.finalize(self, library.paged_end, self.token).atexit = False

    def record(self, stream: int) -> None:
        library = _library.get()
        library.check(library.paged_record(self.token, stream))


class _View(SharedMemory):
    """The memory of a tensor over all blocks."""

    is_writable = True

    def __init__(self, address: int, cache: _Cache) -> None:
        super().__init__(address, cache.device, cache)
        self._cache = cache

    def record(self, stream: int) -> None:
        """Notes that work of a stream uses blocks. Work of several streams on one block is for the engine to order."""
        self._cache.record(stream)

    hand_to = record


@ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_uint64)
def _pressed(token: int, missing: int) -> None:
    kv = _caches.get(token)
    # Another thread may close the cache meanwhile.
    if kv is not None and (hook := kv._on_pressure) is not None:
        hook(kv, missing)


#: The address of the function that calls hooks. It stays for the life of the process: a thread of the library may be
#: about to call it while a cache ends.
_PRESSED = ctypes.cast(_pressed, ctypes.c_void_p)


class BackRequest:
    """A request for blocks that stays in line while its caller goes on. Made by `PagedKv.back_async`.

    A scheduler asks `done` in each step. When it returns True, `result` puts the blocks in use, or raises the refusal;
    until then the memory that was granted, also at once, is the request's, and the cache does not fall asleep. A
    request that is gone without a result is cancelled. A task of asyncio calls `cancel` in a `finally`: the traceback of
    one that is cancelled keeps the request, and its memory.

    >>> request = kv.back_async(numbers)  # doctest: +SKIP
    >>> while not request.done():  # doctest: +SKIP
    ...     step()
    >>> request.result()  # doctest: +SKIP
    """

    def __init__(self, token: int) -> None:
        library = _library.get()
        self._token = token
        #: The outcome, once it is known.
        self._result: BaseException | None = None
        self._has_result = False
        #: Why it is being withdrawn.
        self._withdrawn: str | None = None
        self._end = weakref.finalize(self, library.paged_request_end, token)
        self._end.atexit = False

    def done(self) -> bool:
        """Returns True if the request was granted, refused or cancelled: then `result` does not wait.

        Takes no lock of the memory, and makes no driver call.
        """
        if self._has_result:
            return True
        library = _library.get()
        found = library.paged_request_done(self._token)
        library.check(found)
        return bool(found)

    def result(self, timeout: float | None = None) -> None:
        """Waits for the outcome. When it returns, the blocks are in use. A second call has the outcome of the first.

        timeout: the most seconds to wait; without a limit by default. With 0 it does not wait.

        Raises TimeoutError if the request still waits then: it stays in line. Raises `cuvmm.OutOfMemoryError` if there
        can be no memory, and `cuvmm.Error` if a block does not exist, the cache sleeps or is closed, or the request
        was cancelled. No block has changed then. In an `on_pressure` function, for which the request may wait, it
        raises `cuvmm.Error` where it would wait.
        """
        if not self._has_result:
            until = time.monotonic() + (math.inf if timeout is None else seconds_of(timeout))
            while not self._is_taken(until - time.monotonic()):
                if time.monotonic() >= until:
                    raise TimeoutError("the request for blocks still waits for memory")
        if self._result is not None:
            raise self._result

    def _is_taken(self, seconds: float) -> bool:
        """Takes the outcome once it is there. Does not wait so long that a signal of the program would wait for it."""
        library = _library.get()
        library.end_calls_at_exit()
        waited = library.paged_request_wait(self._token, min(max(seconds, 0.0), 0.25))
        if self._has_result:
            # Another thread has it, and the request may be ended.
            return True
        if self._withdrawn is None:
            library.check(waited)
        try:
            # After a signal of the program the blocks are not taken.
            taken = library.paged_request_take(self._token)
            library.check(taken)
        except Error as error:
            # Another thread may be withdrawing it.
            self._settle(error if self._withdrawn is None else Error(self._withdrawn))
            return True
        if taken:
            self._settle(None)
        return bool(taken)

    def cancel(self) -> None:
        """Withdraws the request, or gives back what it was granted. Does nothing if `result` returned or raised.

        Blocks that other calls backed stay in use.
        """
        self._withdraw("the request for blocks was cancelled")

    def _withdraw(self, reason: str) -> None:
        if not self._has_result:
            self._withdrawn = reason
            # Another thread may have taken the blocks.
            taken = _library.get().paged_request_end(self._token)
            self._settle(None if taken else Error(reason))

    def _settle(self, result: BaseException | None) -> None:
        # The request is ended after its outcome is here: the first outcome that a thread has is the one for all.
        if not self._has_result:
            self._result, self._has_result = result, True
        self._end()

    def __repr__(self) -> str:
        return f"<cuvmm.torch.BackRequest {self._token}{' done' if self._has_result else ''}>"


class PagedKv:
    """A cache of keys and values that kernels address by block numbers. Made by `paged_kv`.

    Kernels run on the stream that was current when it was made; other streams are named with `record_use`. The memory
    lives until the cache is closed or gone and all its tensors are. A captured graph holds no tensor: keep one, or the
    cache, while the graph is used.

    A kernel that reaches a block that is not in use loses the context: mask the entries of block tables, or pin a
    block for them.

    `cuvmm.sleep` of the cache's name gives its memory up, and `cuvmm.wake` brings it back at the same addresses, so
    that tensors and captured graphs stay valid. Meanwhile blocks are not backed, released or reserved, and their
    bytes are not read or written.

    >>> cuvmm.sleep("chat")  # doctest: +SKIP
    >>> cuvmm.wake("chat")  # doctest: +SKIP
    """

    def __init__(
        self,
        request: dict[str, Any],
        groups: Sequence[LayerGroup],
        on_pressure: Callable[[PagedKv, int], object] | None,
    ) -> None:
        self._cache: _Cache | None = _Cache(request)
        self._requests: weakref.WeakSet[BackRequest] = weakref.WeakSet()
        self._on_pressure = on_pressure
        library, token = _library.get(), self._cache.token
        figures = json.loads(library.required("paged", token))
        #: The groups of layers.
        self.groups: tuple[LayerGroup, ...] = tuple(groups)
        #: The number of block numbers.
        self.blocks: int = request["blocks"]
        self.layout: Layout = request["layout"]
        #: The name of the pool (its tag) that the memory is in.
        self.name: str = request["name"]
        self.device: int = request["device"]
        #: The numbers of the blocks that are always backed.
        self.pinned: tuple[int, ...] = tuple(sorted(set(request["pinned"])))
        #: The bytes of a block in all layers and parts.
        self.block_bytes: int = figures["block_bytes"]
        #: The bytes of an extent, of which memory consists.
        self.extent: int = figures["extent"]
        if on_pressure is not None:
            _caches[token] = self
            library.end_calls_at_exit()
            library.check(library.paged_on_pressure(token, _PRESSED))

    def _token(self) -> int:
        if self._cache is None:
            raise Error("the paged cache is closed")
        return self._cache.token

    def tensor(self, layer: int, part: int = 0, group: int = 0) -> Any:
        """Returns one part of a layer of all blocks as a tensor `[block, token, head, element]` with strides.

        layer, part, group: counted from 0. Keys are part 0 and values part 1 of `LayerGroup.keys_and_values`.

        Its address and strides stay, so a captured graph may contain them. It keeps the memory alive. Making it
        records the use of the current stream.

        >>> keys = kv.tensor(layer=3)  # doctest: +SKIP
        >>> keys.shape, keys[numbers[0]].is_contiguous()  # doctest: +SKIP
        (torch.Size([8192, 16, 8, 128]), True)

        Raises `cuvmm.Error` if there is no such part, or the cache is closed.
        """
        address, shape, strides, cache = self._view(group, layer, part)
        return _tensor(address, shape, strides, self.groups[group].parts[part].dtype, cache)

    def whole(self, group: int = 0) -> Any:
        """Returns all layers of a group as a tensor `[block, layer, part, token, head, element]` with strides.

        For engines that keep a block of all layers together, and copy or move it as a whole: in block-major layout
        `kv.whole()[number]` is contiguous.

        Raises ValueError if the parts differ, and `cuvmm.Error` if there is no such group or the cache is closed.
        """
        address, shape, strides, cache = self._view(group, 0, 0)
        layers, parts = self.groups[group].layers, self.groups[group].parts
        first = parts[0]
        if any((*part[:2], _kind(part.dtype)) != (*first[:2], _kind(first.dtype)) for part in parts):
            raise ValueError("the parts of the group differ: take the tensor of each")
        itemsize = _kind(first.dtype)[0].itemsize
        steps = [
            (self._view(group, *place)[0] - address) // itemsize if count > 1 else strides[0]
            for count, place in ((layers, (1, 0)), (len(parts), (0, 1)))
        ]
        shape = (shape[0], layers, len(parts), *shape[1:])
        return _tensor(address, shape, (strides[0], *steps, *strides[1:]), first.dtype, cache)

    def _view(
        self, group: int, layer: int, part: int
    ) -> tuple[int, tuple[int, ...], tuple[int, ...], _Cache]:
        token = self._token()
        assert self._cache is not None
        numbers = [_count(*it) for it in (("group", group), ("layer", layer), ("part", part))]
        found = json.loads(_library.get().required("paged_view", token, *numbers))
        return found["address"], tuple(found["shape"]), tuple(found["strides"]), self._cache

    def back(self, numbers: Any) -> None:
        """Backs blocks with memory, all or none. Those in use stay as they are.

        numbers: whole numbers, as a list, an array of NumPy, or a tensor in host memory; fastest as int32 or int64.

        Makes no driver call where the memory is there. If memory is short, the hooks of caches are called, what is
        free elsewhere is taken, and the timeout is waited for; then garbage is collected, and a last attempt made
        that does not wait. A scheduler's loop calls `try_back`, which does none of this. Ctrl-C raises
        KeyboardInterrupt when the wait is over; `result` of `back_async` is ended by it.

        >>> kv.back(free.popleft_n(4))  # doctest: +SKIP

        Raises `cuvmm.OutOfMemoryError` if there is no memory, and `cuvmm.Error` if a block does not exist or the cache
        sleeps. No block has changed then.
        """
        library = _library.get()
        library.end_calls_at_exit()
        arguments = (self._token(), *packed(numbers), _library.COLLECT)
        library.check(_library.interrupted_later(library.paged_back, *arguments))

    def try_back(self, numbers: Any) -> bool:
        """Backs blocks like `back` if that needs no waiting. Returns False, with nothing changed, if memory is short.

        numbers: as for `back`.

        Takes memory that is free, that this process has idle, and that no process of the ledger has. Calls no hook,
        collects no garbage, and waits neither for work nor for other processes: what those have idle comes to `back`
        only. A scheduler tries this for each request, and runs the others meanwhile.

        >>> if not kv.try_back(numbers):  # doctest: +SKIP
        ...     free.append_n(numbers)  # the request waits for its turn

        Raises `cuvmm.Error` if a block does not exist or the cache sleeps.
        """
        library = _library.get()
        found = library.paged_try_back(self._token(), *packed(numbers))
        library.check(found)
        return bool(found)

    def back_async(self, numbers: Any) -> BackRequest:
        """Requests blocks, and returns at once: the request waits in line for memory while the caller goes on.

        numbers: as for `back`.

        It has its place behind earlier requests of this and other processes, and before later ones, which `try_back`
        does not have. A thread of the library makes the attempts, and calls the hooks of caches at the first, and again
        about once a second. The timeout of the cache has no effect, and no garbage is collected. Makes the first
        attempt itself, as `try_back` does, unless an earlier request waits. A scheduler keeps one request, for the
        oldest that lacks memory.

        >>> request = kv.back_async(free.popleft_n(4))  # doctest: +SKIP

        Raises `cuvmm.Error` if the cache is closed. Other errors are raised by `BackRequest.result`.
        """
        library = _library.get()
        library.end_calls_at_exit()
        request = BackRequest(library.number("paged_request", self._token(), *packed(numbers)))
        self._requests.add(request)
        return request

    def release(self, numbers: Any) -> None:
        """Gives blocks up, all or none. Memory that no block in use touches any more can be taken by others, behind the
        work that is queued by now; inside of `step`, that is queued by its end.

        numbers: as for `back`. One that is named several times counts once.

        Raises `cuvmm.Error` if a block is not in use or is pinned, or the cache sleeps. No block has changed then.
        """
        library = _library.get()
        library.check(library.paged_release(self._token(), *packed(numbers)))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Keeps the memory of blocks that are released inside until the end, for kernels that are queued inside.

        >>> with kv.step():  # doctest: +SKIP
        ...     kv.release(ended)  # the kernels still use them
        ...     launch()
        """
        library, token = _library.get(), self._token()
        number = library.number("paged_step_begin", token)
        try:
            yield
        finally:
            library.paged_step_end(token, number)

    def reserve(self, count: int) -> None:
        """Reserves memory for exactly `count` blocks, the lowest that are not in use: backing them later finds memory.

        0 gives the reserve up. It is for engines that take the lowest number first, as `FreeNumbers` does.

        Raises `cuvmm.OutOfMemoryError` if there is no memory, and `cuvmm.Error` if fewer blocks are unused or the
        cache sleeps. The reserve is as before then.
        """
        library = _library.get()
        library.end_calls_at_exit()
        arguments = (self._token(), _count("count", count), _library.COLLECT)
        library.check(_library.interrupted_later(library.paged_reserve, *arguments))

    def can_allocate(self, count: int) -> bool:
        """Returns True if `count` more blocks can have memory now: a hint, since others may be faster.

        It counts memory that `back` gets without calling a hook: what is free, what this process has idle, what no
        process of the ledger has, and what other processes last found idle above their guarantees, about once a
        second. `try_back` does not get the last part. False while the cache sleeps.
        """
        library = _library.get()
        found = library.paged_can_allocate(self._token(), _count("count", count))
        library.check(found)
        return bool(found)

    def emptiest(self, size: int | str, evictable: Any) -> Evictions:
        """Chooses blocks whose release gives at least `size` bytes back, fewer if there are no more, with few blocks.

        size: bytes, or text such as "64MiB".
        evictable: the numbers to choose among, as for `back`. Those that are not in use are skipped.

        For a hook that evicts prefixes: memory comes back when no block in use touches it, so a few blocks that lie
        together give more than many that are scattered.
        """
        library, (content, count, width) = _library.get(), packed(evictable)
        chosen, found = (ctypes.c_uint32 * count)(), (ctypes.c_uint64 * 2)()
        address = ctypes.cast(chosen, ctypes.c_void_p) if count else None
        wanted = bytes_of(size) if size else 0
        library.check(library.paged_emptiest(self._token(), wanted, content, count, width, address, found))
        return Evictions(chosen[: found[0]], found[1])

    def record_use(self, stream: Any) -> None:
        """Records that kernels on another stream use blocks, now and later: memory waits for its work too.

        stream: a stream of PyTorch, or a stream's handle. Call `cuvmm.end_stream` before it is destroyed; PyTorch's
            own never are.

        Raises `cuvmm.Error` for a stream of another device, or a thread's default stream.
        """
        self._token()
        assert self._cache is not None
        self._cache.record(stream_of(stream))

    def purge(self) -> int:
        """Gives the memory that no block in use touches and whose work is complete to others, and returns its bytes.

        They take it without this when they need it. `cuvmm.empty_cache` gives it to the driver.
        """
        return _library.get().number("paged_purge", self._token())

    def free_numbers(self) -> FreeNumbers:
        """Returns a free list of all numbers that are not pinned."""
        return FreeNumbers(self.blocks, self.pinned)

    def stats(self) -> PagedStats:
        """Returns the figures. Makes no driver call."""
        found = json.loads(_library.get().required("paged_stats", self._token()))
        return PagedStats(**{it.name: found[it.name] for it in dataclasses.fields(PagedStats)})

    def close(self) -> None:
        """Ends the cache, whose memory goes when its last tensor is gone and their work is complete. Its requests are
        refused."""
        self._cache = self._on_pressure = None
        for request in list(self._requests):
            request._withdraw("the paged cache is closed")

    def __repr__(self) -> str:
        return (
            f"<cuvmm.torch.PagedKv {self.name!r} {self.blocks} blocks of {text_of(self.block_bytes)},"
            f" {self.layout}, on device {self.device}{'' if self._cache else ', closed'}>"
        )


def _count(what: str, number: Any) -> int:
    """Returns a number that fits the library's, which checks it."""
    found = operator.index(number)
    if not 0 <= found < 1 << 32:
        raise ValueError(f"{what} is a number from 0 to 4294967295, not {found}")
    return found


def _kind(dtype: Any) -> tuple[DType, Any]:
    """Returns the element type that a tensor is exported with, and the one to view it as, if that is another one."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    try:
        return dtype_of(dtype), None
    except ValueError:
        if not isinstance(dtype, torch.dtype):
            raise
        # Small types have no code in each version of DLPack.
        return dtype_of(f"uint{8 * dtype.itemsize}"), dtype


def _tensor(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, cache: _Cache
) -> Any:
    kind, viewed_as = _kind(dtype)
    tensor = torch.from_dlpack(DeviceArray(_View(address, cache), shape, kind, strides))
    return tensor if viewed_as is None else tensor.view(viewed_as)


def paged_kv(
    blocks: int,
    groups: LayerGroup | Iterable[LayerGroup],
    *,
    layout: Layout = "block-major",
    extent: int | str | None = None,
    pinned: Iterable[int] = (0,),
    precommit: int = 0,
    name: str = "paged",
    device: Any = None,
    timeout: float | None = None,
    on_pressure: Callable[[PagedKv, int], object] | None = None,
) -> PagedKv:
    """Makes a cache of keys and values with the addresses of all blocks, and memory under the blocks in use.

    blocks: the number of block numbers, 1 to 2147483647. They cost addresses, and no memory.
    groups: the layers: one `LayerGroup`, or several that share the numbers.
    layout: "block-major" is `[block, layer, part, token, head, element]`, for kernels with a stride between blocks;
        "token-major" is `[token, layer, part, head, element]`, where rows of a layer lie at one stride through all
        blocks; "layer-major" has contiguous tensors, whose memory comes and goes by an extent for each.
    extent: the bytes by which memory comes and goes: a power of two in whole granules of the device, up to "32MiB".
        By default 16 MiB, and a granule in layer-major layout.
    pinned: numbers that are always backed, such as a null block, or blocks for padding. By default number 0, which
        engines do not give to requests. Without it Triton refuses the tensors while no block of the first extent is in
        use, because their first bytes have no memory then.
    precommit: for how many of the lowest unused blocks a thread of the library maps memory ahead, after a `back` that
        took some, so that the next `back` makes no driver call. Nothing is reclaimed for it, and others get it first.
    name: the name of the pool (its tag) that the memory is in, under the limit and the ledger that all of cuvmm's
        memory on the device has. Caches of one name share it, and so do tensors of `cuvmm.torch.pool(name)`: all of
        them sleep and wake together.
    device: the device; the current one by default. Its current stream is the home stream.
    timeout: the seconds that `back` and `reserve` wait for memory in use. By default they do not wait; with a ledger,
        up to 2 s for other processes.
    on_pressure: called with the cache and the missing bytes when a request lacks memory that releasing blocks could
        give: a request of this or another cache, of `cuvmm.empty`, of PyTorch under `cuvmm.torch.install`, or of
        another process. It gives up blocks of prefixes, which `emptiest` chooses. It runs on the thread of the request
        or one of the library, so it takes no lock with which a thread allocates. What it raises is printed
        (`sys.unraisablehook`), and the request goes on. It is not called for memory of `cuvmm.torch.pool`, for
        `cuvmm.wake`, nor while a graph may be captured.

    >>> group = cuvmm.torch.LayerGroup.keys_and_values(32, 16, 8, 128, "bfloat16")  # doctest: +SKIP
    >>> kv = cuvmm.torch.paged_kv(8192, group, name="chat")  # doctest: +SKIP
    >>> free = kv.free_numbers()  # doctest: +SKIP
    >>> numbers = free.popleft_n(4)  # doctest: +SKIP
    >>> kv.back(numbers)  # doctest: +SKIP
    >>> kv.tensor(layer=0)[numbers]  # doctest: +SKIP

    Raises `cuvmm.OutOfMemoryError` if there is no memory for pinned blocks, and `cuvmm.Error` for a shape that cannot
    be, a pool that sleeps or is shareable, or the name of the heap's tenant. No cache is made then.
    """
    groups = (groups,) if isinstance(groups, LayerGroup) else tuple(groups)
    if on_pressure is not None and not callable(on_pressure):
        raise TypeError(f"on_pressure is a function, not {type(on_pressure).__name__}")
    check_name(name)
    if layout not in get_args(Layout):
        raise ValueError(f"layout is 'block-major', 'token-major' or 'layer-major', not {layout!r}")
    ordinal = torch.cuda._utils._get_device_index(device, optional=True)
    request = {
        "device": ordinal,
        "stream": torch.cuda.current_stream(ordinal).cuda_stream,
        "name": name,
        "blocks": _count("blocks", blocks),
        "groups": [_described(group) for group in groups],
        "layout": layout,
        "extent": None if extent is None else bytes_of(extent),
        "pinned": [_count("a pinned block", number) for number in pinned],
        "precommit": _count("precommit", precommit),
        "timeout": None if timeout is None else min(seconds_of(timeout), 1e9),
    }
    _library.get().end_calls_at_exit()
    return PagedKv(request, groups, on_pressure)


def _described(group: LayerGroup) -> dict[str, Any]:
    """Returns a group as the library takes it."""
    if not isinstance(group, LayerGroup):
        raise TypeError(f"a group of layers is a LayerGroup, not {group!r}")
    parts = [
        [_count("heads", heads), _count("head_size", size), _kind(dtype)[0].itemsize]
        for heads, size, dtype in group.parts
    ]
    return {"layers": _count("layers", group.layers), "tokens": _count("tokens", group.tokens), "parts": parts}
