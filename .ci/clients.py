#!/usr/bin/env python3
"""Runs programs of other projects and programs against NVIDIA's headers on the stand-in for libcuda.

    python3 .ci/clients.py [NAME...]

The script builds the stand-in, installs the clients by pip and cargo in the target folder, where later
runs find them, and runs the programs in .ci/clients. NAME chooses some of: c, bindings, core, rust,
crates, upstream. The last runs cuda-core's own memory tests if CUDA_PYTHON names a checkout of NVIDIA's
cuda-python, which no package registry holds. The checkout is that of the tag of UPSTREAM_CORE below, and of
its folders only cuda_core/tests and cuda_python_test_helpers are needed.

The last line counts the programs.
"""

import collections
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLIENTS = ROOT / ".ci/clients"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
PLACE = TARGET / "clients"
PYTHON = PLACE / "env/bin/python"
UPSTREAM_PYTHON = PLACE / "upstream-env/bin/python"

# The versions for which the expectations in the programs hold.
PACKAGES = ["cuda-bindings==13.5.0", "cuda-core==1.2.2", "numpy", "psutil", "pytest", "pytest-timeout"]
HEADERS = "nvidia-cuda-runtime==13.5.37"

# The version of cuda-core whose own tests run, from its tag, and those that cannot pass here, by a pattern
# of their name, with the reason.
UPSTREAM_CORE = "cuda-core==1.1.0"
UPSTREAM = CLIENTS / "upstream.txt"
MEMORY_TESTS = ["test_memory.py", "test_memory_peer_access.py", "memory", "memory_ipc"]


def run(*command, **options):
    print("+", *map(str, command), flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)


def environment():
    """Returns an environment in which the stand-in is found before a driver."""
    changed = dict(os.environ, LD_LIBRARY_PATH=str(PLACE / "lib"), PYTHONDONTWRITEBYTECODE="1")
    # The stand-in answers for an H200, also to a program that asks for its memory.
    changed.setdefault("FAKECUDA_CAPACITY", str(1 << 30))
    return changed


def library():
    """Builds the stand-in as the tests do, under the name that loaders look for."""
    run("cargo", "build", "--quiet", "--profile", "test", "--package", "fakecuda", "--lib", cwd=ROOT)
    (PLACE / "lib").mkdir(parents=True, exist_ok=True)
    built = (TARGET / "debug/libfakecuda.so").read_bytes()
    for name in ("libcuda.so.1", "libcuda.so"):
        (PLACE / "lib" / name).write_bytes(built)


def python(interpreter=PYTHON, packages=PACKAGES):
    """Installs the Python packages for an interpreter."""
    folder = interpreter.parent.parent
    mark = folder / "installed"
    wanted = "\n".join(packages)
    if mark.is_file() and mark.read_text() == wanted:
        return
    run(sys.executable, "-m", "venv", "--clear", folder)
    run(interpreter, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *packages)
    mark.write_text(wanted)


def headers():
    """Unpacks NVIDIA's headers and returns their folder."""
    folder = PLACE / "headers"
    found = list(folder.rglob("cuda.h"))
    if not found:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--target", folder]
        run(sys.executable, "-m", "pip", "install", *options, HEADERS)
        found = list(folder.rglob("cuda.h"))
    return found[0].parent


def c():
    """A program in C, compiled against NVIDIA's headers and linked with the stand-in."""
    library()
    for name, flags in (("memory", []), ("memory-per-thread", ["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"])):
        program = PLACE / name
        command = ["cc", "-std=gnu11", "-Wall", "-Werror", "-isystem", headers(), *flags]
        run(*command, CLIENTS / "memory.c", "-o", program, f"-L{PLACE / 'lib'}", "-lcuda", "-lpthread")
        run(program, env=environment())


def bindings():
    """NVIDIA's cuda-bindings: the whole interface of virtual memory, from two processes."""
    library()
    python()
    run(PYTHON, CLIENTS / "bindings.py", env=environment())


def core():
    """NVIDIA's cuda-core: its memory resources, and two faults of the published version."""
    library()
    python()
    run(PYTHON, CLIENTS / "core.py", env=environment())


def rust():
    """The safe interfaces of cudarc and baracuda-driver."""
    library()
    changed = dict(environment(), CARGO_TARGET_DIR=str(PLACE / "rust"))
    manifest = CLIENTS / "rust/Cargo.toml"
    run("cargo", "run", "--quiet", "--locked", "--manifest-path", manifest, env=changed, cwd=CLIENTS)


# The crates whose own tests run here, with the features of their tests.
CRATES = {
    "cudarc": ["--no-default-features", "--features", "std,driver,dynamic-loading,cuda-13000"],
    "cust": [],
    "rustacuda": [],
}


def crates():
    """The published tests of cudarc, cust and rustacuda, with work that runs at once and late."""
    library()
    # The build scripts of the crates look for the library in a folder lib64, or leave it to the linker.
    folder = PLACE / "lib64"
    if not folder.is_symlink():
        folder.symlink_to("lib")
    changed = dict(
        environment(),
        CARGO_TARGET_DIR=str(PLACE / "crates"),
        CUDA_LIBRARY_PATH=str(PLACE),
        LIBRARY_PATH=str(PLACE / "lib"),
    )
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--manifest-path"]
    found = subprocess.run([*command, CLIENTS / "crates/Cargo.toml"], check=True, capture_output=True).stdout
    sources = {one["name"]: pathlib.Path(one["manifest_path"]).parent for one in json.loads(found)["packages"]}
    outcomes = collections.defaultdict(list)
    for name, features in CRATES.items():
        copy = PLACE / "sources" / sources[name].name
        if not copy.exists():
            shutil.copytree(sources[name], copy)
            # The copy is no member of the workspace that the target folder lies in.
            with open(copy / "Cargo.toml", "a", encoding="utf-8") as manifest:
                manifest.write("\n[workspace]\n")
        for work in ("at-once", "late"):
            command = ["cargo", "test", "--quiet", "--lib", *features, "--", "--format", "pretty", "--test-threads", "1"]
            options = {"env": dict(changed, FAKECUDA_WORK=work), "cwd": copy, "capture_output": True, "text": True}
            done = subprocess.run(command, **options)
            lines = re.findall(r"^test (\S+).* \.\.\. (ok|FAILED)$", done.stdout, re.M)
            counted = re.search(r"^test result: .* (\d+) passed; (\d+) failed", done.stdout, re.M)
            if not counted or len(lines) != int(counted[1]) + int(counted[2]):
                print(done.stdout[-20000:], done.stderr[-2000:])
                sys.exit(f"{name} did not run to its end")
            print(name, work, counted[0])
            for test, outcome in lines:
                outcomes[outcome].append(f"{name}::{test}")
    judge(outcomes["ok"], outcomes["FAILED"], CLIENTS / "crates.txt")


def judge(passed, failed, file):
    """Ends with an error if a test failed without a reason in the file, or passed although listed."""
    known = dict(line.split("\t") for line in file.read_text().splitlines() if not line.startswith("#"))
    listed = lambda name: next((why for part, why in known.items() if fnmatch.fnmatchcase(name, part)), None)
    reason = {name: listed(name) for name in failed}
    print(*sorted(collections.Counter(reason.values()).items(), key=str), sep="\n")
    unknown = [name for name, why in reason.items() if why is None]
    stale = [name for name in passed if not (listed(name) or "sometimes").startswith("sometimes")]
    if unknown or stale:
        sys.exit(f"without a reason: {unknown}\nlisted and passing: {stale}")


def upstream():
    """cuda-core's own memory tests. Each test that fails is listed with its reason."""
    checkout = os.environ.get("CUDA_PYTHON")
    if not checkout:
        print("CUDA_PYTHON names no checkout: NVIDIA's own tests of cuda-core DID NOT RUN")
        return
    library()
    python(UPSTREAM_PYTHON, [UPSTREAM_CORE, *(name for name in PACKAGES if not name.startswith("cuda-core"))])
    tests = pathlib.Path(checkout) / "cuda_core/tests"
    command = [UPSTREAM_PYTHON, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "-rfEpx"]
    command += [tests / name for name in MEMORY_TESTS if (tests / name).exists()]
    # Tests of access between devices need three.
    changed = dict(environment(), FAKECUDA_DEVICES="3", PYTHONPATH=str(CLIENTS / "upstream"))
    done = subprocess.run([*map(str, command)], env=changed, cwd=tests, capture_output=True, text=True)
    named = collections.defaultdict(list)
    for line in done.stdout.splitlines():
        outcome, _, rest = line.partition(" ")
        if outcome in ("FAILED", "ERROR", "PASSED") and "::" in rest:
            named[outcome].append(rest.split(" - ")[0])
    print(done.stdout.splitlines()[-1])
    if done.returncode not in (0, 1):
        print(done.stdout[-20000:], done.stderr[-2000:])
        sys.exit("the tests did not run to their end")
    judge(named["PASSED"], named["FAILED"] + named["ERROR"], UPSTREAM)


ALL = {function.__name__: function for function in (c, bindings, core, rust, crates, upstream)}


def main():
    PLACE.mkdir(parents=True, exist_ok=True)
    passed, failed = 0, []
    for name in sys.argv[1:] or ALL:
        print(f"== {name}: {ALL[name].__doc__}", flush=True)
        try:
            ALL[name]()
            passed += 1
        except (subprocess.CalledProcessError, SystemExit) as error:
            print(f"FAILED: {name}: {error}", flush=True)
            failed.append(name)
    print(f"{passed} passed, {len(failed)} failed")
    sys.exit(1 if failed else 0)


main()
