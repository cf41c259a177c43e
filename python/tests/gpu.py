#!/usr/bin/env python3
"""Runs the GPU tests in all modes and prints a table: `python3 python/tests/gpu.py`.

Each file runs in a process of its own for each mode: on PyTorch's own allocator first, then under
`cuvmm.torch.install`, then in `cuvmm.torch.pool`. A test that fails natively too says nothing about
cuvmm. Needs PyTorch, a GPU, and the package `cuvmm`. NAMES are parts of names of files.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
MODES = ["native", "install", "pool"]
#: Compares the driver's figures or fills the device, so nothing else may run.
ALONE = (
    "test_gpu_graph_sleep",
    "test_gpu_keeping",
    "test_gpu_leaks",
    "test_gpu_publish",
    "test_gpu_saver",
    "test_gpu_sharing",
    "test_gpu_sleep",
)
MARK = "RESULTS "
PR_SET_PDEATHSIG = 1


class _Recorder(unittest.TextTestResult):
    """Keeps the outcome of each test."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.outcomes: dict[str, list[str]] = {}

    def _note(self, test, outcome, text=""):
        name = str(test.id()) if hasattr(test, "id") else str(test)
        before = self.outcomes.get(name, ["", ""])
        if before[0] == "FAILED":
            # What follows a failure, such as a failure of `tearDown`, does not hide it.
            outcome, text = "FAILED", f"{before[1]}\n{text}".rstrip()
        self.outcomes[name] = [outcome, text]

    def addSuccess(self, test):
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._note(test, "FAILED", self.failures[-1][1])

    def addError(self, test, error):
        super().addError(test, error)
        self._note(test, "FAILED", self.errors[-1][1])

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._note(test, "FAILED", str(error[1]))


def run_file(name: str) -> None:
    """Runs one file in this process, and prints the outcomes. It ends with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path.insert(0, HERE)
    try:
        suite = unittest.defaultTestLoader.loadTestsFromName(name)
    except unittest.SkipTest as reason:
        print(MARK + json.dumps({name: ["skipped", str(reason)]}), flush=True)
        return
    runner = unittest.TextTestRunner(resultclass=_Recorder, verbosity=2, stream=sys.stderr)
    result = runner.run(suite)
    print(MARK + json.dumps(result.outcomes), flush=True)


def start(name: str, mode: str, limit: float, log: str) -> tuple[str, str, dict, float]:
    begun = time.monotonic()
    command = [sys.executable, os.path.abspath(__file__), "--file", name]
    environment = {**os.environ, "CUVMM_MODE": mode, "PYTHONFAULTHANDLER": "1"}
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit
        )
        said, complained, code = ended.stdout, ended.stderr, ended.returncode
    except subprocess.TimeoutExpired as late:
        text = lambda data: data.decode(errors="replace") if isinstance(data, bytes) else data or ""
        said, complained, code = text(late.stdout), text(late.stderr), f"more than {limit:.0f} s"
    with open(os.path.join(log, f"{name}-{mode}.log"), "w") as file:
        file.write(said + complained)
    outcomes = {}
    for line in said.splitlines():
        if line.startswith(MARK):
            outcomes = json.loads(line[len(MARK) :])
        elif line.strip():
            print(line, flush=True)
    if code != 0 or not outcomes:
        # It ended before it reported: its last lines tell how far it got.
        outcomes[f"{name} (the process)"] = ["FAILED", f"exit {code}\n{complained[-3000:]}"]
    spent = time.monotonic() - begun
    failed = sum(outcome[0] == "FAILED" for outcome in outcomes.values())
    print(f"{name} {mode}: {len(outcomes)} tests in {spent:.0f} s, {failed} failed", flush=True)
    return name, mode, outcomes, spent


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the GPU tests in all modes.")
    parser.add_argument("names", nargs="*", help="parts of names of files")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--jobs", type=int, default=4, help="files that run at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a file")
    parser.add_argument("--log", default="gpu-tests", help="folder for the output of each file")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.file:
        run_file(options.file)
        return
    os.makedirs(options.log, exist_ok=True)
    files = sorted(name[:-3] for name in os.listdir(HERE) if name.startswith("test_gpu_"))
    if options.names:
        files = [file for file in files if any(name in file for name in options.names)]
    modes = options.modes.split(",")
    pairs = [(file, mode) for file in files for mode in modes]
    begin = lambda pair: start(*pair, options.limit, options.log)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(begin, [pair for pair in pairs if pair[0] not in ALONE]))
    done += [begin(pair) for pair in pairs if pair[0] in ALONE]
    sys.exit(report(done, modes))


def report(done: list[tuple[str, str, dict, float]], modes: list[str]) -> int:
    """Prints the table, reasons and failures. Returns 1 if a test failed."""
    rows: dict[str, dict[str, list[str]]] = {}
    counts = {"passed": 0, "FAILED": 0, "skipped": 0}
    for _, mode, outcomes, _ in done:
        for test, outcome in outcomes.items():
            rows.setdefault(test, {})[mode] = outcome
            counts[outcome[0]] += 1
    width = max((len(test) for test in rows), default=4)
    print("\n| " + "test".ljust(width) + " | " + " | ".join(mode.ljust(7) for mode in modes) + " |")
    print("|" + "-" * (width + 2) + "|" + "---------|" * len(modes))
    for test in sorted(rows):
        cells = [rows[test].get(mode, ["-"])[0].ljust(7) for mode in modes]
        print("| " + test.ljust(width) + " | " + " | ".join(cells) + " |")
    reasons = sorted(
        {
            (test, mode, it[1])
            for test, row in rows.items()
            for mode, it in row.items()
            if it[0] == "skipped"
        }
    )
    if reasons:
        print("\nSkipped:")
    for test, mode, reason in reasons:
        print(f"- {test} ({mode}): {reason}")
    for test in sorted(rows):
        for mode, (outcome, text) in rows[test].items():
            if outcome == "FAILED":
                print(f"\nFAILED {test} ({mode}):\n{text}")
    print("\nSeconds: " + ", ".join(f"{file} {mode} {spent:.0f}" for file, mode, _, spent in done))
    print(f"{counts['passed']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped")
    return int(counts["FAILED"] > 0 or counts["passed"] == 0)


if __name__ == "__main__":
    main()
