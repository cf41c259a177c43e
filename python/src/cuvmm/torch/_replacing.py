"""Functions of ours in the place of PyTorch's.

PyTorch looks them up by name, keeps them as keys of dictionaries, pickles them by name, and reads
their signatures. So each place gets a Python function of its own under the name of the original:
functions of `ctypes` have no hash, and one function in two places has two rules in `torch.compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a new function that calls another and is named as an attribute of `owner` is."""

    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    original = getattr(owner, name)
    if isinstance(original, FunctionType):
        # Its signature is found too.
        return functools.wraps(original)(call)
    is_class = isinstance(owner, type)
    call.__module__ = owner.__module__ if is_class else owner.__name__
    call.__name__ = name
    call.__qualname__ = f"{owner.__qualname__}.{name}" if is_class else name
    call.__doc__ = getattr(original, "__doc__", None)
    return call


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Puts a function in the place of an attribute. Does nothing if this PyTorch lacks it."""
    if hasattr(owner, name):
        setattr(owner, name, replaced(owner, name, function))
