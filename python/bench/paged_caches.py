"""The memory of keys and values of `paged_servers.py`: a tensor, a paged cache of cuvmm, or kvcached's.

Each has `take`, which returns numbers of blocks with memory or None, `give`, which takes them back, `figures`, and
`parts`, the tensors that kernels use. `is_granted` says that memory came since `take` was refused, and `suffices` is
called when no request lacks memory. Number 0 always has memory and is never taken, in all three: Triton refuses a
tensor whose first byte has none.
"""

from __future__ import annotations

import os
import time
from typing import Any

GIB = 1 << 30
#: The shape of the model: 192 KiB of keys and values for each token.
LAYERS, HEADS, SIZE, BLOCK = 24, 16, 128, 16
BLOCK_BYTES = LAYERS * 2 * BLOCK * HEADS * SIZE * 2


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


class Memory:
    """What caches have in common that ask for memory only when blocks are taken."""

    def is_granted(self) -> bool:
        return False

    def suffices(self) -> None:
        pass


class Whole(Memory):
    """Memory that is all there from the start: numbers, of which the last that was given back is next."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.free = blocks, list(range(1, blocks))[::-1]

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        return [self.free.pop() for _ in range(count)]

    def give(self, numbers: list[int]) -> None:
        self.free.extend(numbers)

    def figures(self) -> tuple[int, int, int]:
        """Returns the bytes of blocks in use, of memory that the other server cannot have, and of all memory that this
        one has."""
        whole = self.blocks * BLOCK_BYTES
        return (self.blocks - 1 - len(self.free)) * BLOCK_BYTES, whole, whole

    def parts(self) -> list[tuple[Any, Any]]:
        """Returns the keys and the values of each layer, as tensors `[block, token, head, element]`."""
        import torch

        shape = (self.blocks, LAYERS, 2, BLOCK, HEADS, SIZE)
        self.tensor = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        return [(self.tensor[:, layer, 0], self.tensor[:, layer, 1]) for layer in range(LAYERS)]


class Paged(Memory):
    """A paged cache of cuvmm, under the ledger of both servers, each of which always has a part of the memory.

    Where memory is short, a request for it stands in line, one at a time, or with `calls="back"` a call waits now and
    then.
    """

    #: Seconds between calls that wait for what the other server has idle, as engines are told to.
    PACE = 0.05

    def __init__(
        self,
        blocks: int,
        name: str,
        ledger: str | None,
        extent: str | None = None,
        precommit: int = 0,
        guarantee: float = 0.0,
        calls: str = "request",
    ) -> None:
        import cuvmm
        import cuvmm.torch

        if ledger is not None:
            whole = blocks * BLOCK_BYTES
            sizes = {"ledger_limit": whole, "guarantee": int(whole * guarantee)}
            cuvmm.configure(ledger=ledger, tenant=f"server {name}", **sizes)
        self.error = cuvmm.OutOfMemoryError
        group = cuvmm.torch.LayerGroup.keys_and_values(LAYERS, BLOCK, HEADS, SIZE, "bfloat16")
        # A short wait: the other server gives memory back that it does not use.
        options = {"extent": extent, "timeout": 0.002, "precommit": precommit, "pinned": [0]}
        self.kv = cuvmm.torch.paged_kv(blocks, group, name=name, **options)
        self.free, self.calls = self.kv.free_numbers(), calls
        self.waited = 0.0
        #: The request that stands in line, with its numbers, and numbers that one has got.
        self.standing: tuple[list[int], Any] | None = None
        self.granted: list[int] = []

    def take(self, count: int) -> list[int] | None:
        if self.is_granted():
            self.collect()
        lacking = max(0, count - len(self.granted))
        if lacking > len(self.free):
            return None
        numbers = self.free.popleft_n(lacking)
        if self.kv.try_back(numbers) or (self.calls == "back" and self.wait(numbers)):
            # A request for no more than this was for the same need.
            if self.standing is not None and lacking >= len(self.standing[0]):
                self.withdraw()
            kept = count - lacking
            numbers += self.granted[:kept]
            del self.granted[:kept]
            return numbers
        if self.calls == "request" and self.standing is None:
            self.standing = numbers, self.kv.back_async(numbers)
        else:
            self.free.append_n(numbers)
        return None

    def is_granted(self) -> bool:
        return self.standing is not None and self.standing[1].done()

    def collect(self) -> None:
        """Takes what the request has got, if it was not refused."""
        (numbers, request), self.standing = self.standing, None
        try:
            request.result()
        except self.error:
            self.free.append_n(numbers)
        else:
            self.granted += numbers

    def withdraw(self) -> None:
        if self.standing is not None:
            (numbers, request), self.standing = self.standing, None
            request.cancel()
            self.free.append_n(numbers)

    def suffices(self) -> None:
        self.withdraw()
        if self.granted:
            self.give(self.granted)
            self.granted = []

    def wait(self, numbers: list[int]) -> bool:
        """Asks the other server for memory too, unless that was done a moment ago."""
        if time.monotonic() - self.waited < self.PACE:
            return False
        try:
            self.kv.back(numbers)
        except self.error:
            self.waited = time.monotonic()
            return False
        return True

    def give(self, numbers: list[int]) -> None:
        self.kv.release(numbers)
        self.free.append_n(numbers)

    def figures(self) -> tuple[int, int, int]:
        stats = self.kv.stats()
        return stats.in_use * BLOCK_BYTES, stats.committed, stats.held

    def parts(self) -> list[tuple[Any, Any]]:
        return [(self.kv.tensor(layer, 0), self.kv.tensor(layer, 1)) for layer in range(LAYERS)]


class Kvcached(Memory):
    """kvcached's manager and tensors, as SGLang uses them."""

    def __init__(self, blocks: int, name: str) -> None:
        # Both servers are of one process group, from which kvcached derives the name else. A shortage is no error.
        os.environ["KVCACHED_IPC_NAME"] = f"{name}-{os.getpid()}"
        os.environ.setdefault("KVCACHED_LOG_LEVEL", "ERROR")
        import torch
        from kvcached.integration.sglang import interfaces

        interfaces.init_kvcached()
        shape, kind = (blocks * BLOCK, HEADS, SIZE), torch.bfloat16
        self.keys, self.values = interfaces.alloc_kv_cache(shape, kind, "cuda:0", LAYERS, BLOCK)
        self.manager = interfaces.get_kv_cache_manager(blocks, BLOCK, HEADS * SIZE * 2, LAYERS)
        self.live = 0

    def take(self, count: int) -> list[int] | None:
        numbers = self.manager.alloc(count)
        self.live += 0 if numbers is None else count
        return numbers

    def give(self, numbers: list[int]) -> None:
        self.live -= len(numbers)
        self.manager.free(numbers)

    def figures(self) -> tuple[int, int, int]:
        pages = self.manager.page_allocator
        # Nothing takes the pages that it keeps mapped for later.
        held = (pages.get_num_inuse_pages() + pages.get_num_reserved_pages()) * self.manager.page_size * LAYERS * 2
        return self.live * BLOCK_BYTES, held, held

    def parts(self) -> list[tuple[Any, Any]]:
        shape = (-1, BLOCK, HEADS, SIZE)
        pairs = zip(self.keys, self.values, strict=True)
        return [tuple(part.unflatten(0, shape[:2]) for part in pair) for pair in pairs]


def take_the_rest(held: int, memory: int) -> Any:
    """Takes the card's free memory but what kvcached still may have: it leaves 5 % of the card alone."""
    import torch

    free, total = torch.cuda.mem_get_info()
    spare = free + held - memory - int(total * (1 - float(os.environ.get("KVCACHED_GPU_UTILIZATION", "0.95"))))
    if spare < 0:
        raise SystemExit(f"the card has {-spare / GIB:.1f} GiB too little for this comparison")
    return torch.empty(spare, dtype=torch.uint8, device="cuda")
