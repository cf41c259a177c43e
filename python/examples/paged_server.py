#!/usr/bin/env python3
"""A server whose keys and values have memory under the blocks of its requests only. Start two with different names, and
watch how they share a GPU's memory:

    python3 paged_server.py chat --ledger /tmp/gpu0
    python3 paged_server.py code --ledger /tmp/gpu0
    cuvmm top --ledger /tmp/gpu0

Each has times with requests and times without. The blocks of ended requests are kept for their prefixes, until this
server needs their numbers or the other one their memory. Ctrl-C ends a server.

`Server.take` is the part of an engine that changes: it asks for memory without waiting, takes the server's own prefixes,
and else keeps a request that stands in line with those of other processes, while the server goes on.
"""

import argparse
import collections
import dataclasses
import random
import signal
import threading
import time

import torch

import cuvmm
import cuvmm.torch

#: 2 MiB a block.
LAYERS, TOKENS, HEADS, SIZE = 32, 16, 8, 128
#: Requests that run at a time, and steps after which requests begin or cease to arrive.
RUNNING, PHASE = 16, 200


@dataclasses.dataclass(eq=False)
class Request:
    """A request: its tokens so far and at its end, and the numbers of its blocks."""

    tokens: int
    last: int
    numbers: list[int] = dataclasses.field(default_factory=list)

    def lacks(self) -> int:
        """Returns how many blocks it needs for its next token."""
        return self.tokens // TOKENS + 1 - len(self.numbers)


class Server:
    def __init__(self, name: str, blocks: int, extent: str) -> None:
        group = cuvmm.torch.LayerGroup.keys_and_values(LAYERS, TOKENS, HEADS, SIZE, torch.bfloat16)
        # Another name than that of the process in the ledger.
        self.kv = cuvmm.torch.paged_kv(blocks, group, name="kv", extent=extent, on_pressure=self.evict)
        self.keys = self.kv.tensor(layer=0)
        self.name, self.free, self.random = name, self.kv.free_numbers(), random.Random(name)
        self.prefixes: collections.deque[int] = collections.deque()
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []
        #: The request for memory that stands in line, with its numbers, and numbers that one has got.
        self.standing: tuple[list[int], cuvmm.torch.BackRequest] | None = None
        self.granted: list[int] = []
        self.is_busy = True
        self.ended = self.preempted = self.evicted = self.steps = 0
        #: Held while numbers change hands: other threads evict prefixes.
        self.turn = threading.Lock()

    def evict(self, kv: cuvmm.torch.PagedKv, missing: int) -> None:
        """Gives up prefixes whose memory another process needs."""
        # A hook waits for no lock. This thread may have it: the server takes over its own prefixes itself.
        if not self.turn.acquire(blocking=False):
            return
        try:
            chosen = set(kv.emptiest(missing, list(self.prefixes)).numbers)
            kv.release(list(chosen))
            self.prefixes = collections.deque(number for number in self.prefixes if number not in chosen)
            self.free.append_n(list(chosen))
            self.evicted += len(chosen)
        finally:
            self.turn.release()

    def take(self, count: int) -> list[int] | None:
        """Returns the numbers of blocks with memory, or None."""
        with self.turn:
            if self.standing is not None and self.standing[1].done():
                self.end_standing()
            lacking = max(0, count - len(self.granted))
            if lacking <= len(self.free):
                numbers = self.free.popleft_n(lacking)
                if self.kv.try_back(numbers):
                    return numbers + self.pop_granted(count - lacking)
                self.free.append_n(numbers)
            if lacking <= len(self.prefixes):
                # The oldest prefixes. They have memory.
                prefixes = [self.prefixes.popleft() for _ in range(lacking)]
                return prefixes + self.pop_granted(count - lacking)
            if self.standing is None and lacking <= len(self.free):
                numbers = self.free.popleft_n(lacking)
                self.standing = numbers, self.kv.back_async(numbers)
            return None

    def pop_granted(self, count: int) -> list[int]:
        return [self.granted.pop() for _ in range(count)]

    def end_standing(self) -> None:
        """Takes what the standing request has got by now, or withdraws it."""
        assert self.standing is not None
        (numbers, request), self.standing = self.standing, None
        try:
            request.result(0)
        except (TimeoutError, cuvmm.OutOfMemoryError):
            request.cancel()
            self.free.append_n(numbers)
        else:
            self.granted += numbers

    def give_granted(self) -> None:
        """Gives up what no request needs any more."""
        with self.turn:
            if self.standing is not None:
                self.end_standing()
            self.kv.release(self.granted)
            self.free.append_n(self.granted)
            self.granted = []

    def step(self) -> None:
        """Admits requests, lets those that run grow, and computes a token of each."""
        self.steps += 1
        if self.steps % PHASE == 0:
            self.is_busy = self.random.random() < 0.6
        if self.is_busy and len(self.waiting) < RUNNING:
            prompt = self.random.randrange(1, 16 * TOKENS)
            self.waiting.append(Request(prompt, prompt + self.random.randrange(1, 8 * TOKENS)))
        while self.waiting and len(self.running) < RUNNING:
            numbers = self.take(self.waiting[0].lacks())
            if numbers is None:
                break
            request = self.waiting.popleft()
            request.numbers += numbers
            self.running.append(request)
        for request in list(self.running):
            while request in self.running and request.lacks() > 0:
                numbers = self.take(1)
                if numbers is None:
                    self.preempt()
                else:
                    request.numbers += numbers
        if not self.waiting:
            self.give_granted()
        # The blocks of requests that end here are used by the kernels of this step.
        with self.kv.step():
            for request in self.running:
                request.tokens += 1
                if request.tokens == request.last:
                    self.end(request)
            for request in self.running:
                # An engine passes all numbers to its kernels, as a block table.
                newest = request.numbers[-1]
                self.keys[newest : newest + 1].fill_(0)
        self.running = [request for request in self.running if request.tokens < request.last]

    def preempt(self) -> None:
        """Gives up the blocks of the youngest request, which starts again later."""
        request = self.running.pop()
        self.give(request.numbers)
        self.waiting.appendleft(Request(request.tokens, request.last))
        self.preempted += 1

    def end(self, request: Request) -> None:
        """Keeps a half of the blocks for their prefixes."""
        half = len(request.numbers) // 2
        self.give(request.numbers[half:])
        with self.turn:
            self.prefixes += request.numbers[:half]
        self.ended += 1

    def give(self, numbers: list[int]) -> None:
        with self.turn:
            self.kv.release(numbers)
            self.free.append_n(numbers)

    def close(self) -> None:
        """Gives up all blocks."""
        self.give_granted()
        with self.turn:
            self.kv.release([number for request in self.running for number in request.numbers] + list(self.prefixes))
            self.running, self.prefixes = [], collections.deque()

    def __str__(self) -> str:
        stats = self.kv.stats()
        return (
            f"{self.name}: {len(self.running)} running, {len(self.waiting)} waiting, {self.ended} ended,"
            f" {self.preempted} preempted, {stats.in_use} blocks in use, {len(self.prefixes)} of them prefixes,"
            f" {self.evicted} evicted, {stats.committed >> 20} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="A server that shares a GPU's memory with others of one ledger.")
    parser.add_argument("name", help="the name of the process in the ledger")
    parser.add_argument("--ledger", required=True, help="the folder of the ledger")
    parser.add_argument("--limit", default="4GiB", help="the memory of all servers, which the first one sets")
    parser.add_argument("--guarantee", default="512MiB", help="the memory that this server can always have")
    parser.add_argument("--blocks", type=int, default=2048, help="block numbers of 2 MiB of addresses each")
    parser.add_argument("--extent", default="16MiB", help="the bytes by which memory comes and goes")
    parser.add_argument("--pause", type=float, default=0.01, help="seconds between steps, in place of a model's kernels")
    options = parser.parse_args()
    cuvmm.configure(
        ledger=options.ledger, ledger_limit=options.limit, tenant=options.name, guarantee=options.guarantee
    )
    server = Server(options.name, options.blocks, options.extent)
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    while not stop.is_set():
        server.step()
        if server.steps % 100 == 0:
            print(server, flush=True)
        time.sleep(options.pause)
    server.close()
    assert server.kv.stats().in_use == 0
    print(server)


if __name__ == "__main__":
    main()
