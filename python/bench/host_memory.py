#!/usr/bin/env python3
"""Times of host memory for contents: the first sleep, sleeps after it was given back, and launches meanwhile.

    python3 python/bench/host_memory.py --gib 8 --json host.json
    python3 python/bench/host_memory.py --gib 8 --pages never
    taskset -c 0,1 python3 python/bench/host_memory.py --gib 8

Needs a GPU, PyTorch, and the package `cuvmm`. Another thread launches empty work on a stream of its own all the
time; the time of each of its launches is noted. `--pages never` measures without huge pages. The steps, each of
which is timed alone:

    first sleep      no host memory is there
    wake
    sleep again      host memory is kept
    wake again
    sleep, release   host memory goes back to the system after the next wake
    wake, release    which does not wait for that
    sleep after      no host memory is there again
    release_host     after another wake
    prepare          takes host memory in advance
    sleep prepared
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Callable, Iterator

GIB, MIB = 1 << 30, 1 << 20
#: Of `prctl`: no huge pages for this process.
PR_SET_THP_DISABLE = 41


def percentile(times: list[float], part: float) -> float:
    """Returns a percentile, in the unit of the times, or 0 without times."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def no_huge_pages() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class Launches:
    """A thread that launches work all the time, and notes how long each launch takes, in ms."""

    def __init__(self, torch) -> None:
        self.torch, self.times, self.ends = torch, [], False
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        stream = self.torch.cuda.Stream()
        with self.torch.cuda.stream(stream):
            # Outside of the pools, and made before they sleep.
            memory = self.torch.zeros(1, device="cuda")
            while not self.ends:
                begun = time.perf_counter()
                memory.add_(1)
                self.times.append((time.perf_counter() - begun) * 1e3)
                time.sleep(0.0002)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        self.thread.start()
        try:
            yield
        finally:
            self.ends = True
            self.thread.join()


def steps(cuvmm) -> list[tuple[str, Callable[[], object]]]:
    return [
        ("first sleep", lambda: cuvmm.sleep("model", keep=True)),
        ("wake", lambda: cuvmm.wake("model")),
        ("sleep again", lambda: cuvmm.sleep("model", keep=True)),
        ("wake again", lambda: cuvmm.wake("model")),
        ("sleep, release", lambda: cuvmm.sleep("model", keep=True, host="release")),
        ("wake, release", lambda: cuvmm.wake("model")),
        ("sleep after", lambda: cuvmm.sleep("model", keep=True)),
        ("wake, kept", lambda: cuvmm.wake("model")),
        ("release_host", lambda: cuvmm.release_host("model")),
        ("prepare", lambda: cuvmm.prepare("model")),
        ("sleep prepared", lambda: cuvmm.sleep("model", keep=True)),
        ("wake prepared", lambda: cuvmm.wake("model")),
    ]


def measure(gib: float, mib: int) -> list[dict]:
    import torch

    import cuvmm
    import cuvmm.torch

    with cuvmm.torch.pool("model"):
        count = max(1, int(gib * GIB / (mib * MIB)))
        tensors = [torch.empty(mib * MIB, dtype=torch.uint8, device="cuda") for _ in range(count)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number % 251)
    torch.cuda.synchronize()
    launches, rows = Launches(torch), []
    with launches.going_on():
        time.sleep(0.5)
        for name, step in steps(cuvmm):
            before = len(launches.times)
            begun = time.perf_counter()
            step()
            took = (time.perf_counter() - begun) * 1e3
            times = launches.times[before:]
            rows.append(
                {
                    "step": name,
                    "ms": took,
                    "launches": len(times),
                    "p99_ms": percentile(times, 0.99),
                    "longest_ms": max(times, default=0.0),
                }
            )
            if name.startswith("wake"):
                for number, tensor in enumerate(tensors):
                    if (int(tensor.min()), int(tensor.max())) != (number % 251, number % 251):
                        raise AssertionError(f"the contents of tensor {number} are others after {name}")
                # Host memory that goes back does so meanwhile.
                time.sleep(0.5)
    return rows


def table(rows: list[dict]) -> str:
    lines = ["| step | ms | launches | p99 ms | longest ms |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['step']} | {row['ms']:.1f} | {row['launches']} | {row['p99_ms']:.2f} | {row['longest_ms']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", type=float, default=8, help="GiB of contents")
    parser.add_argument("--mib", type=int, default=32, help="MiB of each tensor")
    parser.add_argument("--pages", choices=("huge", "never"), default="huge", help="huge pages, or never")
    parser.add_argument("--json", help="a file for the figures")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    if options.pages == "never":
        no_huge_pages()
    rows = measure(options.gib, options.mib)
    print(table(rows))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"gib": options.gib, "pages": options.pages, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
