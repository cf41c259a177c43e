"""A server of `paged_servers.py`: what arrives, and the loop that serves it."""

from __future__ import annotations

import collections
import csv
import dataclasses
import datetime
import itertools
import time
from typing import Any

from paged_caches import blocks_of

#: The second of the traces at which they begin.
BEGIN = 180.0
#: The most tokens of a request, requests of a step, and prompt tokens of a step.
LONGEST, RUNNING, CHUNK = 8192, 256, 4096
#: Seconds after a refusal at which memory of the other server is tried for again, if no request has ended before.
AGAIN = 0.02
#: The first seconds, which do not count as steady load.
WARM = 5.0


@dataclasses.dataclass
class Request:
    """A request of a trace, and its state in a server."""

    number: int
    #: Seconds after the start.
    at: float
    context: int
    generated: int
    #: Tokens that were handed out, and those whose keys and values are in the cache.
    produced: int = 0
    length: int = 0
    #: Tokens that must be in the cache before the next one is handed out.
    prompt: int = 0
    numbers: list[int] = dataclasses.field(default_factory=list)
    #: The row of the block table; -1 if the request does not run.
    slot: int = -1
    first: float | None = None


def requests_of(path: str, scale: float, seconds: float) -> list[Request]:
    """Reads the requests that arrive within `seconds`, `scale` times as fast as in the trace.

    Those of more than `LONGEST` tokens are left out.
    """
    found: list[Request] = []
    begun = None
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            # Seven decimals are more than Python reads.
            when = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            begun = when if begun is None else begun
            at = (when - begun - BEGIN) / scale
            context, generated = max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"]))
            if 0 <= at < seconds and context + generated <= LONGEST:
                found.append(Request(len(found), at, context, generated, prompt=context))
    return sorted(found, key=lambda it: it.at)


class RealTime:
    """Seconds after a time of the machine's monotonic clock, which all processes share."""

    def __init__(self, start: float) -> None:
        self.start = start

    def now(self) -> float:
        return time.monotonic() - self.start

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, min(until - self.now(), 0.05)))


class Costs:
    """A model and a clock without a GPU: the time of each step is computed."""

    step, prompt_token, cached_token = 5e-3, 10e-6, 60e-9

    def __init__(self) -> None:
        self.time, self.wrong = 0.0, 0

    def now(self) -> float:
        return self.time

    def wait(self, until: float) -> None:
        self.time = max(self.time, until)

    def place(self, request: Request, at: int) -> None:
        pass

    def ends(self, request: Request) -> None:
        pass

    def run(self, decodes: list[Request], chunks: list[tuple[Request, int]]) -> None:
        read = sum(one.length for one in decodes)
        self.time += self.step + self.prompt_token * sum(count for _, count in chunks) + self.cached_token * read


class Server:
    """Serves requests step by step. `model` computes and `clock` tells the time: both may be `Costs`."""

    def __init__(self, requests: list[Request], cache: Any, model: Any, clock: Any) -> None:
        self.arriving = collections.deque(requests)
        self.cache, self.model, self.clock = cache, model, clock
        self.waiting: collections.deque[Request] = collections.deque()
        #: The running requests, the one that was admitted last at the end.
        self.running: list[Request] = []
        self.slots = list(range(RUNNING))[::-1]
        #: The time at which the next request may be admitted.
        self.again = 0.0
        self.first: list[float] = []
        self.handed: list[tuple[float, int]] = []
        #: Seconds in calls of the cache in each step.
        self.spent: list[float] = []
        self.samples: list[tuple[int, int, int]] = []
        self.preempted, self.ended = 0, 0

    def play(self, until: float) -> None:
        """Plays until all requests have ended, or a time."""
        sampled = 0.0
        while self.clock.now() < until and (self.arriving or self.waiting or self.running):
            self.arrive()
            if not self.step():
                # Nothing runs: the next event is an arrival, or the other server gives memory back.
                soon = self.clock.now() + 1e-3
                self.clock.wait(soon if self.waiting else self.arriving[0].at)
            if self.clock.now() >= sampled:
                sampled = self.clock.now() + 0.1
                self.samples.append(self.cache.figures())

    def arrive(self) -> None:
        while self.arriving and self.arriving[0].at <= self.clock.now():
            self.waiting.append(self.arriving.popleft())

    def step(self) -> bool:
        """Runs one step. Returns False if no request has memory."""
        self.spent.append(0.0)
        decodes = self.grow()
        chunks, left = [], CHUNK
        for one in self.running:
            if one.length < one.prompt and left > 0:
                chunks.append((one, min(left, one.prompt - one.length)))
                left -= chunks[-1][1]
        while left > 0 and self.waiting and self.slots and self.may_admit():
            if not self.admit(self.waiting[0]):
                self.again = self.clock.now() + AGAIN
                break
            one = self.waiting.popleft()
            chunks.append((one, min(left, one.prompt)))
            left -= chunks[-1][1]
        if not self.waiting:
            self.timed(self.cache.suffices)
        if not decodes and not chunks:
            self.spent.pop()
            return False
        self.model.run(decodes, chunks)
        self.hand_out(decodes, chunks)
        return True

    def may_admit(self) -> bool:
        return self.clock.now() >= self.again or self.timed(self.cache.is_granted)

    def grow(self) -> list[Request]:
        """Gives the requests that decode a block for their next token, and preempts the youngest until there is one
        for each. Returns the requests that decode."""
        while True:
            decodes = [one for one in self.running if one.length >= one.prompt]
            growing = [one for one in decodes if blocks_of(one.length + 1) > len(one.numbers)]
            if not growing:
                return decodes
            numbers = self.take(len(growing))
            if numbers is not None:
                for one, number in zip(growing, numbers, strict=True):
                    self.place(one, [number])
                return decodes
            self.preempt(self.running[-1])
            self.again = self.clock.now() + AGAIN

    def admit(self, one: Request) -> bool:
        numbers = self.take(blocks_of(one.prompt))
        if numbers is None:
            return False
        one.slot = self.slots.pop()
        self.running.append(one)
        self.place(one, numbers)
        return True

    def place(self, one: Request, numbers: list[int]) -> None:
        at = len(one.numbers)
        one.numbers.extend(numbers)
        self.model.place(one, at)

    def abandon(self) -> None:
        """Gives the blocks of running requests back."""
        for one in list(self.running):
            self.leave(one)
        self.cache.suffices()

    def preempt(self, one: Request) -> None:
        self.preempted += 1
        self.leave(one)
        one.prompt, one.length = one.context + one.produced, 0
        self.waiting.appendleft(one)

    def leave(self, one: Request) -> None:
        self.timed(self.cache.give, one.numbers)
        self.running.remove(one)
        self.slots.append(one.slot)
        one.numbers, one.slot = [], -1

    def take(self, count: int) -> list[int] | None:
        return self.timed(self.cache.take, count)

    def timed(self, call: Any, *arguments: Any) -> Any:
        """Calls a function of the cache, whose time counts in the step."""
        begun = time.perf_counter()
        found = call(*arguments)
        self.spent[-1] += time.perf_counter() - begun
        return found

    def hand_out(self, decodes: list[Request], chunks: list[tuple[Request, int]]) -> None:
        """Notes the step's tokens, and lets requests go that have all of theirs."""
        now, tokens = self.clock.now(), 0
        for one, count in itertools.chain(((one, 1) for one in decodes), chunks):
            one.length += count
            if one.length < one.prompt:
                continue
            one.produced += 1
            tokens += 1
            if one.first is None:
                one.first = now
                self.first.append(now - one.at)
            if one.produced == one.generated:
                self.ended += 1
                self.model.ends(one)
                self.leave(one)
                self.again = 0.0
        self.handed.append((now, tokens))

    def figures(self, seconds: float) -> dict[str, Any]:
        """Returns the figures of a run in which requests arrived for some seconds."""
        now = self.clock.now()
        unserved = [now - one.at for one in self.waiting if one.first is None]
        unserved += [now - one.at for one in self.running if one.first is None]
        unserved += [now - one.at for one in self.arriving if one.at < now]
        steady = sum(tokens for at, tokens in self.handed if WARM <= at < seconds)
        return {
            "requests": self.ended + len(self.waiting) + len(self.running) + len(self.arriving),
            "ended": self.ended,
            # A request without a token counts with the time for which it has waited.
            "ttft_s": self.first + unserved,
            "unserved": len(unserved),
            "tokens_per_s": steady / max(seconds - WARM, 1e-9),
            "spent_s": self.spent,
            "samples": self.samples,
            "preempted": self.preempted,
            "wrong": self.model.wrong,
            "played_s": now,
        }
