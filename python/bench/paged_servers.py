#!/usr/bin/env python3
"""Compares two servers in two processes that share a GPU's memory for keys and values.

    python3 python/bench/paged_servers.py find --service conv --conv azure-conv.csv
    python3 python/bench/paged_servers.py halves --scale 2 --conv azure-conv.csv --code azure-code.csv
    python3 python/bench/paged_servers.py cuvmm --scale 2 --conv azure-conv.csv --code azure-code.csv
    python3 python/bench/paged_servers.py kernel

The traces are those of the Azure LLM inference trace 2023 (`TIMESTAMP,ContextTokens,GeneratedTokens`). Each server
plays one from second 180 on, `--scale` times as fast, for `--seconds`. Then it has five seconds for what is left.
held/live is memory that the other server cannot have over the blocks in use, mapped/live all that a server has.

A server is a loop: admit requests in the order of arrival, run one step, hand out tokens. A step computes one token of
each running request and up to 4,096 tokens of prompts. `paged_model.py` has the model: a transformer with the shapes
of Qwen1.5-1.8B and random weights, whose kernels write and read keys and values by block numbers. A request that
cannot grow preempts the youngest one, whose tokens are computed again. After a refusal no request is admitted until
one has ended or a request for memory was granted, or for 20 ms. This is the same for all policies:

| policy | memory of keys and values |
|---|---|
| `halves` | a half for each server: one tensor, allocated when it starts |
| `cuvmm` | `cuvmm.torch.paged_kv` in each process, under one ledger |
| `kvcached` | kvcached's `KVCacheManager` and `alloc_kv_cache`; a tensor takes the memory that is not theirs |
| `find` | one server has all, at one scale after the other, until its p99 time to first token is 2 s or more |

`kernel` times the decode kernel over one tensor and over a paged cache, launched and in a captured graph.

Before a request ends, the keys of its first layer are compared with those of its tokens. A run takes less than 100 s.
`halves --dry` needs no GPU: it plays in virtual time with the costs of `Costs`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from paged_caches import BLOCK_BYTES, GIB, Kvcached, Paged, Whole, blocks_of, take_the_rest
from paged_engine import LONGEST, Costs, RealTime, Server, requests_of

#: The memory of keys and values, and the scales to find one among.
MEMORY, SCALES = 16 * GIB, (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
#: The p99 time to first token that a scale must keep, and the time for requests that are left when no more arrive.
BOUND, REST = 2.0, 5.0
SERVICES = ("conv", "code")


def percentile(values: list[float], part: float) -> float:
    """Returns the value below which a part of them lies, 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def summary(name: str, figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums up one server, or both."""
    ttft = [time for one in figures for time in one["ttft_s"]]
    spent = [time for one in figures for time in one["spent_s"]]
    live, held, mapped = (sum(sample[of] for one in figures for sample in one["samples"]) for of in range(3))
    return {
        "server": name,
        "requests": sum(one["requests"] for one in figures),
        "ended": sum(one["ended"] for one in figures),
        "unserved": sum(one["unserved"] for one in figures),
        "ttft_p50_ms": percentile(ttft, 0.5) * 1e3,
        "ttft_p99_ms": percentile(ttft, 0.99) * 1e3,
        "tokens_per_s": sum(one["tokens_per_s"] for one in figures),
        "memory_us_per_step": statistics.fmean(spent) * 1e6 if spent else 0.0,
        "memory_p99_us": percentile(spent, 0.99) * 1e6,
        "memory_share": sum(spent) / max(sum(one["played_s"] for one in figures), 1e-9),
        "held_over_live": held / live if live else 0.0,
        "mapped_over_live": mapped / live if live else 0.0,
        "preempted": sum(one["preempted"] for one in figures),
        "wrong": sum(one["wrong"] for one in figures),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| server | requests | ended | unserved | TTFT p50 ms | p99 ms | tokens/s | memory calls µs a step | p99 µs"
        " | % of time | held/live | mapped/live | preempted | wrong |",
        "|" + "---|" * 14,
    ]
    for row in rows:
        lines.append(
            f"| {row['server']} | {row['requests']} | {row['ended']} | {row['unserved']} | {row['ttft_p50_ms']:.0f}"
            f" | {row['ttft_p99_ms']:.0f} | {row['tokens_per_s']:.0f} | {row['memory_us_per_step']:.1f}"
            f" | {row['memory_p99_us']:.0f} | {row['memory_share'] * 100:.2f} | {row['held_over_live']:.2f}"
            f" | {row['mapped_over_live']:.2f} | {row['preempted']} | {row['wrong']} |"
        )
    return "\n".join(lines)


@dataclasses.dataclass
class Order:
    """What one server does."""

    name: str
    policy: str
    trace: str
    scale: float
    seconds: float
    memory: int
    ledger: str | None
    precommit: int = 0
    guarantee: float = 0.0
    calls: str = "request"


def cache_of(order: Order) -> Any:
    blocks = order.memory // BLOCK_BYTES
    if order.policy == "cuvmm":
        terms = {"precommit": order.precommit, "guarantee": order.guarantee, "calls": order.calls}
        return Paged(blocks, order.name, order.ledger, **terms)
    if order.policy == "kvcached":
        return Kvcached(blocks, order.name)
    return Whole(blocks // 2 if order.policy == "halves" else blocks)


def serve(order: Order, pipe: Any) -> None:
    """Plays one server in a process of its own: says that it is ready, hears when to start, and says the figures."""
    from paged_model import Model

    cache = cache_of(order)
    model = Model(cache.parts(), cache.take, cache.give)
    scales = SCALES if order.policy == "find" else (order.scale,)
    gc.collect()
    # A collection of garbage does not look at what is there from the start.
    gc.freeze()
    pipe.send(cache.figures()[2])
    clock = RealTime(pipe.recv())
    for scale in scales:
        requests = requests_of(order.trace, scale, order.seconds)
        server = Server(requests, cache, model, clock)
        server.play(order.seconds + REST)
        figures = server.figures(order.seconds)
        server.abandon()
        pipe.send(figures)
        if order.policy != "find" or percentile(figures["ttft_s"], 0.99) >= BOUND:
            break
        clock = RealTime(time.monotonic())
    pipe.send(None)


#: A server's order, its figures, and why it failed, if it did.
Result = tuple[Order, list[dict[str, Any]], str]


class Child:
    """A server's process."""

    def __init__(self, order: Order, target: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.order, self.error = order, ""
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=target, args=(order, other), daemon=True)
        self.process.start()
        other.close()

    def heard(self, seconds: float) -> Any:
        """Returns what the server says next, and None if it has ended or says nothing in time."""
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
            self.error = f"it said nothing for {seconds:.0f} s"
        except EOFError:
            self.process.join(10)
            self.error = f"it ended with exit code {self.process.exitcode}"
        return None


def play(orders: list[Order], ballast: bool, targets: Any = (serve, serve)) -> list[Result]:
    """Plays servers at the same time."""
    children = [Child(*each) for each in zip(orders, targets, strict=False)]
    ready = [child.heard(90) for child in children]
    kept = take_the_rest(sum(held or 0 for held in ready), orders[0].memory) if ballast else None
    start = time.monotonic() + 0.5
    for child in children:
        if not child.error:
            child.pipe.send(start)
    results = []
    for child in children:
        found: list[dict[str, Any]] = []
        while not child.error and (said := child.heard(child.order.seconds + REST + 30)):
            found.append(said)
        results.append((child.order, found, child.error))
    for child in children:
        child.process.join(10)
        if child.process.is_alive():
            child.process.kill()
    del kept
    return results


def dry(given: argparse.Namespace) -> list[Result]:
    """Plays each server alone in virtual time, without a GPU."""
    results = []
    for order in orders_of(given, None):
        costs = Costs()
        server = Server(requests_of(order.trace, order.scale, order.seconds), cache_of(order), costs, costs)
        server.play(order.seconds + REST)
        results.append((order, [server.figures(order.seconds)], ""))
    return results


def orders_of(given: argparse.Namespace, ledger: str | None) -> list[Order]:
    names = SERVICES if given.policy != "find" else (given.service,)
    return [
        Order(
            name,
            given.policy,
            getattr(given, name),
            given.scale,
            given.seconds,
            given.memory,
            ledger,
            given.precommit,
            given.guarantee,
            given.memory_calls,
        )
        for name in names
    ]


def report(given: argparse.Namespace, results: list[Result]) -> dict[str, Any]:
    """Prints the table of a run, and returns its rows."""
    if given.policy == "find":
        (order, found, error), *_ = results
        pairs = list(zip(SCALES, found, strict=False))
        rows = [summary(f"{order.name}, scale {scale:g}", [one]) for scale, one in pairs]
        kept = [scale for scale, one in pairs if percentile(one["ttft_s"], 0.99) < BOUND]
        print(f"# the highest scale of {order.name} with p99 TTFT < {BOUND:g} s: {max(kept, default=None)}")
    else:
        rows = [summary(order.name, found) for order, found, _ in results if found]
        rows.append(summary("both", [one for _, found, _ in results for one in found]))
    print(table(rows))
    died = {order.name: error for order, _, error in results if error}
    for name, error in died.items():
        print(f"{name} failed: {error}")
    return {"rows": rows, "died": died}


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", choices=("find", "halves", "cuvmm", "kvcached", "kernel"))
    for name in SERVICES:
        parser.add_argument(f"--{name}", metavar="FILE", help=f"the trace of {name}")
    parser.add_argument("--service", choices=SERVICES, default="conv", help="whose scale to find")
    parser.add_argument("--scale", type=float, default=2.0, help="how many times as fast the traces are played")
    parser.add_argument("--seconds", type=float, help="how long requests arrive; 20, or 5 for each scale")
    parser.add_argument("--memory", type=float, default=MEMORY / GIB, help="GiB of keys and values of both")
    parser.add_argument("--precommit", type=int, default=0, help="blocks that the paged caches map ahead")
    parser.add_argument("--guarantee", type=float, default=0.0, help="the part of the memory that each always has")
    calls = "how `cuvmm` asks where memory is short: requests that stay in line, or calls that wait now and then"
    parser.add_argument("--memory-calls", choices=("request", "back"), default="request", help=calls)
    parser.add_argument("--dry", action="store_true", help="play `halves` in virtual time, without a GPU")
    parser.add_argument("--json", metavar="FILE", help="writes the figures there")
    given = parser.parse_args(arguments)
    if given.seconds is None:
        given.seconds = 5.0 if given.policy == "find" else 20.0
    given.memory = int(given.memory * GIB)
    needed = () if given.policy == "kernel" else (given.service,) if given.policy == "find" else SERVICES
    missing = [name for name in needed if getattr(given, name) is None]
    if missing:
        parser.error(f"name the trace: --{missing[0]} FILE")
    if not 0 <= given.guarantee <= 0.5:
        parser.error("each of two servers can always have at most a half")
    if given.dry and given.policy != "halves":
        parser.error("--dry is for halves")
    if not (given.scale > 0 and given.seconds > 0 and given.memory >= 2 * blocks_of(LONGEST) * BLOCK_BYTES):
        parser.error(f"scale and seconds are above 0, and a half has room for a request of {LONGEST} tokens")
    return given


def main() -> None:
    given = options_of(sys.argv[1:])
    begun = time.monotonic()
    if given.policy == "kernel":
        from paged_model import kernel_rows

        found: dict[str, Any] = {"rows": kernel_rows()}
    else:
        kept = f", {given.guarantee:.0%} guaranteed to each" if given.guarantee else ""
        kept += f", memory calls: {given.memory_calls}" if given.policy == "cuvmm" else ""
        print(f"# {given.policy}{kept}, {given.memory / GIB:g} GiB, scale {given.scale:g}, {given.seconds:g} s")
        if given.dry:
            found = report(given, dry(given))
        else:
            memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
            with tempfile.TemporaryDirectory(dir=memory) as folder:
                orders = orders_of(given, os.path.join(folder, "ledger"))
                found = report(given, play(orders, given.policy == "kvcached"))
    print(f"# {time.monotonic() - begun:.0f} s in all")
    if given.json:
        with open(given.json, "w") as file:
            names = ("policy", "scale", "seconds", "guarantee", "memory_calls")
            terms = {name: getattr(given, name) for name in names}
            json.dump({**terms, **found}, file, indent=1)


if __name__ == "__main__":
    main()
