#!/usr/bin/env python3
"""Runs vLLM's tests of its sleeping allocator over cuvmm: `python3 python/tests/vllm_cumem.py FILE`.

FILE is `tests/basic_correctness/test_cumem.py` of vLLM, used as it is. vLLM itself is not needed: modules of its names,
made for the run, have an allocator with the methods of `CuMemAllocator` over `cuvmm.torch.pool`. Tests that load a model
are left out. Needs PyTorch, a GPU, and the package `cuvmm`. `--install` runs everything under `cuvmm.torch.install`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import types
from typing import Any


def module(name: str, **members: Any) -> None:
    made = types.ModuleType(name)
    vars(made).update(members)
    made.__path__ = []
    sys.modules[name] = made


def allocator() -> Any:
    import cuvmm
    import cuvmm.torch

    class CuMemAllocator:
        """vLLM's allocator: a pool for each tag; `sleep` keeps the contents of the tags that it is given."""

        default_tag = "default"
        tags: set[str] = set()
        asleep: set[str] = set()

        @classmethod
        def get_instance(cls) -> CuMemAllocator:
            return cls()

        def use_memory_pool(self, tag: str | None = None) -> Any:
            self.tags.add(tag or self.default_tag)
            return cuvmm.torch.pool(tag or self.default_tag)

        def sleep(self, offload_tags: Any = None) -> None:
            kept = (self.default_tag,) if offload_tags is None else offload_tags
            for tag in sorted(self.tags - self.asleep):
                cuvmm.sleep(tag, keep=tag in kept)
                self.asleep.add(tag)

        def wake_up(self, tags: Any = None) -> None:
            waking = self.asleep & set(tags or self.asleep)
            cuvmm.wake(sorted(waking), timeout=1)
            self.asleep -= waking

    return CuMemAllocator


def of_pytest() -> types.SimpleNamespace:
    """Returns the parts of pytest that the file uses."""
    import unittest

    def mark(*_: Any, **__: Any) -> Any:
        def keep(function: Any) -> Any:
            function.needs_model = True
            return function

        return keep

    return types.SimpleNamespace(
        raises=unittest.TestCase().assertRaises,
        mark=types.SimpleNamespace(parametrize=mark, skipif=mark, asyncio=lambda it: mark()(it)),
        MonkeyPatch=object,
    )


def load(path: str) -> Any:
    def as_is(*_: Any, **__: Any) -> Any:
        return lambda function: function

    platform = types.SimpleNamespace(is_rocm=lambda: False, is_xpu=lambda: False, is_cuda=lambda: True)
    module("vllm", LLM=None, SamplingParams=None, AsyncEngineArgs=None, AsyncLLMEngine=None)
    module("vllm.device_allocator")
    module("vllm.device_allocator.cumem", CuMemAllocator=allocator())
    module("vllm.platforms", current_platform=platform)
    module("vllm.utils", GiB_bytes=1 << 30)
    module("vllm.utils.mem_constants", GiB_bytes=1 << 30)
    module("tests")
    module("tests.basic_correctness")
    # Each test has a process of its own anyway.
    module("tests.utils", create_new_process_for_each_test=as_is, requires_fp8=as_is)
    if importlib.util.find_spec("pytest") is None:
        module("pytest", **vars(of_pytest()))
    spec = importlib.util.spec_from_file_location("tests.basic_correctness.test_cumem", path)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs vLLM's tests of its sleeping allocator over cuvmm.")
    parser.add_argument("file", help="test_cumem.py of vLLM")
    parser.add_argument("--install", action="store_true", help="under cuvmm.torch.install")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.install:
        import cuvmm.torch

        cuvmm.torch.install()
    file = load(os.path.abspath(options.file))
    if options.case:
        vars(file)[options.case]()
        return
    counts = {"passed": 0, "FAILED": 0, "skipped": 0}
    for name, test in list(vars(file).items()):
        if not name.startswith("test_"):
            continue
        outcome = "skipped"
        if not (hasattr(test, "needs_model") or hasattr(test, "pytestmark")):
            command = [sys.executable, os.path.abspath(__file__), options.file, "--case", name]
            ended = subprocess.run(command + ["--install"] * options.install, timeout=120)
            outcome = "FAILED" if ended.returncode else "passed"
        counts[outcome] += 1
        print(f"{outcome:8} {name}", flush=True)
    print(f"{counts['passed']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped")
    sys.exit(counts["FAILED"] > 0 or counts["passed"] == 0)


if __name__ == "__main__":
    main()
