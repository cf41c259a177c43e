#!/usr/bin/env python3
"""Builds the packages of fakecuda: `python3 stand-in/fakecuda/python/build.py`.

There are two, in the folder `--out`, `fakecuda` in cargo's target folder by default: a wheel for
Python, and an archive `fakecuda-VERSION-linux-x86_64.tar.gz` with the library, the header and the
README. `--library FILE` takes a library that is built already, for any glibc.

The library is linked by zig for an old glibc, as that of the package `cuvmm` is (`python/build.py`).
This file is a build backend too: `pip install ./stand-in/fakecuda/python` works in a clone.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import importlib.util
import io
import json
import os
import sys
import tarfile
import tomllib
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
CRATE = os.path.dirname(HERE)
ROOT = os.path.dirname(os.path.dirname(CRATE))
#: The name that a loader looks for.
NAME = "libcuda.so.1"
#: Functions that the library must export; the last one no driver has.
EXPORTED = {"cuInit", "cuMemCreate", "cuMemMap", "fakecuda_live"}


def shared() -> object:
    """Returns the module that builds the other wheel, which this one has the linker from."""
    path = os.path.join(ROOT, "python", "build.py")
    spec = importlib.util.spec_from_file_location("cuvmm_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def toml(*path: str) -> dict:
    with open(os.path.join(*path), "rb") as file:
        return tomllib.load(file)


def version() -> str:
    return toml(ROOT, "Cargo.toml")["workspace"]["package"]["version"]


def build_library(build: object) -> str:
    """Builds the shared library in release mode, and returns its path."""
    folder = os.path.join(build.target(), "fakecuda-linker")
    os.makedirs(folder, exist_ok=True)
    command = ["cargo", "rustc", "--release", "--package=fakecuda", "--lib"]
    command += ["--crate-type=cdylib", "--message-format=json-render-diagnostics", "--"]
    command += ["-C", "linker=" + build.linker(build.zig(), folder), "-C", "strip=debuginfo"]
    output = build.run(*command, cwd=ROOT, stdout=-1, text=True).stdout
    for line in output.splitlines():
        message = json.loads(line)
        if message.get("target", {}).get("name") == "fakecuda":
            for file in message.get("filenames", ()):
                if file.endswith(".so"):
                    return file
    raise SystemExit("cargo did not name the library that it built")


def check(build: object, library: str, any_glibc: bool) -> None:
    """Ends the program if the library is not fit for the packages."""
    elf = build.elf
    read = elf.read(library)
    found = [f"it does not export {name}" for name in sorted(EXPORTED - read.defined)]
    if not any_glibc:
        found += elf.complaints(read, build.GLIBC)
    if found:
        raise SystemExit(f"{library} cannot be packed: {'; '.join(found)}")


def bytes_of(*path: str) -> bytes:
    with open(os.path.join(*path), "rb") as file:
        return file.read()


def metadata(project: dict) -> str:
    with open(os.path.join(HERE, project["readme"]), encoding="utf-8") as file:
        readme = file.read()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version()}",
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


def wheel_files(library: str, tag: str) -> list[tuple[str, bytes]]:
    """Returns the files of the wheel: their names and contents."""
    project = toml(HERE, "pyproject.toml")["project"]
    source = os.path.join(HERE, "src", "fakecuda")
    files = [
        (f"fakecuda/{name}", bytes_of(source, name))
        for name in sorted(os.listdir(source))
        if name.endswith(".py") or name == "py.typed"
    ]
    files.append((f"fakecuda/lib/{NAME}", bytes_of(library)))
    files.append(("fakecuda/include/fakecuda.h", bytes_of(CRATE, "include", "fakecuda.h")))
    about = f"fakecuda-{version()}.dist-info"
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        files.append((f"{about}/licenses/{name}", bytes_of(ROOT, name)))
    files.append((f"{about}/METADATA", metadata(project).encode()))
    scripts = "".join(f"{name} = {place}\n" for name, place in project["scripts"].items())
    files.append((f"{about}/entry_points.txt", f"[console_scripts]\n{scripts}".encode()))
    wheel = f"Wheel-Version: 1.0\nGenerator: cuvmm\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files.append((f"{about}/WHEEL", wheel.encode()))
    record = []
    for name, data in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")
    record.append(f"{about}/RECORD,,\n")
    files.append((f"{about}/RECORD", "".join(record).encode()))
    return files


def write_wheel(build: object, library: str, folder: str) -> str:
    """Writes the wheel, and returns its name. Equal files give equal bytes."""
    tag = f"py3-none-manylinux_{build.GLIBC[0]}_{build.GLIBC[1]}_x86_64"
    name = f"fakecuda-{version()}-{tag}.whl"
    os.makedirs(folder, exist_ok=True)
    with zipfile.ZipFile(os.path.join(folder, name), "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in wheel_files(library, tag):
            entry = zipfile.ZipInfo(file)
            entry.external_attr = (0o100755 if file.endswith(NAME) else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return name


def write_archive(library: str, folder: str) -> str:
    """Writes the archive, and returns its name. Equal files give equal bytes.

    Unpacked in a prefix such as /usr/local, the library is where `cuvmm fake` in `bin` finds it.
    """
    base = f"fakecuda-{version()}-linux-x86_64"
    files = [
        (f"lib/fakecuda/{NAME}", bytes_of(library), 0o755),
        ("include/fakecuda.h", bytes_of(CRATE, "include", "fakecuda.h"), 0o644),
        ("share/doc/fakecuda/README.md", bytes_of(CRATE, "README.md"), 0o644),
        ("share/doc/fakecuda/LICENSE-APACHE", bytes_of(ROOT, "LICENSE-APACHE"), 0o644),
        ("share/doc/fakecuda/LICENSE-MIT", bytes_of(ROOT, "LICENSE-MIT"), 0o644),
    ]
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, base + ".tar.gz")
    with open(path, "wb") as out:
        with gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=0) as packed:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                for name, data, mode in files:
                    entry = tarfile.TarInfo(f"{base}/{name}")
                    entry.size, entry.mode = len(data), mode
                    archive.addfile(entry, io.BytesIO(data))
    return base + ".tar.gz"


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the wheel for pip."""
    build = shared()
    build.check_machine()
    library = build_library(build)
    check(build, library, any_glibc=False)
    return write_wheel(build, library, wheel_directory)


def build_sdist(sdist_directory, config_settings=None):
    """Refuses: the library is made of several crates of the workspace."""
    raise SystemExit("there is no source package: clone the repository")


def main() -> None:
    build = shared()
    parser = argparse.ArgumentParser(description="Builds the packages of fakecuda.")
    parser.add_argument("--out", default=os.path.join(build.target(), "fakecuda"), help="the folder")
    parser.add_argument("--library", help="a library that is built already")
    options = parser.parse_args()
    build.check_machine()
    library = options.library or build_library(build)
    check(build, library, any_glibc=options.library is not None)
    for name in (write_wheel(build, library, options.out), write_archive(library, options.out)):
        path = os.path.join(options.out, name)
        print(f"{path}: {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    sys.exit(main())
