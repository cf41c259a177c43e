"""transformers' continuous batching over a paged cache: memory under the blocks of its requests only.

    import cuvmm.torch.transformers

    cuvmm.torch.transformers.install(name="chat")  # before `generate_batch` or `init_continuous_batching`

The cache of each manager that is made from then on has the addresses of `num_blocks` blocks, which may be more than
the device has memory for, and memory under those that requests and prefixes use. Several models, in one process or in
many with a ledger, share the device's memory as they need it. Made for transformers 5.17; others are refused where
their continuous batching differs.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import transformers as _transformers

_REFUSED = (
    "cuvmm.torch.transformers is made for the continuous batching of transformers 5.17, which differs from that of"
    f" {_transformers.__version__}, which is installed"
)

try:
    from transformers.generation.continuous_batching import cache as _cache
    from transformers.generation.continuous_batching import cache_manager as _cache_manager
    from transformers.generation.continuous_batching import continuous_api as _api

    #: transformers' classes, by the module and the name under which they are used.
    _originals = {
        (_api, "PagedAttentionCache"): _cache.PagedAttentionCache,
        (_api, "ContinuousBatchProcessor"): _api.ContinuousBatchProcessor,
        (_cache, "PagedAttentionMemoryHandler"): _cache.PagedAttentionMemoryHandler,
    }
    _OwnBlockManager = _cache_manager.BlockManager
except (AttributeError, ImportError) as error:
    raise ImportError(_REFUSED) from error

from .._errors import Error, OutOfMemoryError
from .._sleeping import seconds_of
from ._numbers import FreeNumbers
from ._paged import LayerGroup, PagedKv, paged_kv

__all__ = ["install", "paged", "uninstall"]

#: The methods that are replaced or called, with the names of their arguments.
_METHODS = {
    _cache.PagedAttentionCache: {
        "__init__": "config continuous_batching_config device distributed_helper tp_plan dtype",
        "allocate_blocks": "n_blocks request_id allocated_blocks",
        "blocks_needed": "num_requested_blocks allocated_blocks",
        "free_blocks": "request_id",
        "fork_request": "source_request_id destination_request_ids",
        "compute_max_num_forks": "source_request_id",
        "search_prefix_match": "request_id prompt_ids",
        "mark_shareable_blocks_as_complete": "state num_complete_blocks",
    },
    _OwnBlockManager: {
        "__init__": "num_blocks block_size tp_on",
        "get_free_blocks": "n_blocks last_block_id shareable group_id",
        "has_enough_free_blocks": "n_blocks",
        "free_blocks": "blocks shareable",
    },
    _api.ContinuousBatchProcessor: {
        "prepare_next_batch": "",
        "update_batch": "",
        "fail_all_requests": "error",
        "has_pending_requests": "",
        "warmup": "model",
        "_update_tp_group_state": "",
    },
    _cache.PagedAttentionMemoryHandler: {"compute_memory_footprint": "max_batch_tokens num_blocks"},
}


def _arguments_of(method: Any) -> list[str] | None:
    return None if method is None else list(inspect.signature(method).parameters)


for _of, _methods in _METHODS.items():
    for _method, _arguments in _methods.items():
        if _arguments_of(getattr(_of, _method, None)) != ["self", *_arguments.split()]:
            raise ImportError(f"{_REFUSED}: {_of.__name__}.{_method} is not as it was")

#: The seconds between two looks for memory that other models have.
_PAUSE = 0.01
#: Of the requests that find too little memory in a row, each of this number asks others for theirs.
_ASKS = 32


class _Options(NamedTuple):
    name: str = "paged"
    extent: int | str | None = None
    timeout: float = 60.0


#: What `install` was given, for the next cache.
_options = _Options()
#: The thread that is inside of `paged`, once for each time.
_inside: list[int] = []


class _Free:
    """The blocks without contents, in place of transformers' deque. They have no memory, except number 0, which is
    pinned, and those that are given out next."""

    def __init__(self, kv: PagedKv, blocks: int) -> None:
        self._kv, self._numbers = kv, FreeNumbers(blocks, (0,))
        #: Those with memory.
        self.ready: deque[int] = deque((0,))
        #: How many there are.
        self.count = blocks
        #: Blocks that are given back together, while `together` is entered.
        self._given: list[int] | None = None
        #: Blocks that were given back while the cache slept, which it releases later.
        self._late: list[int] = []

    def __len__(self) -> int:
        return self.count

    def back(self, count: int, asks: bool = True) -> bool:
        """Backs the next `count` blocks. Returns False, with nothing changed, if memory is short.

        asks: others are asked for memory, and may be waited for.
        """
        missing = count - len(self.ready)
        if missing <= 0:
            return True
        self._release([])
        # A hook that is called meanwhile gives further numbers back.
        numbers = self._numbers.popleft_n(missing)
        backed = False
        try:
            backed = self._kv.try_back(numbers)
            if asks and not backed:
                self._kv.back(numbers)
                backed = True
        except OutOfMemoryError:
            pass
        finally:
            (self.ready.extend if backed else self._numbers.append_n)(numbers)
        return backed

    def can_back(self, count: int) -> bool:
        """Returns True if `back` would find memory for `count` blocks now, without asking others."""
        return self._kv.can_allocate(max(0, count - len(self.ready)))

    def popleft(self) -> int:
        if not self.ready and not self.back(1):
            raise OutOfMemoryError("there is no memory for a block of the paged cache")
        self.count -= 1
        return self.ready.popleft()

    def append(self, number: int) -> None:
        if self._given is None:
            self.extend((number,))
        else:
            self._given.append(number)
            self.count += 1

    def extend(self, numbers: Iterable[int]) -> None:
        numbers = list(numbers)
        self._give_back(numbers)
        self.count += len(numbers)

    def _give_back(self, numbers: list[int]) -> None:
        self.ready.extend(number for number in numbers if not number)
        self._release([number for number in numbers if number])

    def _release(self, numbers: list[int]) -> None:
        numbers = self._late + numbers
        if not numbers:
            return
        try:
            self._kv.release(numbers)
        except Error:
            # An engine that is stopped gives its blocks back, also while the cache sleeps.
            if self._kv.can_allocate(0):
                raise
            self._late = numbers
        else:
            self._numbers.append_n(numbers)
            self._late = []

    def give_up_ready(self) -> None:
        """Gives the memory of the blocks back that were to be given out next."""
        numbers, self.ready = list(self.ready), deque()
        self._give_back(numbers)

    @contextlib.contextmanager
    def together(self, stay_backed: bool = False) -> Iterator[None]:
        """Gives the blocks that are appended inside back by one call.

        stay_backed: they keep their memory instead, and are given out next.
        """
        self._given = given = []
        try:
            yield
        finally:
            self._given = None
            (self.ready.extend if stay_backed else self._give_back)(given)


class _BlockManager(_OwnBlockManager):
    """Backs blocks before they are given out, and evicts prefixes when memory is short."""

    def __init__(self, kv: PagedKv, num_blocks: int, block_size: int, tp_on: bool) -> None:
        super().__init__(num_blocks, block_size, tp_on)
        self._uninit_block_ids: _Free = _Free(kv, num_blocks)
        self._kv = kv
        # How many blocks could have memory when it was short last, if it was not found since.
        self._left: int | None = None
        # The requests that found too little memory since one found enough.
        self._refused = 0
        #: Held while blocks change hands. A hook of another thread evicts nothing meanwhile.
        self.turn = threading.RLock()

    @property
    def num_free_blocks(self) -> int:
        """The blocks that can be given out, as far as memory is known to be short."""
        # A scheduler asks for each request in each step.
        free = self._uninit_block_ids.count + len(self._init_block_ids)
        return free if self._left is None else min(free, self._left)

    def back(self, count: int) -> bool:
        """Backs the blocks that are given out next. Returns False if there are too few, or memory is short."""
        if not self.has_enough_free_blocks(count):
            return False
        free = self._uninit_block_ids
        backed = free.back(count, asks=False)
        if not backed:
            self._take_over(count - len(free.ready))
            # Others are waited for, and garbage is collected: that is too much for each step of a scheduler.
            backed = free.back(count, asks=self._refused % _ASKS == 0)
        if not backed:
            free.give_up_ready()
        self._refused = 0 if backed else self._refused + 1
        self._left = None if backed else self._can_have(count)
        return backed

    def _take_over(self, missing: int) -> None:
        """Lets blocks without contents have the memory of prefixes, as much as there is too little for `missing`."""
        most = min(missing - self._can_have(missing), len(self._init_block_ids))
        with self._uninit_block_ids.together(stay_backed=True):
            for _ in range(most):
                self._give_up(next(reversed(self._init_block_ids)))

    def _give_up(self, number: int) -> None:
        """Gives up a prefix that no request uses."""
        del self._init_block_ids[number]
        self._hash_to_id.pop(self._id_to_block.pop(number).hash, None)
        self._uninit_block_ids.append(number)

    def has_memory_for(self, count: int) -> bool:
        """Returns True if there is memory for `count` blocks now, that of prefixes included."""
        return self._uninit_block_ids.can_back(count - len(self._init_block_ids))

    def _can_have(self, count: int) -> int:
        """Returns how many of `count` blocks, one at least too many, can have memory."""
        most = 0
        while count - most > 1:
            middle = (most + count) // 2
            most, count = (middle, count) if self._kv.can_allocate(middle) else (most, middle)
        return most

    def get_free_blocks(
        self, n_blocks: int, last_block_id: int | None, shareable: bool, group_id: int
    ) -> list[int] | None:
        """Returns blocks with memory, or None."""
        if n_blocks and not self.back(n_blocks):
            return None
        return super().get_free_blocks(n_blocks, last_block_id, shareable, group_id)

    def freed(self, before: int) -> None:
        """Counts blocks that were freed since `before` were free, for a while in which memory is short."""
        if self._left is not None:
            self._left += max(0, self.all_free() - before)

    def all_free(self) -> int:
        """Returns the blocks that no request has, with memory or not."""
        return len(self._uninit_block_ids) + len(self._init_block_ids)

    def has_enough_free_blocks(self, n_blocks: int) -> bool:
        """Returns True if that many blocks have no contents. The contents of prefixes go for it, not their memory."""
        if len(self._uninit_block_ids) >= n_blocks:
            return True
        with self._uninit_block_ids.together(stay_backed=True):
            enough: bool = super().has_enough_free_blocks(n_blocks)
        return enough

    def free_blocks(self, blocks: list[int], shareable: bool) -> None:
        if shareable:
            with self._uninit_block_ids.together():
                super().free_blocks(blocks, shareable)
        else:
            # They are given back together as it is.
            super().free_blocks(blocks, shareable)

    def evict(self, missing: int) -> None:
        """Gives up prefixes that no request uses."""
        if not self.turn.acquire(blocking=False):
            return
        try:
            chosen = self._kv.emptiest(missing, list(self._init_block_ids))
            with self._uninit_block_ids.together():
                for number in chosen.numbers:
                    self._give_up(number)
        finally:
            self.turn.release()


class _Cache(_cache.PagedAttentionCache):
    """transformers' cache, whose tensors are views of a `PagedKv`."""

    def __init__(
        self,
        config: Any,
        continuous_batching_config: Any,
        device: torch.device | str,
        distributed_helper: Any,
        tp_plan: dict[str, Any],
        dtype: torch.dtype = torch.float16,
    ) -> None:
        if distributed_helper.tp_size > 1:
            raise Error("tensor-parallel models have transformers' own cache: call uninstall() for them")
        # With block tables, rows of padding name blocks without memory.
        continuous_batching_config.max_blocks_per_request = 0
        # Its tensors take no memory there.
        super().__init__(config, continuous_batching_config, "meta", distributed_helper, tp_plan, dtype)
        self.device = device
        layers, blocks = len(self.key_cache), self.num_blocks
        group = LayerGroup.keys_and_values(
            layers, self.block_size, self.num_key_value_heads, self.head_dim, dtype
        )
        self.kv = paged_kv(
            blocks + 2,
            group,
            layout="token-major",
            # Padding reads one of the last and writes the other. Kernels of Triton are refused without the first.
            pinned=(0, blocks, blocks + 1),
            device=device,
            on_pressure=_evicting(weakref.ref(self)),
            name=_options.name,
            extent=_options.extent,
        )
        self._timeout = _options.timeout
        # The step in which a batch is prepared and runs: meanwhile the cache does not fall asleep.
        self._step: contextlib.ExitStack | None = None
        for layer in range(layers):
            self.key_cache[layer], self.value_cache[layer] = self._rows(layer, 0), self._rows(layer, 1)
        self._block_manager: _BlockManager = _BlockManager(self.kv, blocks, self.block_size, False)

    def _rows(self, layer: int, part: int) -> torch.Tensor:
        rows = self.kv.tensor(layer, part).view(self.cache_shape)
        torch._dynamo.mark_static_address(rows)
        rows[self.read_trash_index : self.write_trash_index].fill_(0)
        return rows

    def begin_step(self) -> bool:
        """Begins a step in place of the last one. Returns False, without a step, if the cache sleeps."""
        self.end_step()
        # A step that begins while the cache falls asleep keeps it awake.
        if self.kv.can_allocate(0):
            self._step = contextlib.ExitStack()
            self._step.enter_context(self.kv.step())
            if not self.kv.can_allocate(0):
                self.end_step()
        return self._step is not None

    def end_step(self) -> bool:
        """Ends the step. Returns False if there is none."""
        step, self._step = self._step, None
        if step is not None:
            step.close()
        return step is not None

    def allocate_blocks(self, n_blocks: int, request_id: str, allocated_blocks: int) -> int | None:
        manager, until = self._block_manager, None
        # A warm-up has all blocks. Nothing is waited for or evicted for it: without memory, graphs are captured later.
        needed = self.blocks_needed(n_blocks, allocated_blocks)
        if request_id.startswith("__warmup_") and not manager.has_memory_for(needed):
            return None
        while True:
            with manager.turn:
                if manager.back(needed):
                    return super().allocate_blocks(n_blocks, request_id, allocated_blocks)
                until = until or time.monotonic() + self._timeout
                # Requests of this model give memory back by themselves.
                if manager.all_free() < self.num_blocks or time.monotonic() >= until:
                    return None
            # In a step others would not get the memory of prefixes. No block is in use, so it has no batch yet.
            in_step = self.end_step()
            time.sleep(_PAUSE)
            while in_step and not self.begin_step():
                until = None
                time.sleep(_PAUSE)

    def free_blocks(self, request_id: str) -> None:
        manager = self._block_manager
        with manager.turn:
            before = manager.all_free()
            super().free_blocks(request_id)
            manager.freed(before)

    def fork_request(
        self, source_request_id: str, destination_request_ids: list[str]
    ) -> tuple[list[int], list[int]]:
        with self._block_manager.turn:
            return super().fork_request(source_request_id, destination_request_ids)

    def compute_max_num_forks(self, source_request_id: str) -> int:
        most: int = super().compute_max_num_forks(source_request_id)
        # The most blocks that a fork takes; none if the number of forks has no bound.
        blocks = self.get_num_free_blocks() // max(1, most)
        while blocks and not self.kv.can_allocate(most * blocks):
            most //= 2
        return most

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        with self._block_manager.turn:
            return super().search_prefix_match(request_id, prompt_ids)

    def mark_shareable_blocks_as_complete(self, state: Any, num_complete_blocks: int) -> None:
        if num_complete_blocks:
            with self._block_manager.turn:
                super().mark_shareable_blocks_as_complete(state, num_complete_blocks)


def _evicting(cache: weakref.ref[_Cache]) -> Any:
    def evict(_: PagedKv, missing: int) -> None:
        manager = getattr(cache(), "_block_manager", None)
        if isinstance(manager, _BlockManager):
            manager.evict(missing)

    return evict


class _Processor(_api.ContinuousBatchProcessor):
    """transformers' processor, whose stream the cache's memory waits for, and whose batches wait while that sleeps."""

    def __init__(self, cache: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(cache, *arguments, **named)
        self._paged: _Cache | None = cache if isinstance(cache, _Cache) else None
        stream = self.inputs_and_outputs.compute_stream
        if self._paged is not None and stream is not None:
            self._paged.kv.record_use(stream)

    def _end_step(self) -> None:
        if self._paged is not None:
            self._paged.end_step()

    def prepare_next_batch(self) -> bool:
        """Prepares a batch in a step that `update_batch` ends. Requests wait while the cache sleeps."""
        if self._paged is None:
            return super().prepare_next_batch()
        if self._update_tp_group_state():
            return False
        # Without requests there is no step, so that an idle engine does not keep the cache awake.
        if not self.has_pending_requests():
            self.scheduler.clear_cancelled_requests()
            return False
        prepared = False
        try:
            prepared = self._paged.begin_step() and super().prepare_next_batch()
        finally:
            if not prepared:
                self._end_step()
        return prepared

    def update_batch(self) -> None:
        try:
            super().update_batch()
        finally:
            self._end_step()

    def fail_all_requests(self, error: Exception) -> None:
        self._end_step()
        super().fail_all_requests(error)

    def warmup(self, model: Any) -> None:
        if self._paged is not None and not self._paged.begin_step():
            raise Error("the engine's paged cache sleeps: wake it first")
        try:
            super().warmup(model)
        finally:
            self._end_step()


class _MemoryHandler(_cache.PagedAttentionMemoryHandler):
    """transformers' sizes, of which blocks without a request have no memory."""

    def compute_memory_footprint(self, max_batch_tokens: int, num_blocks: int) -> int:
        """Returns the bytes of all but keys and values, and the copies of these that a layer reads."""
        row = self.page_size * self.cache_dtype.itemsize
        of_blocks = 2 * (self.group_size + 1) * row * num_blocks * self.block_size
        whole: int = super().compute_memory_footprint(max_batch_tokens, num_blocks)
        return max(0, whole - of_blocks)


def install(*, name: str = "paged", extent: int | str | None = None, timeout: float = 60.0) -> None:
    """Makes the caches of managers that are made from now on paged caches.

    name, extent: as for `cuvmm.torch.paged_kv`.
    timeout: the seconds that a request waits for memory while no other request of its model has any.

    A cache's `num_blocks` are addresses. With `num_blocks` and `max_batch_tokens` of transformers'
    `ContinuousBatchingConfig` both set, their number may exceed the memory; else transformers chooses as many as fit.
    A request that finds no memory waits for its turn as one that finds no block does, and then requests are
    offloaded. Prefixes that no request uses are evicted when memory is short, for other models too. The decode path
    with block tables (`max_blocks_per_request`) is off: in it, padding names blocks without memory.

    >>> cuvmm.torch.transformers.install(name="chat")  # doctest: +SKIP
    >>> model.generate_batch(prompts, continuous_batching_config=config)  # doctest: +SKIP

    Managers of tensor-parallel models raise `cuvmm.Error` when they are started.
    """
    global _options
    _options = _Options(name, extent, seconds_of(timeout))
    _use((_Cache, _Processor, _MemoryHandler))


def uninstall() -> None:
    """Gives transformers its own caches back, for managers that are made from now on."""
    _use(_originals.values())


def _use(classes: Iterable[type]) -> None:
    for (module, attribute), it in zip(_originals, classes, strict=True):
        setattr(module, attribute, it)


@contextlib.contextmanager
def paged(*, name: str = "paged", extent: int | str | None = None, timeout: float = 60.0) -> Iterator[None]:
    """Makes the caches of managers that are made and started inside paged caches, as `install` does. Afterwards all is
    as before, also what `install` had set.

    >>> with cuvmm.torch.transformers.paged(name="chat"):  # doctest: +SKIP
    ...     model.generate_batch(prompts)

    Raises `cuvmm.Error` while another thread is inside: the names that transformers has its caches by are those of the
    process. Managers that were started inside serve requests at the same time, each over a cache of its own.
    """
    global _options
    thread = threading.get_ident()
    if _inside[:1] not in ([], [thread]):
        raise Error("another thread is making a manager with `paged`: make one after the other, or call `install`")
    options, classes = _options, [getattr(module, attribute) for module, attribute in _originals]
    _inside.append(thread)
    try:
        install(name=name, extent=extent, timeout=timeout)
        yield
    finally:
        _inside.pop()
        _options = options
        _use(classes)
