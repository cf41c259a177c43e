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


if __name__ == "__main__":
    unittest.main()
