#!/usr/bin/env python3
"""Runs the tests that need no GPU: `python3 python/tests/run.py`.

They are those of the package that is installed, and of the sources beside this folder if none is. What
needs the library, or the stand-in for libcuda, is skipped if it is not found; with `--all` it is an
error that it is. Prints the counts in the form of cargo's tests.
"""

import argparse
import importlib.util
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the tests that need no GPU.")
    parser.add_argument("--all", action="store_true", help="fail if a test is skipped")
    options = parser.parse_args()
    sys.path.insert(0, HERE)
    if importlib.util.find_spec("cuvmm") is None:
        sys.path.insert(0, os.path.join(os.path.dirname(HERE), "src"))
    suite = unittest.TestSuite()
    for name in sorted(os.listdir(HERE)):
        if name.startswith("test_") and not name.startswith("test_gpu") and name.endswith(".py"):
            suite.addTests(unittest.defaultTestLoader.loadTestsFromName(name[:-3]))
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = len(result.skipped)
    passed = result.testsRun - failed - skipped
    word = "FAILED" if failed else "ok"
    print(f"test result: {word}. {passed} passed; {failed} failed; {skipped} ignored")
    sys.exit(failed > 0 or passed == 0 or (options.all and skipped > 0))


if __name__ == "__main__":
    main()
