"""What the stand-in for libcuda reports of programs: their own memory, and nothing that cuvmm keeps."""

import json
import textwrap
import unittest

from support import MIB, needs_stand_in, run

#: Prints the findings of this moment, and goes on.
FINDINGS = """
import ctypes, json, os
import cuvmm

def findings():
    fd = os.memfd_create("report")
    assert ctypes.CDLL("libcuda.so.1").fakecuda_report_json(fd) == 0
    with open(fd, "rb") as file:
        file.seek(0)
        return json.load(file)["findings"]
"""


def reported(code: str, *, fakes: bool = False, status: int = 0, **variables: str) -> list:
    """Runs code in a process of its own, and returns what the report at its end finds."""
    code = FINDINGS + textwrap.dedent(code)
    report = {"FAKECUDA_REPORT": "/dev/stdout", "FAKECUDA_REPORT_FORMAT": "json", "FAKECUDA_LEAKS": "all"}
    said = run(code, fakes=fakes, status=status, **{**report, **variables})
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert len(lines) == 1, said
    return json.loads(lines[0])["findings"]


def memory(findings: list) -> list:
    """Returns the bytes of each finding, all of which are memory of the program."""
    for finding in findings:
        assert (finding["finding"], finding["object"]) == ("leak", "memory of a library"), finding
        assert finding["message"].startswith("memory of libcuvmm_torch.so, "), finding
    return [finding["bytes"] for finding in findings]


@needs_stand_in
class Report(unittest.TestCase):
    def test_what_the_library_keeps_is_no_finding(self):
        for code in [
            "array = cuvmm.empty(5 << 20); del array",
            "array = cuvmm.empty(5 << 20); del array; cuvmm.empty_cache()",
            # Both devices have a heap.
            "[cuvmm.empty(1 << 20, device=device) for device in (0, 1)]",
            "cuvmm.configure(peers=[0, 1]); cuvmm.empty(30 << 20)",
        ]:
            for work in ["at-once", "late"]:
                with self.subTest(code=code, work=work):
                    self.assertEqual(reported(code, FAKECUDA_WORK=work), [])

    def test_an_array_that_is_alive_is_named(self):
        findings = reported("array = cuvmm.empty((3, 1 << 20), 'float16')")
        self.assertEqual(memory(findings), [6 * MIB])
        self.assertIn("6 MiB at 0x", findings[0]["message"])
        self.assertTrue(findings[0]["message"].endswith(" on device 0"), findings)
        # The place is that of the memory below it.
        self.assertIn("<module>", [line["function"] for line in findings[0]["sites"][0]["python"]])

    def test_arrays_of_one_extent_are_counted(self):
        findings = reported("arrays = [cuvmm.empty(100_000) for _ in range(3)]; del arrays[1]")
        self.assertEqual(memory(findings), [200_000])
        self.assertEqual(findings[0]["times"], 2)

    def test_a_report_of_the_moment_and_what_is_forgotten(self):
        findings = reported(
            """
            first = cuvmm.empty(1 << 20)
            assert [one["bytes"] for one in findings()] == [1 << 20], findings()
            assert ctypes.CDLL("libcuda.so.1").fakecuda_forget() == 0
            assert findings() == []
            second = cuvmm.empty(3 << 20)
            """
        )
        self.assertEqual(memory(findings), [3 * MIB])

    def test_programs_that_end_otherwise(self):
        for end, code in [("raise ValueError('no')", 1), ("sys.exit(3)", 3)]:
            with self.subTest(end=end):
                alive = f"import sys\narray = cuvmm.empty(1 << 20)\n{end}"
                self.assertEqual(memory(reported(alive, status=code)), [MIB])
                gone = f"import sys\ncuvmm.empty(1 << 20)\n{end}"
                self.assertEqual(reported(gone, status=code), [])

    def test_threads_that_run_at_the_end(self):
        """One has an array, and one allocates and frees all the time."""
        findings = reported(
            """
            import threading
            ready = [threading.Event(), threading.Event()]
            def has():
                array = cuvmm.empty(7 << 20)
                ready[0].set()
                threading.Event().wait()
            def works():
                while True:
                    cuvmm.empty(1 << 20)
                    ready[1].set()
            for work in (has, works):
                threading.Thread(target=work, daemon=True).start()
            for event in ready:
                event.wait()
            """
        )
        # What the second thread has just allocated is its own.
        self.assertIn(7 * MIB, memory(findings))
        self.assertLessEqual(len(findings), 2, findings)

    def test_a_forked_child_reports_nothing(self):
        findings = reported(
            """
            array = cuvmm.empty(1 << 20)
            child = os.fork()
            if child == 0:
                raise SystemExit
            assert os.waitpid(child, 0)[1] == 0
            """
        )
        self.assertEqual(memory(findings), [MIB])

    def test_memory_that_is_not_cuvmms_is_reported_as_before(self):
        findings = reported(
            """
            array = cuvmm.empty(1 << 20)
            driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
            assert driver.cuCtxSetCurrent(context) == 0
            address = ctypes.c_uint64()
            assert driver.cuMemAlloc_v2(ctypes.byref(address), 4096) == 0
            """
        )
        objects = sorted((one["object"], one["times"]) for one in findings)
        self.assertEqual(
            objects, [("allocation", 1), ("memory of a library", 1), ("primary context", 1)]
        )
        message = next(one["message"] for one in findings if one["object"] == "primary context")
        self.assertEqual(message, "primary context of device 0, 1 references")


@needs_stand_in
class WithTorch(unittest.TestCase):
    """With a stand-in for PyTorch."""

    BEGIN = "import torch\nimport cuvmm.torch\n"

    def test_tensors(self):
        install = self.BEGIN + "cuvmm.torch.install(limit='128MiB')\n"
        freed = install + "tensor = torch.empty(5 << 20); tensor.free()"
        # PyTorch keeps the context, as its stand-in does.
        self.assertEqual(reported(freed, fakes=True, FAKECUDA_LEAKS="memory"), [])
        alive = install + "tensor = torch.empty(5 << 20)"
        found = reported(alive, fakes=True, FAKECUDA_LEAKS="memory")
        self.assertEqual(memory(found), [5 * MIB])

    def test_memory_under_tags(self):
        begin = self.BEGIN + "library = cuvmm._library.get()\n"
        block = begin + textwrap.dedent(
            """
            malloc = ctypes.CDLL(cuvmm.library_path()).cuvmm_tag_malloc
            malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            address = malloc(5 << 20, 0, None)
            """
        )
        self.assertEqual(memory(reported(block, fakes=True)), [5 * MIB])
        asleep = block + "cuvmm.sleep()\n"
        self.assertEqual(memory(reported(asleep, fakes=True)), [5 * MIB])
        free = textwrap.dedent(
            """
            free = ctypes.CDLL(cuvmm.library_path()).cuvmm_tag_free
            free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
            free(address, 5 << 20, 0, None)
            """
        )
        self.assertEqual(reported(block + free, fakes=True), [])
        self.assertEqual(reported(asleep + free, fakes=True), [])
