"""Garbage collection when PyTorch finds too little memory."""

from __future__ import annotations

import atexit

from .. import _library


def begin(library: _library.Library) -> None:
    """Makes PyTorch's allocations collect garbage once before they fail.

    It ends before the interpreter does: a thread that asked for the interpreter's lock later would end in the
    middle of its work.
    """
    library.set_collector(_library.COLLECT)
    atexit.register(library.set_collector, None)
