"""Buffers of modules that a sleep loses."""

from __future__ import annotations

from typing import Any

from .. import _library
from .._errors import Error
from .._keeping import is_kept
from .._sleeping import _figures, check_name


def lost_buffers(module: Any, name: str) -> list[str]:
    """Lists the buffers of a module that are lost when a pool sleeps with its contents discarded.

    module: a `torch.nn.Module`.
    name: the name of the pool (its tag). It may sleep.

    These are the buffers that are outside of the module's state dict (`persistent=False`), so that loading one does
    not bring them back, whose memory is in the pool, and that `cuvmm.keep` has not marked. A rotary embedding's
    frequencies are an example.

    Returns their names, as `module.get_buffer` takes them.

    >>> cuvmm.torch.lost_buffers(model, "weights")  # doctest: +SKIP
    ['layers.0.rotary.inv_freq']

    Raises `cuvmm.Error` if no memory was allocated under that name, and TypeError for what is no module.
    """
    check_name(name)
    if not hasattr(module, "named_modules"):
        raise TypeError(f"buffers are those of a module of PyTorch, and not of {type(module).__name__}")
    if not any(it["name"] == name for found in _figures().values() for it in found["pools"]):
        raise Error(f"no memory was allocated under the tag {name!r}")
    library, lost = _library.get(), []
    for prefix, part in module.named_modules():
        for key in sorted(part._non_persistent_buffers_set):
            buffer = part._buffers.get(key)
            if buffer is None or buffer.device.type != "cuda" or is_kept(buffer):
                continue
            if library.text("tag_of", buffer.untyped_storage().data_ptr()) == name:
                lost.append(f"{prefix}.{key}" if prefix else key)
    return lost
