"""The parts of the comparisons that need no GPU."""

import importlib.util
import os
import tempfile
import unittest
import zipfile

from support import HERE


def load(name: str):
    path = os.path.join(os.path.dirname(HERE), "bench", name)
    spec = importlib.util.spec_from_file_location("bench_" + name[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sleep(unittest.TestCase):
    def test_the_first_turn_is_apart(self):
        sleep = load("sleep.py")
        turns = [{"sleep_ms": time} for time in (900.0, 3.0, 1.0, 2.0)]
        self.assertEqual(sleep.figure(turns, "sleep_ms"), "2.0 (1.0 to 3.0; first 900.0)")
        self.assertEqual(sleep.figure(turns[:1], "sleep_ms"), "(900.0)")

    def test_a_library_that_failed_is_in_the_table(self):
        turn = {"sleep_ms": 1.0, "wake_ms": 2.0}
        results = [
            {"name": "cuvmm", "error": "", "turns": {"kept": [turn] * 3, "discarded": [turn]}},
            {"name": "tms-torch", "error": "exit 1: no", "turns": {"kept": [], "discarded": []}},
        ]
        lines = load("sleep.py").table(results).splitlines()
        self.assertEqual(len(lines), 7)
        self.assertIn("| cuvmm | kept | 1.0 (1.0 to 1.0; first 1.0) | 2.0", lines[2])
        self.assertEqual(lines[4], "| tms-torch | kept | - | - |")
        self.assertEqual(lines[6], "tms-torch failed: exit 1: no")

    def test_quick_takes_what_is_not_given(self):
        options = load("sleep.py").options_of(["--quick", "--only", "cuvmm"])
        self.assertEqual((options.gib, options.turns, options.seconds), (2, 5, 90))
        options = load("sleep.py").options_of(["--quick", "--turns", "3"])
        self.assertEqual((options.gib, options.turns), (2, 3))
        self.assertEqual(options.names, ["cuvmm", "cuvmm-installed"])
        self.assertEqual(load("sleep.py").options_of([]).turns, 7)

    def test_each_turn_begins_with_another_library(self):
        sleep, asked = load("sleep.py"), []

        class One:
            def __init__(self, name):
                self.name = name

            def turn(self, kind):
                asked.append((kind, self.name))

        self.assertEqual(sleep.take_turns([One("a"), One("b")], 3, float("inf")), 3)
        kept = "".join(name for kind, name in asked if kind == "kept")
        self.assertEqual(kept, "abbaab")
        self.assertEqual(len(asked), 12)
        # The first turn is taken, and no other when the time is over.
        self.assertEqual(sleep.take_turns([One("a")], 3, float("-inf")), 1)

    def test_a_library_that_does_not_answer_is_ended(self):
        sleep = load("sleep.py")
        silent = sleep.Process("a", ["sleep", "600"], dict(os.environ), float("-inf"))
        self.assertEqual((silent.error, silent.bytes), ("it did not answer in time", 0))
        self.assertIsNotNone(silent.process.returncode)
        silent.turn("kept")
        silent.end()
        failed = sleep.Process("b", ["ls", "/nowhere"], dict(os.environ), float("inf"))
        self.assertIn("exit 2: ", failed.error)
        failed.end()
        answers = ["echo", '{"bytes": 5}']
        ended = sleep.Process("c", answers, dict(os.environ), float("inf"))
        self.assertEqual((ended.error, ended.bytes), ("", 5))
        ended.turn("kept")
        self.assertIn("exit 0: nothing was said", ended.error)
        ended.end()
        for process in (silent, failed, ended):
            process.process.stdout.close()
            process.errors.close()

    def test_medians_leave_the_first_turn_out(self):
        turns = [{"sleep_ms": time, "wake_ms": 2 * time} for time in (900.0, 3.0, 1.0, 2.0)]
        result = {"turns": {"kept": turns, "discarded": turns[:1]}}
        found = load("sleep.py").medians(result)
        self.assertEqual(found, {"kept": {"sleep_ms": 2.0, "wake_ms": 4.0}})

    def test_a_wheel_is_unpacked(self):
        unpacked = load("sleep.py").unpacked
        with tempfile.TemporaryDirectory() as folder:
            wheel = os.path.join(folder, "it.whl")
            with zipfile.ZipFile(wheel, "w") as file:
                file.writestr("package/__init__.py", "")
            into = os.path.join(folder, "into")
            self.assertEqual(unpacked(wheel, into), into)
            self.assertTrue(os.path.exists(os.path.join(into, "package", "__init__.py")))
            self.assertEqual(unpacked(into, folder), into)

class HostMemory(unittest.TestCase):
    def test_percentiles_are_of_what_was_noted(self):
        percentile = load("host_memory.py").percentile
        self.assertEqual(percentile([], 0.99), 0.0)
        self.assertEqual(percentile([3.0, 1.0, 2.0], 0.99), 3.0)
        self.assertEqual(percentile([float(it) for it in range(200)], 0.5), 100.0)

    def test_each_step_is_a_row(self):
        host = load("host_memory.py")
        row = {"step": "wake", "ms": 1.25, "launches": 7, "p99_ms": 0.123, "longest_ms": 4.0}
        lines = host.table([row]).splitlines()
        self.assertEqual(lines[2:], ["| wake | 1.2 | 7 | 0.12 | 4.0 |"])
        self.assertEqual((host.options_of([]).gib, host.options_of([]).pages), (8, "huge"))

if __name__ == "__main__":
    unittest.main()
