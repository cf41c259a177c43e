"""What PyTorch can do only with its own allocator says so, and names cuvmm.

PyTorch's errors in these places do not say what to do. A function that works in a later PyTorch is
left to work: only its error is explained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ._replacing import replace, replaced

_IPC = (
    "CUDA tensors of this memory cannot be shared with other processes while cuvmm is PyTorch's allocator: make them"
    " in cuvmm.torch.pool(name, shareable=True), publish them (cuvmm.publish), or send a copy in host memory"
    " (tensor.cpu())"
)
_TREES = (
    "CUDA graph trees (torch.compile with mode='reduce-overhead' or 'max-autotune') need PyTorch's"
    " own allocator, and cuvmm is installed: compile with mode='default' or"
    " 'max-autotune-no-cudagraphs', or capture with torch.cuda.graph"
)
_MEM_POOL = (
    "torch.cuda.MemPool needs PyTorch's own allocator, and cuvmm is installed: use"
    " cuvmm.torch.pool(name), and torch.cuda.graph_pool_handle() for graphs"
)
_BENCHMARK = (
    "torch.backends.cudnn.benchmark stays False: it needs PyTorch's own allocator, and cuvmm is"
    " installed"
)

# Functions of `torch._C` and what their failure means.
_FUNCTIONS = {
    "_cuda_getCheckpointState": _TREES,
    "_cuda_setCheckpointPoolState": _TREES,
    "_cuda_checkPoolLiveAllocations": _TREES,
}


def _explained(function: Callable[..., Any], meaning: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except RuntimeError as error:
            raise RuntimeError(meaning) from error

    return call


def explain() -> None:
    """Explains the errors of all these places, and guards cuDNN's benchmark."""
    for name, meaning in _FUNCTIONS.items():
        _explain_function(torch._C, name, meaning)
    _explain_function(torch.UntypedStorage, "_share_cuda_", _IPC)
    _explain_class_method(torch.UntypedStorage, "_new_shared_cuda", _IPC)
    if hasattr(torch.cuda, "MemPool"):
        _explain_function(torch.cuda.MemPool, "__init__", _MEM_POOL)
    _guard_benchmark()


def _explain_function(owner: Any, name: str, meaning: str) -> None:
    if hasattr(owner, name):
        replace(owner, name, _explained(getattr(owner, name), meaning))


def _explain_class_method(owner: type, name: str, meaning: str) -> None:
    if hasattr(owner, name):
        explained = _explained(getattr(owner, name), meaning)
        setattr(owner, name, staticmethod(replaced(owner, name, explained)))


class _Guarded:
    """The property `benchmark` of cuDNN's module, which cannot become True."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self._original.__get__(instance, owner)

    def __set__(self, instance: Any, value: bool) -> None:
        self._original.__set__(instance, _refused(value))


def _refused(value: bool, level: int = 3) -> bool:
    """Warns if cuDNN is to try algorithms, which asks the allocator for its largest block.

    level: how many callers away the program is that gets the warning.
    """
    if value:
        warnings.warn(_BENCHMARK, RuntimeWarning, stacklevel=level)
    return False


def _guard_benchmark() -> None:
    module = type(torch.backends.cudnn)
    original = vars(module).get("benchmark")
    if hasattr(original, "__set__"):
        setattr(module, "benchmark", _Guarded(original))  # noqa: B010
    set_benchmark = torch._C._set_cudnn_benchmark
    if torch._C._get_cudnn_benchmark():
        set_benchmark(_refused(True, 5))
    # `torch.backends.cudnn.flags` calls this one.
    replace(torch._C, "_set_cudnn_benchmark", lambda value: set_benchmark(_refused(value, 4)))
