"""Tests of the installed package: `python -m unittest` here, in an environment that has the wheel."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

import fakecuda

COMMAND = [os.path.join(os.path.dirname(sys.executable), "fakecuda")]
#: Enters the primary context of device 0, with the driver as `cu`.
ENTER = """
import ctypes
cu = ctypes.CDLL("libcuda.so.1")
def ok(code):
    assert code == 0, code
ok(cu.cuInit(0))
context = ctypes.c_void_p()
ok(cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cu.cuCtxSetCurrent(context))
def allocate(size):
    address = ctypes.c_uint64()
    return cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), address
"""
LEAK = ENTER + "def leaks():\n    return allocate(1 << 20)\nassert leaks()[0] == 0\n"


def run(*words: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, **options)


def fake(code: str, *options: str) -> subprocess.CompletedProcess:
    """Runs Python code on the library, by the command."""
    return run(*COMMAND, *options, "--", sys.executable, "-c", textwrap.dedent(code))


CORE = """from cuda.core import Device, VirtualMemoryResource, VirtualMemoryResourceOptions

device = Device(0)
device.set_current()
stream = device.create_stream()
memory = VirtualMemoryResource(device, VirtualMemoryResourceOptions())

def cache():
    buffer = memory.allocate(4 << 20, stream=stream)
    buffer.close()

cache()
print("done")
"""


def has_entry_points() -> bool:
    """Returns True if the library has what cuda-core asks for its functions by."""
    return hasattr(ctypes.CDLL(fakecuda.library_path()), "cuGetProcAddress_v2")


def has_cuda_core() -> bool:
    return importlib.util.find_spec("cuda") is not None and (
        importlib.util.find_spec("cuda.core") is not None
    )


class Package(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def test_a_wrong_setting_is_said_before_the_program_starts(self) -> None:
        config = os.path.join(self.folder, "broken.toml")
        with open(config, "w") as file:
            file.write("devices = ")
        for options, said in [
            (["--gpu", "abacus"], "FAKECUDA_GPU=abacus: it must be"),
            (["--config", config], "TOML parse error"),
        ]:
            ended = fake("print('started')", *options)
            self.assertEqual((ended.returncode, ended.stdout), (2, ""))
            self.assertIn(said, ended.stderr)

    def test_the_report_names_the_line_that_leaks(self) -> None:
        path = os.path.join(self.folder, "leak.py")
        with open(path, "w") as file:
            file.write(LEAK)
        line = 1 + LEAK[: LEAK.index("    return allocate(1")].count("\n")
        ended = run(*COMMAND, "--report", "--exit-code", "9", "--", sys.executable, path)
        self.assertEqual(ended.returncode, 9, ended.stderr)
        self.assertIn("leaked: allocation 0x", ended.stderr)
        self.assertIn(", 1 MiB on device 0\n", ended.stderr)
        self.assertIn(f"{path}:{line} in leaks\n", ended.stderr)

    def test_threads_that_call_when_the_interpreter_ends_end_with_it(self) -> None:
        code = ENTER + textwrap.dedent("""
            import threading, time
            def works():
                cu.cuCtxSetCurrent(context)
                while True:
                    code, made = allocate(64)
                    cu.cuMemFree_v2(made)
            for _ in range(6):
                threading.Thread(target=works, daemon=True).start()
            time.sleep(0.05)
        """)
        for _ in range(8):
            ended = fake(code, "--report")
            self.assertEqual(ended.returncode, 0, ended.stderr)

    def test_a_program_that_is_right_has_no_finding(self) -> None:
        code = ENTER + "code, made = allocate(64)\nok(code)\nok(cu.cuMemFree_v2(made))\n"
        ended = fake(code, "--report", "--exit-code", "9")
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertIn("calls: nothing found\n", ended.stderr)

    def test_options_and_statuses(self) -> None:
        code = ENTER + """
count, version = ctypes.c_int(), ctypes.c_int()
ok(cu.cuDeviceGetCount(ctypes.byref(count)))
ok(cu.cuDriverGetVersion(ctypes.byref(version)))
print(count.value, version.value, [allocate(64)[0] for _ in range(3)])
"""
        options = ["--gpus", "2", "--memory", "64MiB", "--cuda", "12.2", "--fail", "cuMemAlloc:2"]
        ended = fake(code, *options)
        self.assertEqual(ended.stdout, "2 12020 [0, 2, 0]\n", ended.stderr)
        report = os.path.join(self.folder, "report.json")
        with open(report, "w") as file:
            file.write("of an earlier run")
        ended = fake(LEAK, "--report", report, "--json", "--leaks", "all")
        self.assertEqual((ended.returncode, ended.stderr), (0, ""))
        with open(report) as file:
            found = [finding["object"] for finding in json.load(file)["findings"]]
        self.assertEqual(found, ["allocation", "primary context"])
        self.assertEqual(run(*COMMAND, "--", "sh", "-c", "exit 42").returncode, 42)
        killed = run(*COMMAND, "--", "sh", "-c", "kill -TERM $$")
        self.assertEqual(killed.returncode, -signal.SIGTERM)
        self.assertEqual(run(*COMMAND, "--", "/no/such/program").returncode, 127)
        self.assertEqual(run(*COMMAND).returncode, 2)

    def test_the_functions_for_tests(self) -> None:
        code = ENTER + """
import fakecuda
assert fakecuda.is_here()
fakecuda.watch()
with fakecuda.failing("cuMemAlloc:2"):
    assert [allocate(64)[0] for _ in range(3)] == [0, 2, 0]
assert fakecuda.injected() == 1
assert fakecuda.live().allocations == 2 and fakecuda.live().contexts == 1
stream = ctypes.c_void_p()
ok(cu.cuStreamCreate(ctypes.byref(stream), 1))
code, made = allocate(64)
ok(code)
with fakecuda.held(stream.value):
    for byte in (1, 2):
        ok(cu.cuMemsetD8Async(made, ctypes.c_ubyte(byte), ctypes.c_size_t(64), stream))
    assert fakecuda.live().queued == 2 and cu.cuStreamQuery(stream) == 600
    assert fakecuda.step(stream.value) and fakecuda.live().queued == 1
assert fakecuda.live().queued == 0 and cu.cuStreamQuery(stream) == 0
with fakecuda.held(all_streams=True):
    assert not fakecuda.step(stream.value)
assert fakecuda.findings() == 3
assert {finding["object"] for finding in fakecuda.report()["findings"]} == {"allocation"}
fakecuda.forget()
assert fakecuda.report()["findings"] == []
try:
    with fakecuda.failing("nonsense"):
        pass
except fakecuda.Refused as error:
    assert error.code == 1
else:
    raise AssertionError
fakecuda.lose_context()
assert cu.cuStreamQuery(stream) == 700
print("done")
"""
        ended = fake(code)
        self.assertEqual((ended.returncode, ended.stdout), (0, "done\n"), ended.stderr)

    @unittest.skipUnless(has_entry_points() and has_cuda_core(), "needs cuda-core, over entry points")
    def test_the_leak_of_cuda_core_is_named(self) -> None:
        path = os.path.join(self.folder, "core.py")
        with open(path, "w") as file:
            file.write(CORE)
        line = 1 + CORE[: CORE.index("    buffer = memory.allocate")].count("\n")
        report = os.path.join(self.folder, "report.json")
        ended = run(*COMMAND, "--report", report, "--json", "--", sys.executable, path)
        self.assertEqual((ended.returncode, ended.stdout), (0, "done\n"), ended.stderr)
        with open(report) as file:
            findings = json.load(file)["findings"]
        # NVIDIA/cuda-python#2882: closing a buffer unmaps its memory and keeps the physical. Where a
        # version has mended it, there is nothing to find.
        self.assertIn([finding["object"] for finding in findings], (["physical"], []))
        for finding in findings:
            lines = [(place["file"], place["line"]) for place in finding["sites"][0]["python"]]
            self.assertIn((path, line), lines)

    def test_without_the_library_it_is_not_here(self) -> None:
        code = "import fakecuda; print(fakecuda.is_here())"
        environment = {**os.environ, "LD_LIBRARY_PATH": ""}
        ended = run(sys.executable, "-c", code, env=environment)
        self.assertEqual(ended.stdout, "False\n", ended.stderr)

    def test_a_c_program_builds_with_the_header(self) -> None:
        source = os.path.join(self.folder, "test.c")
        with open(source, "w") as file:
            file.write(
                "#include <fakecuda.h>\n#include <stdio.h>\nint cuInit(unsigned);\n"
                "int main(void) {\n    uint64_t live[FAKECUDA_COUNTS];\n    cuInit(0);\n"
                '    printf("%d", fakecuda_live(live));\n    return (int)live[0];\n}\n'
            )
        program = os.path.join(self.folder, "test")
        library = run(*COMMAND, "--library-path").stdout.strip()
        include = run(*COMMAND, "--include-path").stdout.strip()
        compiler = os.environ.get("CC", "cc")
        built = run(compiler, "-I", include, source, "-o", program, library)
        self.assertEqual(built.returncode, 0, built.stderr)
        ended = run(*COMMAND, "--", program)
        self.assertEqual((ended.returncode, ended.stdout), (0, "0"), ended.stderr)


if __name__ == "__main__":
    unittest.main()
