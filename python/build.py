#!/usr/bin/env python3
"""Builds the wheel of the package `cuvmm`: `python3 python/build.py`.

Needs cargo, a C compiler, and `ziglang` from PyPI, which is installed in the target folder if
Python does not find it. The wheel is put into the folder `--out`, `wheel` in cargo's target folder
by default. `--library FILE` takes a library that is built already.

Zig links the library for an old glibc, whatever this machine has. It brings an unwinder of its own,
which is replaced by libgcc_s: PyTorch's exceptions pass through the library's frames. The build
fails if the library needs a newer glibc or another unwinder.

It is a build backend too: `pip install ./python` works in a clone.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
sys.path.insert(0, HERE)

import elf

#: The oldest glibc that the wheel is for: RHEL 8, Debian 10, Ubuntu 18.10.
GLIBC = (2, 28)
ZIG = "ziglang==0.17.0"


def target() -> str:
    """Returns cargo's target folder."""
    return os.path.abspath(os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target"))


def toml(*path: str) -> dict:
    with open(os.path.join(ROOT, *path), "rb") as file:
        return tomllib.load(file)


def run(*command: str, **options: object) -> subprocess.CompletedProcess:
    print("+", *command, file=sys.stderr, flush=True)
    return subprocess.run(command, check=True, **options)


def zig() -> str:
    """Returns a Python that has zig, which is installed in the target folder if needed."""
    if importlib.util.find_spec("ziglang"):
        return sys.executable
    folder = os.path.join(target(), "zig")
    python = os.path.join(folder, "bin", "python")
    # Created last, so that a partial installation is repeated.
    done = os.path.join(folder, "installed-" + ZIG)
    if not os.path.exists(done):
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", ZIG)
        with open(done, "w"):
            pass
    return python


def linker(python: str, folder: str) -> str:
    """Writes the program that rustc starts as its linker, and returns its path."""
    gcc = subprocess.check_output(["cc", "-print-file-name=libgcc_s.so.1"], text=True).strip()
    if not os.path.isabs(gcc):
        raise SystemExit("the C compiler has no libgcc_s.so.1")
    release = ".".join(map(str, GLIBC))
    # rustc recognizes a C compiler by this name.
    path = os.path.join(folder, "cc")
    with open(path, "w") as file:
        file.write(
            f"#!{python}\n"
            "import os, sys\n"
            f"given = [{gcc!r} if it == '-lgcc_s' else it for it in sys.argv[1:]]\n"
            f"command = [sys.executable, '-m', 'ziglang', 'cc', '-target',"
            f" 'x86_64-linux-gnu.{release}']\n"
            "os.execv(sys.executable, command + given)\n"
        )
    os.chmod(path, 0o755)
    return path


def build_library(folder: str) -> str:
    """Builds the shared library in release mode, and returns its path."""
    os.makedirs(folder, exist_ok=True)
    command = ["cargo", "rustc", "--release", "--package=cuvmm-torch", "--lib"]
    command += ["--crate-type=cdylib", "--message-format=json-render-diagnostics", "--"]
    command += ["-C", "linker=" + linker(zig(), folder)]
    output = run(*command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    for line in output.splitlines():
        message = json.loads(line)
        if message.get("target", {}).get("name") == "cuvmm_torch":
            for file in message.get("filenames", ()):
                if file.endswith(".so"):
                    return file
    raise SystemExit("cargo did not name the library that it built")


def files(library: str) -> Iterator[tuple[str, str]]:
    """Yields the files of the package: their names in the wheel, and where they are."""
    source = os.path.join(HERE, "src")
    for folder, folders, names in os.walk(os.path.join(source, "cuvmm")):
        folders[:] = sorted(set(folders) - {"__pycache__", "lib"})
        for name in sorted(names):
            if name.endswith(".py") or name == "py.typed":
                path = os.path.join(folder, name)
                yield os.path.relpath(path, source), path
    yield "cuvmm/lib/libcuvmm_torch.so", library


def metadata(project: dict, version: str) -> str:
    with open(os.path.join(HERE, project["readme"]), encoding="utf-8") as file:
        readme = file.read()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        "License-File: LICENSE-APACHE",
        "License-File: LICENSE-MIT",
        f"Requires-Python: {project['requires-python']}",
        f"Keywords: {','.join(project['keywords'])}",
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
        *(f"Project-URL: {name}, {url}" for name, url in project["urls"].items()),
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + "\n\n" + readme


def write_wheel(library: str, folder: str) -> str:
    """Writes the wheel, and returns its name. Equal files give equal bytes."""
    found = elf.complaints(elf.read(library), GLIBC)
    if found:
        raise SystemExit(f"{library} cannot be in the wheel: {'; '.join(found)}")
    project = toml("python", "pyproject.toml")["project"]
    version = toml("Cargo.toml")["workspace"]["package"]["version"]
    tag = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"
    about = f"cuvmm-{version}.dist-info"
    contents: list[tuple[str, bytes]] = []
    for name, path in files(library):
        with open(path, "rb") as file:
            contents.append((name, file.read()))
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        with open(os.path.join(ROOT, name), "rb") as file:
            contents.append((f"{about}/licenses/{name}", file.read()))
    contents.append((f"{about}/METADATA", metadata(project, version).encode()))
    wheel = f"Wheel-Version: 1.0\nGenerator: cuvmm\nRoot-Is-Purelib: false\nTag: {tag}\n"
    contents.append((f"{about}/WHEEL", wheel.encode()))
    record = []
    for name, data in contents:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")
    record.append(f"{about}/RECORD,,\n")
    contents.append((f"{about}/RECORD", "".join(record).encode()))
    os.makedirs(folder, exist_ok=True)
    file_name = f"cuvmm-{version}-{tag}.whl"
    with zipfile.ZipFile(os.path.join(folder, file_name), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return file_name


def check_machine() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit("the wheel is built on Linux on x86-64 only")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the wheel for pip."""
    check_machine()
    return write_wheel(build_library(os.path.join(target(), "wheel")), wheel_directory)


def build_sdist(sdist_directory, config_settings=None):
    """Refuses: the package's library is made of the whole workspace."""
    raise SystemExit("there is no source package: clone the repository")


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the wheel of the package cuvmm.")
    parser.add_argument("--out", default=os.path.join(target(), "wheel"), help="the folder")
    parser.add_argument("--library", help="a library that is built already")
    options = parser.parse_args()
    check_machine()
    library = options.library or build_library(os.path.join(target(), "wheel"))
    name = write_wheel(library, options.out)
    path = os.path.join(options.out, name)
    print(f"{path}: {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    main()
