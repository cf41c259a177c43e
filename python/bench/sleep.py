#!/usr/bin/env python3
"""Sleep and wake of a model by cuvmm and by torch_memory_saver, with contents kept and discarded.

    python3 python/bench/sleep.py --tms torch_memory_saver-*.whl --json sleep.json

Needs a GPU, PyTorch, NumPy, and the package `cuvmm`. Fetch the peer with
`pip download --no-deps torch-memory-saver`; `--tms` takes the wheel, or the folder that it was unpacked
to. Without it only cuvmm is measured.

Each library has a process of its own with two models, one whose contents are kept and one whose
contents are discarded. The processes take turns, so that all see the same machine; the others are idle
meanwhile, and each turn begins with another one. Before each sleep and wake the work of the GPU is waited for, and after it too. Each turn
checks that the memory was given up, that the addresses are the same, and the contents of the model that
is kept. The first turn is shown apart: host memory is made in it. `--quick` takes at most 100 seconds,
with smaller models.

    cuvmm            cuvmm.torch.pool over PyTorch's own allocator
    cuvmm-installed  the same under cuvmm.torch.install
    tms-preload      torch_memory_saver as it is by default, with its library in LD_PRELOAD
    tms-torch        torch_memory_saver with hook_mode "torch"
    tms-preload-kept, tms-torch-kept
                     the same with TMS_RETAIN_CPU_BACKUP=1: the host memory of contents is kept for the next
                     sleep, as cuvmm keeps it
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

KINDS = ("kept", "discarded")
#: Of the libraries that keep their host memory.
KEPT = "-kept"
ALL = (
    "cuvmm",
    "cuvmm-installed",
    "tms-preload",
    "tms-torch",
    "tms-preload" + KEPT,
    "tms-torch" + KEPT,
)
MIB, GIB = 1 << 20, 1 << 30
#: What `--quick` sets.
QUICK = {"gib": 2.0, "turns": 5, "seconds": 90.0}


class Ours:
    """Pools of cuvmm."""

    def __init__(self, name: str) -> None:
        import cuvmm
        import cuvmm.torch

        if name == "cuvmm-installed":
            cuvmm.torch.install()
        self.cuvmm = cuvmm

    def region(self, kind: str):
        return self.cuvmm.torch.pool(kind)

    def sleep(self, kind: str) -> None:
        self.cuvmm.sleep(kind, keep=kind == "kept")

    def wake(self, kind: str) -> None:
        self.cuvmm.wake(kind)


class Peer:
    """Regions of torch_memory_saver."""

    def __init__(self, name: str) -> None:
        from torch_memory_saver import torch_memory_saver

        if name.removesuffix(KEPT) == "tms-torch":
            torch_memory_saver.hook_mode = "torch"
        self.saver = torch_memory_saver

    def region(self, kind: str):
        return self.saver.region(tag=kind, enable_cpu_backup=kind == "kept")

    def sleep(self, kind: str) -> None:
        self.saver.pause(kind)

    def wake(self, kind: str) -> None:
        self.saver.resume(kind)


class Models:
    """The two models of a process."""

    def __init__(self, library, gib: float, mib: int) -> None:
        import torch

        self.torch, self.library = torch, library
        count = max(1, int(gib * GIB / (mib * MIB)))
        self.tensors = {}
        for kind in KINDS:
            with library.region(kind):
                self.tensors[kind] = [
                    torch.empty(mib * MIB // 4, dtype=torch.int32, device="cuda")
                    for _ in range(count)
                ]
            for number, tensor in enumerate(self.tensors[kind]):
                tensor.fill_(number)
        self.bytes = count * mib * MIB
        self.addresses = {
            kind: [it.data_ptr() for it in tensors] for kind, tensors in self.tensors.items()
        }

    def free(self) -> int:
        return self.torch.cuda.cudart().cudaMemGetInfo(0)[0]

    def timed(self, call, kind: str) -> float:
        """Returns the milliseconds of a call."""
        self.torch.cuda.synchronize()
        begun = time.perf_counter()
        call(kind)
        self.torch.cuda.synchronize()
        return (time.perf_counter() - begun) * 1e3

    def turn(self, kind: str) -> dict[str, float]:
        """Puts a model to sleep and wakes it. Returns the milliseconds and the bytes given up."""
        before = self.free()
        asleep = self.timed(self.library.sleep, kind)
        given = self.free() - before
        if given < self.bytes * 0.99:
            raise AssertionError(f"{given / MIB:.0f} MiB were given up of {self.bytes / MIB:.0f}")
        awake = self.timed(self.library.wake, kind)
        tensors = self.tensors[kind]
        if [tensor.data_ptr() for tensor in tensors] != self.addresses[kind]:
            raise AssertionError("the addresses are others")
        for number, tensor in enumerate(tensors):
            if kind == "discarded":
                tensor.fill_(number)
            elif (int(tensor.min()), int(tensor.max())) != (number, number):
                raise AssertionError(f"the contents of tensor {number} are others")
        return {"sleep_ms": asleep, "wake_ms": awake, "given": given}


def work(name: str, gib: float, mib: int) -> None:
    """The process of a library: takes a turn for each line that it reads."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What libraries print does not mix with answers.
    os.dup2(2, 1)
    library = (Peer if name.startswith("tms-") else Ours)(name)
    models = Models(library, gib, mib)
    print(json.dumps({"bytes": models.bytes}), file=answers)
    for line in sys.stdin:
        print(json.dumps(models.turn(line.strip())), file=answers)


class Process:
    """A library's process, seen from the one that gives the turns."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], until: float
    ) -> None:
        """until: when the process is ended if it has not answered, as `time.monotonic` counts."""
        self.name, self.until = name, until
        self.turns, self.error = {kind: [] for kind in KINDS}, ""
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.bytes = (self.answer() or {}).get("bytes", 0)

    def answer(self) -> dict | None:
        """Returns what the process says next, or notes why it says nothing."""
        left = max(0.0, self.until - time.monotonic())
        # It writes one line for each that it is asked for.
        if not select.select([self.process.stdout], [], [], min(left, threading.TIMEOUT_MAX))[0]:
            self.process.kill()
            self.process.wait()
            self.error = "it did not answer in time"
            return None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines() or ["nothing was said"]
        self.error = f"exit {self.process.returncode}: {said[-1]}"
        return None

    def turn(self, kind: str) -> None:
        if self.error:
            return
        # A process that has ended says why below.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(kind + "\n")
            self.process.stdin.flush()
        if (found := self.answer()) is not None:
            self.turns[kind].append(found)

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            # It has said all that it was asked for.
            self.process.kill()
            self.process.wait()

    def result(self) -> dict:
        return {"name": self.name, "bytes": self.bytes, "error": self.error, "turns": self.turns}


def start(name: str, options: argparse.Namespace, folder: str | None, until: float) -> Process:
    """Starts the process of a library. Returns it when its models are there."""
    environment = dict(os.environ)
    environment.pop("TMS_RETAIN_CPU_BACKUP", None)
    if name.endswith(KEPT):
        environment["TMS_RETAIN_CPU_BACKUP"] = "1"
    if name.startswith("tms-"):
        paths = [folder or "", environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if name.removesuffix(KEPT) == "tms-preload":
        environment.update(preloading(folder or ""))
    command = [sys.executable, os.path.abspath(__file__), "--work", name]
    command += ["--gib", str(options.gib), "--tensor-mib", str(options.tensor_mib)]
    return Process(name, command, environment, until)


def take_turns(processes: list[Process], turns: int, until: float) -> int:
    """Lets the processes take turns, and returns how many each had.

    No turn begins that would not end in time if it took as long as the longest before.
    """
    longest = 0.0
    for turn in range(turns):
        begun = time.monotonic()
        if turn > 0 and begun + longest > until:
            return turn
        # No library always has the first turn, which begins when the machine has rested.
        first = turn % len(processes)
        for kind in KINDS:
            for process in processes[first:] + processes[:first]:
                process.turn(kind)
        # The first turn takes longer than any other.
        longest = time.monotonic() - begun
    return turns


def preloading(folder: str) -> dict[str, str]:
    """Returns the variables with which the peer's library is loaded before all others.

    It needs libcudart, which PyTorch has in a folder that the loader does not look in.
    """
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    found = glob.glob(f"{folder}/torch_memory_saver_hook_mode_preload_cu{major}.*.so")
    if not found:
        raise SystemExit(f"{folder} has no library for CUDA {major}: is it the unpacked wheel?")
    site = os.path.dirname(os.path.dirname(torch.__file__))
    runtimes = glob.glob(f"{site}/nvidia/*/lib/libcudart.so.{major}*")
    runtimes += glob.glob(f"{site}/torch/lib/libcudart*.so*")
    folders = [os.path.dirname(runtime) for runtime in runtimes]
    folders.append(os.environ.get("LD_LIBRARY_PATH", ""))
    return {
        "LD_PRELOAD": found[0],
        "LD_LIBRARY_PATH": os.pathsep.join(path for path in folders if path),
    }


def unpacked(path: str, into: str) -> str:
    """Returns the folder of a wheel that is unpacked, if it is not."""
    if os.path.isdir(path):
        return os.path.abspath(path)
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(into)
    return into


def figure(turns: list[dict], key: str) -> str:
    """Returns the median, the range and the first of the turns, in milliseconds."""
    first, *rest = [turn[key] for turn in turns]
    if not rest:
        return f"({first:.1f})"
    return f"{statistics.median(rest):.1f} ({min(rest):.1f} to {max(rest):.1f}; first {first:.1f})"


def table(results: list[dict]) -> str:
    """Returns the results as a table, in milliseconds."""
    rows = ["| library | contents | sleep ms | wake ms |", "|---|---|---|---|"]
    for result in results:
        for kind in KINDS:
            turns = result["turns"][kind]
            cells = [figure(turns, key) if turns else "-" for key in ("sleep_ms", "wake_ms")]
            rows.append(f"| {result['name']} | {kind} | {cells[0]} | {cells[1]} |")
    rows += [f"{it['name']} failed: {it['error']}" for it in results if it["error"]]
    return "\n".join(rows)


def medians(result: dict) -> dict[str, dict[str, float]]:
    """Returns the medians of all turns but the first, by kind and figure."""
    return {
        kind: {
            key: statistics.median(turn[key] for turn in turns[1:])
            for key in ("sleep_ms", "wake_ms")
        }
        for kind, turns in result["turns"].items()
        if len(turns) > 1
    }


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares sleep and wake with torch_memory_saver.")
    parser.add_argument("--gib", type=float, default=8, help="the size of each model")
    parser.add_argument("--tensor-mib", type=int, default=32, help="the size of each tensor")
    parser.add_argument("--turns", type=int, default=7, help="turns of each library and kind")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no turn that would end later"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="; ".join(f"--{name} {value:g}" for name, value in QUICK.items())
        + ", where they are not given",
    )
    parser.add_argument("--tms", help="the wheel of torch_memory_saver, or its folder")
    parser.add_argument("--only", help="libraries, separated by commas: " + ", ".join(ALL))
    parser.add_argument("--json", help="a file for all figures")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(arguments)
    options.names = options.only.split(",") if options.only else list(ALL)
    if unknown := set(options.names) - set(ALL):
        parser.error(f"no such library: {', '.join(sorted(unknown))}")
    if options.turns < 1 or options.gib <= 0 or options.tensor_mib < 1:
        parser.error("turns and sizes are positive")
    if not options.tms:
        options.names = [name for name in options.names if not name.startswith("tms-")]
        if not options.names:
            parser.error("torch_memory_saver is measured with --tms only")
    elif importlib.util.find_spec("numpy") is None:
        parser.error("torch_memory_saver needs NumPy")
    return options


def main() -> None:
    options = options_of(None)
    if options.work:
        work(options.work, options.gib, options.tensor_mib)
        return
    if not options.tms:
        print("without --tms only cuvmm is measured", file=sys.stderr)
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        tms = unpacked(options.tms, folder) if options.tms else None
        # One after the other, so that each finds the GPU idle.
        processes = [start(name, options, tms, until) for name in options.names]
        turns = take_turns(processes, options.turns, until)
        for process in processes:
            process.end()
    results = [process.result() for process in processes]
    print(f"{options.gib:g} GiB in tensors of {options.tensor_mib} MiB, {turns} turns each")
    print("median of all but the first (range; first), milliseconds")
    print(table(results))
    if options.json:
        sizes = {"gib": options.gib, "tensor_mib": options.tensor_mib}
        figures = [{**result, "medians": medians(result)} for result in results]
        with open(options.json, "w") as file:
            json.dump({**sizes, "results": figures}, file)
    sys.exit(any(result["error"] for result in results))


if __name__ == "__main__":
    main()
