#!/usr/bin/env python3
"""Compares the steps of training runs under PyTorch's allocators and under cuvmm's heap, in turns.

    python3 steps.py --library libcuvmm_torch.so --json steps.json

Each allocator has a process of its own, and all train the same model on the same batches. They take
turns: each does one step while the others are idle, and each turn begins with another one. So all see
the same machine, and a step is compared with the same step of the native allocator. Needs a GPU with
memory for all models at once, and PyTorch.

    ratio    the median over all turns of a step's time by the native allocator's, and the quartiles
    sum      the sum of all steps by the native allocator's
    queued   the part of a step's time in which the processor queues the work; in the rest it waits for
             the GPU. A step with a large part is bound by the processor
    held     the most that the allocator had from the driver so far, by its own count

The first turns are not counted (`--warm`). `--scale` makes batches larger, so that the GPU takes longer
and the processor hardly does.
"""

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time

from compare import ALLOCATORS, HERE, TRAININGS, Allocator, chosen, written

COMPARED = ["native", "expandable", "cuvmm tight", "cuvmm fast"]
GIB = 1 << 30


# In the process of an allocator.


def work(allocator, scenario, library, seed, scale):
    """Does a step for each line of the input, and answers with its figures."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What libraries print does not mix with answers.
    os.dup2(2, 1)
    under_test = Allocator(ALLOCATORS[allocator][1], library, None)
    torch = under_test.torch
    import laws
    import models

    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    model, loss_of = models.RUNS[scenario](laws.Random(seed), scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    print(json.dumps({"torch": torch.__version__}), file=answers)
    for _ in sys.stdin:
        torch.cuda.synchronize()
        begun, used = time.perf_counter_ns(), time.process_time_ns()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        queued = time.perf_counter_ns() - begun
        final = loss.item()
        took, used = time.perf_counter_ns() - begun, time.process_time_ns() - used
        del loss
        row = {"ms": took / 1e6, "queued_ms": queued / 1e6, "cpu_ms": used / 1e6, "loss": final}
        row.update(under_test.figures())
        print(json.dumps(row), file=answers)


# In the process that the user starts.


class Process:
    """An allocator's process."""

    def __init__(self, allocator, scenario, options):
        settings = ALLOCATORS[allocator][0]
        environment = dict(os.environ)
        for name in ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]:
            environment.pop(name, None)
            if settings:
                environment[name] = settings
        command = [sys.executable, os.path.join(HERE, "steps.py"), "--work", allocator]
        command += ["--scenarios", scenario, "--seed", str(options.seed)]
        command += ["--scale", str(options.scale)]
        command += ["--library", os.path.abspath(options.library)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.rows, self.failed = [], None

    def answer(self, until):
        # It writes one line for each that it reads.
        left = max(0.0, until - time.monotonic())
        if not select.select([self.process.stdout], [], [], left)[0]:
            self.failed = "did not answer in time"
        elif line := self.process.stdout.readline():
            return json.loads(line)
        else:
            self.failed = "ended with status %s" % self.process.wait()
        return None

    def step(self, until):
        if self.failed is None:
            with contextlib.suppress(OSError):
                self.process.stdin.write("\n")
                self.process.stdin.flush()
            row = self.answer(until)
            if row is not None:
                self.rows.append(row)

    def end(self):
        self.process.kill()
        self.process.wait()


def in_turns(scenario, allocators, options, until):
    """Runs a training run, and returns the rows of all steps by allocator, and those that failed."""
    processes = {name: Process(name, scenario, options) for name in allocators}
    try:
        for process in processes.values():
            process.answer(until)
        for turn in range(options.warm + options.steps):
            if time.monotonic() > until:
                break
            first = turn % len(allocators)
            for name in allocators[first:] + allocators[:first]:
                processes[name].step(until)
    finally:
        for process in processes.values():
            process.end()
    rows = {name: process.rows for name, process in processes.items()}
    return rows, {name: it.failed for name, it in processes.items() if it.failed}


def summary(rows, natives, warm):
    """An allocator's figures beside the native allocator's."""
    counted = list(zip(rows, natives))[warm:]
    if not counted:
        return None
    ratios = sorted(ours["ms"] / theirs["ms"] for ours, theirs in counted)
    total = lambda which: sum(pair[which]["ms"] for pair in counted)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "turns": len(counted),
        "step_ms": statistics.median(ours["ms"] for ours, _ in counted),
        "queued": statistics.median(ours["queued_ms"] / ours["ms"] for ours, _ in counted),
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "sum": total(0) / total(1),
        "held_by_live": rows[-1]["held"] / rows[-1]["live"],
        "held": rows[-1]["held"],
        "loss": rows[-1]["loss"],
    }


def compare(options):
    allocators = chosen(options.allocators, COMPARED)
    if "native" not in allocators:
        sys.exit("steps are compared with those of the native allocator: name it too")
    until = time.monotonic() + options.seconds
    report = {"version": 1, "seed": options.seed, "scale": options.scale, "scenarios": {}}
    for scenario in chosen(options.scenarios, TRAININGS):
        rows, failed = in_turns(scenario, allocators, options, until)
        found = {name: summary(rows[name], rows["native"], options.warm) for name in allocators}
        report["scenarios"][scenario] = {"summary": found, "failed": failed, "steps": rows}
        written(options.json, report)
        print("\n### %s\n" % scenario)
        print("| allocator | held/live | held GiB | step ms | queued | ratio (quartiles) | sum | turns | loss |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name, row in found.items():
            if row is None:
                print("| %s | %s |" % (name, failed.get(name, "no time was left")))
                continue
            ratio = "%.4f (%.4f to %.4f)" % (row["ratio"], *row["quartiles"])
            cells = [name, "%.3f" % row["held_by_live"], "%.2f" % (row["held"] / GIB)]
            cells += ["%.2f" % row["step_ms"], "%.2f" % row["queued"], ratio, "%.4f" % row["sum"]]
            print("| %s |" % " | ".join([*cells, str(row["turns"]), "%.5f" % row["loss"]]), flush=True)


def main():
    parser = argparse.ArgumentParser(description="Compares steps of training runs in turns.")
    parser.add_argument("--library", default=os.path.join(HERE, "..", "lib", "libcuvmm_torch.so"))
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--seconds", type=float, default=300, help="for the whole [300]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="that are counted [60]")
    parser.add_argument("--warm", type=int, default=10, help="steps before them [10]")
    parser.add_argument("--scale", type=int, default=1, help="how often as large a batch is [1]")
    parser.add_argument("--allocators", metavar="LIST", help="some of: " + ", ".join(COMPARED))
    parser.add_argument("--scenarios", metavar="LIST", help="some of: " + ", ".join(TRAININGS))
    parser.add_argument("--work", metavar="ALLOCATOR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.scenarios, options.library, options.seed, options.scale)
    else:
        compare(options)


if __name__ == "__main__":
    main()
