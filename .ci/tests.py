#!/usr/bin/env python3
"""Runs some of the test programs of the workspace, as `cargo test --workspace` builds them.

    .ci/tests.py PACKAGE/PROGRAM... [-- ARGUMENT...]
    .ci/tests.py --slow

The program `lib` is the unit tests of a package's library. The programs get the arguments. All run, even
after a failure, and the exit status is 1 if one failed. As many programs run at a time as there are
processors, since many tests wait; what a program prints is printed when it has ended.

`cargo test` leaves out the tests in slow.txt, which are marked as ignored. Here the slow ones of a program
run after the others, if an argument is a part of their name or no argument is a name. `--slow` runs all
slow tests and no others, and fails unless those in slow.txt are those that are marked so.

Given the names of programs, cargo itself would choose the features of their packages only, and so
build everything again.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor

MARK = '#[ignore = "slow: `.ci/run` runs it"]'
MOST_SLOW = 150
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def built() -> dict[str, tuple[str, str]]:
    """Returns the path and the package's folder of each test program."""
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if built.returncode != 0:
        raise SystemExit("the test programs could not be built")
    output = built.stdout
    programs = {}
    for line in output.splitlines():
        message = json.loads(line)
        if message.get("reason") != "compiler-artifact" or not message["profile"]["test"]:
            continue
        target, folder = message["target"], os.path.dirname(message["manifest_path"])
        kinds = set(target["kind"])
        if "test" in kinds or kinds & {"lib", "rlib", "cdylib"}:
            program = target["name"] if "test" in kinds else "lib"
            name = os.path.basename(folder) + "/" + program
            programs[name] = (message["executable"], folder)
    return programs


def slow_tests() -> dict[str, list[str]]:
    """Returns the names of the slow tests of each program."""
    slow: dict[str, list[str]] = {}
    with open(os.path.join(ROOT, ".ci/slow.txt")) as file:
        for line in file:
            program, name = line.split()
            slow.setdefault(program, []).append(name)
    return slow


def marked() -> list[str]:
    """Returns the names of the functions that are marked as slow tests, without their modules."""
    files = subprocess.run(
        ["git", "grep", "-lF", MARK, "--", "*.rs"],
        check=False, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    ).stdout.split()
    names = []
    for path in files:
        with open(os.path.join(ROOT, path)) as file:
            names += re.findall(re.escape(MARK) + r"\n(?:\s*#\[.*\]\n)*\s*fn (\w+)", file.read())
    return names


def differ(slow: dict[str, list[str]]) -> bool:
    """Says in what the list of slow tests differs from the marked ones, and whether it does."""
    listed = sorted(name.rsplit("::", 1)[-1] for names in slow.values() for name in names)
    found = sorted(marked())
    if listed != found:
        both = set(listed) & set(found)
        print("error: listed in .ci/slow.txt:", [name for name in listed if name not in both])
        print("error: marked as slow:", [name for name in found if name not in both], flush=True)
    if len(listed) > MOST_SLOW:
        print(f"error: {len(listed)} slow tests, more than {MOST_SLOW}", flush=True)
    return listed != found or len(listed) > MOST_SLOW


def run(program: str, folder: str, arguments: list[str]) -> tuple[bool, bytes]:
    """Returns whether a program succeeded, and what it printed."""
    both = subprocess.STDOUT
    ended = subprocess.run([program, *arguments], cwd=folder, check=False, stdout=subprocess.PIPE, stderr=both)
    return ended.returncode == 0, ended.stdout


def run_slow(program: str, folder: str, names: list[str]) -> tuple[bool, bytes]:
    """Runs tests that are marked as ignored, and sees that there are as many as were named."""
    arguments = ["--ignored", "--exact", *names]
    _, listed = run(program, folder, [*arguments, "--list"])
    lines = listed.decode().splitlines()
    there = [line.removesuffix(": test") for line in lines if line.endswith(": test")]
    if sorted(there) != sorted(names):
        said = f"error: not found among its slow tests: {sorted(set(names) - set(there))}\n"
        return False, said.encode()
    return run(program, folder, arguments)


def main() -> int:
    slow, failed = slow_tests(), []
    names, arguments = sys.argv[1:], []
    only_slow = names == ["--slow"]
    if only_slow:
        names = list(slow)
        if differ(slow):
            failed.append("slow.txt")
    if "--" in names:
        end = names.index("--")
        names, arguments = names[:end], names[end + 1 :]
    programs = built()
    unknown = [name for name in names if name not in programs]
    if unknown or not names:
        raise SystemExit(f"no test programs: {unknown or 'none given'}")
    # As cargo does with the variables of .cargo/config.toml.
    with open(os.path.join(ROOT, ".cargo/config.toml"), "rb") as file:
        for variable, value in tomllib.load(file).get("env", {}).items():
            os.environ.setdefault(variable, value)
    parts = [argument for argument in arguments if not argument.startswith("-")]

    def run_all(name: str) -> tuple[bool, bytes]:
        program, folder = programs[name]
        # A program that never ends is the last that began.
        print(f"     Began {name}", flush=True)
        succeeded, said = (True, b"") if only_slow else run(program, folder, arguments)
        chosen = [it for it in slow.get(name, []) if not parts or any(part in it for part in parts)]
        if chosen:
            slow_succeeded, said_too = run_slow(program, folder, chosen)
            succeeded, said = succeeded and slow_succeeded, said + said_too
        return succeeded, said

    with ThreadPoolExecutor(os.cpu_count()) as runs:
        for name, (succeeded, said) in zip(names, runs.map(run_all, names)):
            print(f"     Running {name} ({programs[name][0]})", flush=True)
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
            if not succeeded:
                failed.append(name)
    for name in failed:
        print(f"error: test failed: {name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
