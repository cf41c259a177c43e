#!/usr/bin/env python3
"""Runs torch_memory_saver's `test_examples.py` over cuvmm: `python3 python/tests/tms_examples.py CHECKOUT`.

CHECKOUT is a clone of torch_memory_saver. Its files are used as they are: a package of its name, made
for the run, has the classes of `cuvmm.torch.memory_saver`, and what only its tests use from the clone.
Needs PyTorch, a GPU with 20 GiB, and the package `cuvmm`, or `CUVMM_LIBRARY` and the sources beside this
folder; no pytest and no network. `--install` runs everything under `cuvmm.torch.install`. NAMES are parts
of names of tests.

Each test has a process of its own. The run fails if a test fails that is not in `KNOWN`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

HERE = os.path.dirname(os.path.abspath(__file__))

#: What fails, and why.
KNOWN = {
    "test_cpu_backup[": "reads contents after resume, and takes pools out of torch_memory_saver's own class",
    "test_disk_backup[": "contents are not kept on a disk",
    "test_cuda_vmm_granularity": "memory of cudaMalloc that is not PyTorch's is not taken",
    "test_training_engine": "fills 120 % of the device, and PyTorch gives free memory of a pool back for nothing",
}

# The package `torch_memory_saver` of the run. The examples ask the C library of theirs for its state.
PACKAGE = '''
import contextlib
import os
import types

import torch
from cuvmm.torch.memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver

__path__.append(os.path.join(os.environ["CUVMM_TMS"], "torch_memory_saver"))

if os.environ.get("CUVMM_TMS_INSTALL"):
    import cuvmm.torch
    cuvmm.torch.is_installed() or cuvmm.torch.install()

try:
    import pynvml
except ImportError:
    def device_memory_used(device=None):
        free, total = torch.cuda.cudart().cudaMemGetInfo(device or 0)
        return total - free
    torch.cuda.device_memory_used = device_memory_used


class State:
    def __init__(self):
        backend = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", "pinned")
        backup = os.environ.get("TMS_INIT_ENABLE_CPU_BACKUP") == "1"
        self.entered = [(os.environ.get("TMS_INIT_ENABLE") == "1", "default", backup, backend)]
        self.tms_get_interesting_region = lambda: self.entered[-1][0]
        self.tms_get_current_tag = lambda: self.entered[-1][1].encode()
        self.tms_get_enable_cpu_backup = lambda: self.entered[-1][2]
        self.tms_get_cpu_backup_backend = lambda: self.entered[-1][3].encode()


state, entering = State(), TorchMemorySaver.region


@contextlib.contextmanager
def region(self, tag="default", enable_cpu_backup=False, enable_disk_backup=False, cpu_backup_backend=None):
    with entering(self, tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend):
        state.entered.append((True, tag, enable_cpu_backup, cpu_backup_backend or state.entered[-1][3]))
        try:
            yield
        finally:
            state.entered.pop()


TorchMemorySaver.region = region
TorchMemorySaver._impl = types.SimpleNamespace(_binary_wrapper=types.SimpleNamespace(cdll=state))
'''

# The parts of pytest that the file uses, where there is no pytest.
PYTEST = '''
import types


def marked(name):
    def make(*args, **kwargs):
        def mark(function):
            of = types.SimpleNamespace(name=name, args=args, kwargs=kwargs)
            function.pytestmark = [*getattr(function, "pytestmark", ()), of]
            return function
        return mark
    return make


mark = types.SimpleNamespace(parametrize=marked("parametrize"), skipif=marked("skipif"))
'''


def prepare(folder: str, checkout: str, installs: bool) -> None:
    """Writes the package, and sets where this process and its children find modules."""
    package = os.path.join(folder, "torch_memory_saver")
    os.makedirs(package)
    texts = {os.path.join(package, "__init__.py"): PACKAGE}
    if importlib.util.find_spec("pytest") is None:
        texts[os.path.join(folder, "pytest.py")] = PYTEST
    for path, text in texts.items():
        with open(path, "w") as file:
            file.write(text)
    found = [folder, os.path.join(checkout, "test")]
    if importlib.util.find_spec("cuvmm") is None:
        found.append(os.path.join(os.path.dirname(HERE), "src"))
    sys.path[:0] = found
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(found + [before] * bool(before))
    os.environ["CUVMM_TMS"] = checkout
    if installs:
        os.environ["CUVMM_TMS_INSTALL"] = "1"


def cases(function: Callable[..., None]) -> Iterator[tuple[str, dict[str, object], str | None]]:
    """Returns the names of a test's cases, their arguments, and the reason to skip them, if any."""
    marks = getattr(function, "pytestmark", ())
    skips = [it.kwargs["reason"] for it in marks if it.name == "skipif" and it.args[0]]
    options = [[(it.args[0], value) for value in it.args[1]] for it in marks if it.name == "parametrize"]
    for chosen in itertools.product(*options):
        values = "-".join(str(value) for _, value in chosen)
        name = function.__name__ + (f"[{values}]" if values else "")
        yield name, dict(chosen), (skips or [None])[0]


def run(name: str, limit: float, log: str) -> str:
    """Runs a case in a process of its own. Returns how it ended."""
    try:
        ended = subprocess.run(
            [sys.executable, os.path.abspath(__file__), os.environ["CUVMM_TMS"], "--case", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
        )
        said, failed = ended.stdout, ended.returncode != 0
    except subprocess.TimeoutExpired as late:
        said, failed = (late.stdout or b"") + f"\nmore than {limit:.0f} s".encode(), True
    with open(os.path.join(log, name + ".log"), "wb") as file:
        file.write(said)
    if failed:
        print(said.decode(errors="replace")[-2000:], flush=True)
    return "FAILED" if failed else "passed"


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs torch_memory_saver's examples over cuvmm.")
    parser.add_argument("checkout", help="a clone of torch_memory_saver")
    parser.add_argument("names", nargs="*", help="parts of names of tests")
    parser.add_argument("--install", action="store_true", help="under cuvmm.torch.install")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a test")
    parser.add_argument("--log", default="tms-examples", help="folder for the output of each test")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is None:
        needed = os.path.join(options.checkout, "torch_memory_saver", "testing_utils.py")
        if not os.path.exists(needed):
            parser.error(f"a whole clone of torch_memory_saver is needed: there is no {needed}")
        with tempfile.TemporaryDirectory() as folder:
            prepare(folder, os.path.abspath(options.checkout), options.install)
            sys.exit(run_all(options.names, options.limit, options.log))
    # What is imported first finds the package of the run by PYTHONPATH.
    examples = importlib.import_module("test_examples")
    function = getattr(examples, options.case.partition("[")[0])
    function(**next(arguments for name, arguments, _ in cases(function) if name == options.case))


def run_all(names: list[str], limit: float, log: str) -> int:
    """Runs all cases, and prints how they ended. Returns 1 if one failed that is not known to, or none ran."""
    os.makedirs(log, exist_ok=True)
    examples = importlib.import_module("test_examples")
    counts = {"passed": 0, "FAILED": 0, "skipped": 0, "known": 0}
    for function in [it for name, it in vars(examples).items() if name.startswith("test_")]:
        for name, _, reason in cases(function):
            if names and not any(part in name for part in names):
                continue
            outcome = "skipped" if reason else run(name, limit, log)
            known = next((why for it, why in KNOWN.items() if name.startswith(it)), None)
            if outcome == "FAILED" and known:
                outcome, reason = "known", known
            counts[outcome] += 1
            print(f"{outcome:8} {name}" + (f": {reason}" if reason else ""), flush=True)
    print(
        f"{counts['passed']} passed, {counts['FAILED']} failed,"
        f" {counts['skipped'] + counts['known']} skipped ({counts['known']} fail as they are known to)"
    )
    return int(counts["FAILED"] > 0 or counts["passed"] == 0)


if __name__ == "__main__":
    main()
