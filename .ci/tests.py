#!/usr/bin/env python3
"""Runs some of the test programs of the workspace, as `cargo test --workspace` builds them.

    .ci/tests.py PACKAGE/PROGRAM... [-- ARGUMENT...]

The program `lib` is the unit tests of a package's library. The programs get the arguments. All run, even
after a failure, and the exit status is 1 if one failed.

Given the names of programs, cargo itself would choose the features of their packages only, and so
build everything again.
"""

import json
import os
import subprocess
import sys
import tomllib

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


def main() -> int:
    names, arguments = sys.argv[1:], []
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
    failed = []
    for name in names:
        program, folder = programs[name]
        print(f"     Running {name} ({program})", flush=True)
        if subprocess.run([program, *arguments], cwd=folder, check=False).returncode != 0:
            failed.append(name)
    for name in failed:
        print(f"error: test failed: {name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
