"""What the tests need: the stand-in for libcuda, a GPU with PyTorch, and processes of their own."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20


def has_stand_in() -> bool:
    """Returns True if the loader finds the stand-in for libcuda."""
    try:
        return hasattr(ctypes.CDLL("libcuda.so.1"), "fakecuda_live")
    except OSError:
        return False


def has_library() -> bool:
    import cuvmm

    return os.path.exists(cuvmm.library_path())


needs_stand_in = unittest.skipUnless(
    has_stand_in() and has_library(), "needs the library, and the stand-in for libcuda"
)


def run(code: str, *, fakes: bool = False, status: int = 0, **variables: str) -> str:
    """Runs code in a process of its own, which ends with a status, and returns what it printed.

    The code has the names of `inside/frame.py`. The stand-in has two devices of 256 MiB.
    """
    environment = {**os.environ, "FAKECUDA_DEVICES": "2", "FAKECUDA_CAPACITY": str(256 * MIB)}
    for name in [name for name in environment if name.startswith("CUVMM_TORCH_")]:
        del environment[name]
    folders = [folder for folder in sys.path if folder and folder != HERE]
    names = ["fake", "inside"] if fakes else ["inside"]
    folders = [os.path.join(HERE, name) for name in names] + folders
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    environment.update(variables)
    # In the place of the empty line with which code begins.
    code = "from frame import MIB, dedent, refused\n" + textwrap.dedent(code).removeprefix("\n")
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if ended.returncode != status:
        raise AssertionError(f"exit {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return ended.stdout


def frame(begin: str, **usual: object):
    """Returns `run` for code that follows `begin` and a call's `first`, with options that the call may change."""

    def case(code: str, *, first: str = "", **options) -> str:
        parts = begin, textwrap.dedent(first), textwrap.dedent(code)
        return run("\n".join(parts), **{**usual, **options})

    return case
