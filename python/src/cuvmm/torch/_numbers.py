"""Block numbers: a free list of them, and their form for the library."""

from __future__ import annotations

import array
import ctypes
import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from .._errors import Error

#: The most blocks: kernels have signed numbers of 32 bits.
MOST = (1 << 31) - 1

_FORMATS = {code: ctypes.sizeof(kind) for code, kind in {
    "i": ctypes.c_int, "I": ctypes.c_uint, "l": ctypes.c_long, "L": ctypes.c_ulong,
    "q": ctypes.c_longlong, "Q": ctypes.c_ulonglong,
}.items()}  # fmt: skip
_DTYPES = {"torch.int32": 4, "torch.int64": 8}


class FreeNumbers:
    """A free list of block numbers that gives out the lowest first, in place of an engine's deque.

    blocks: the number of block numbers, 1 to 2147483647.
    without: numbers that are in no free list, such as pinned ones.

    It stands alone: it may be in another process than the cache, and needs no library. Low numbers lie close
    together, so that the memory of a cache that shrinks becomes wholly free from its end. Like a deque, it is not
    for several threads at a time.

    >>> free = FreeNumbers(1000, without=[0])
    >>> free.popleft_n(3)
    [1, 2, 3]
    >>> free.append(2)
    >>> free.popleft(), len(free)
    (2, 996)

    Raises ValueError for another number of blocks, and for a number of `without` that is not free.
    """

    def __init__(self, blocks: int, without: Iterable[int] = ()) -> None:
        if not 1 <= blocks <= MOST:
            raise ValueError(f"there are 1 to {MOST} blocks, not {blocks}")
        # A sorted list is a heap. It may have numbers that are not free any more, and some twice.
        self._heap = list(range(blocks))
        self._is_free = bytearray(b"\1") * blocks
        self._count = blocks
        for number in without:
            self.remove(number)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        return 0 <= number < len(self._is_free) and self._is_free[number] == 1

    def __iter__(self) -> Iterator[int]:
        """Returns the free numbers, the lowest first."""
        return (number for number, is_free in enumerate(self._is_free) if is_free)

    def popleft(self) -> int:
        """Takes the lowest free number. Raises IndexError if there is none."""
        while self._heap:
            number = heapq.heappop(self._heap)
            if self._is_free[number]:
                self._is_free[number] = 0
                self._count -= 1
                return number
        raise IndexError("no block number is free")

    def popleft_n(self, count: int) -> list[int]:
        """Takes the lowest free numbers, in order. Raises IndexError, with nothing changed, if there are fewer."""
        if not 0 <= count <= self._count:
            raise IndexError(f"{self._count} block numbers are free, not {count}")
        return [self.popleft() for _ in range(count)]

    def append(self, number: int) -> None:
        """Gives a number back. Raises ValueError if there is no such number, or it is free already."""
        self.append_n((number,))

    def append_n(self, numbers: Iterable[int]) -> None:
        """Gives numbers back, all or none. Raises ValueError as `append` does."""
        numbers = list(numbers)
        for number in numbers:
            if not 0 <= number < len(self._is_free) or self._is_free[number]:
                raise ValueError(f"block {number} was not taken")
        if len(set(numbers)) < len(numbers):
            raise ValueError("a block is named twice")
        for number in numbers:
            self._is_free[number] = 1
            heapq.heappush(self._heap, number)
        self._count += len(numbers)

    def extend(self, numbers: Iterable[int]) -> None:
        """Gives numbers back as `append_n` does, under the name that a deque has for it."""
        self.append_n(numbers)

    def remove(self, number: int) -> None:
        """Takes a number out. Raises ValueError if it is not free."""
        if number not in self:
            raise ValueError(f"block {number} is not free")
        self._is_free[number] = 0
        self._count -= 1

    def __repr__(self) -> str:
        return f"<cuvmm.torch.FreeNumbers {self._count} of {len(self._is_free)}>"


def packed(numbers: Any) -> tuple[bytes, int, int]:
    """Returns block numbers as the library takes them: their bytes, their count, and the bytes of each.

    >>> packed([1, 2])[1:], packed(array.array("i", [7]))[1:]
    ((2, 8), (1, 4))

    Raises TypeError for what has no whole numbers in host memory.
    """
    if hasattr(numbers, "data_ptr"):
        width = _DTYPES.get(str(numbers.dtype), 0)
        if numbers.device.type != "cpu" or not width:
            raise TypeError(
                f"block numbers are int32 or int64 in host memory, not {numbers.dtype} on {numbers.device}"
            )
        dense = numbers.contiguous()
        count = dense.numel()
        return (ctypes.string_at(dense.data_ptr(), count * width) if count else b""), count, width
    try:
        view = memoryview(numbers)
    except TypeError:
        view = None
    if view is None:
        try:
            view = memoryview(array.array("q", numbers))
        except OverflowError:
            raise Error(f"a block has a number from 0 to {MOST - 1}") from None
    width = _FORMATS.get(view.format.lstrip("@=<"), 0)
    if not width:
        raise TypeError(f"block numbers are int32 or int64, and not of the format {view.format!r}")
    return view.tobytes(), view.nbytes // width, width
