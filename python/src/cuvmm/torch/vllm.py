"""vLLM's sleep mode over pools of cuvmm: a backend for `--sleep-mode-backend`, and the worker that uses it.

    vllm serve MODEL --enable-sleep-mode --sleep-mode-backend cuvmm --worker-cls cuvmm.torch.vllm.Worker

vLLM's interface for backends (`SleepModeBackend`) has sleeping and waking. Where the memory of the
weights and of the KV cache comes from is decided by its worker, so both options are needed: `Worker`
allocates them in the pools `weights` and `kv_cache`, and importing this module names the backend to
vLLM. One engine a process may use them.
"""

from __future__ import annotations

import gc
import json
from contextlib import AbstractContextManager
from typing import Any

import torch

try:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
except ImportError as error:
    raise ImportError("cuvmm.torch.vllm needs a vLLM with pluggable sleep-mode backends") from error

from .. import _library, _sleeping
from .._errors import Error
from . import _pools

__all__ = ["NAME", "SleepBackend", "Worker", "register"]

#: The name of the backend.
NAME = "cuvmm"
#: The tag whose contents a sleep of level 1 keeps.
_WEIGHTS = "weights"
#: The tags that vLLM may wake later than others. What has another tag wakes with the first of them.
_DEFERRED = (_WEIGHTS, "kv_cache")

# The tags whose memory `Worker` has allocated.
_tags: set[str] = set()


def register() -> None:
    """Names the backend to vLLM, as importing this module does. Once more has no effect."""
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, __name__, "SleepBackend")


class SleepBackend(SleepModeBackend):
    """Puts the memory of vLLM's worker to sleep: all of it, or none."""

    def suspend(self, level: int = 1) -> None:
        """Gives up the memory. Level 1 keeps the weights in host memory, and level 2 keeps nothing.

        Waits for the work that PyTorch has queued. Memory outside of the pools that PyTorch holds and does not use
        goes back to the driver too.

        Raises what `cuvmm.sleep` raises, `cuvmm.Error` if no worker of cuvmm has allocated memory, and ValueError
        for another level. All memory is as before then.
        """
        if level not in (1, 2):
            raise ValueError(f"the level of sleep is 1 or 2, not {level!r}")
        if not _tags:
            raise Error(
                "no memory of this process was allocated for the sleep-mode backend 'cuvmm': start vLLM with"
                " --worker-cls cuvmm.torch.vllm.Worker"
            )
        awake = _existing() - _sleeping.asleep()
        _sleep({tag: level == 1 and tag == _WEIGHTS for tag in awake})
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Gives the memory of tags, or of all that sleep, back at its addresses, with the contents if kept.

        What has another tag than `weights` and `kv_cache` wakes in any case.

        Raises what `cuvmm.wake` raises. All tags sleep then as before.
        """
        asleep = _tags & _sleeping.asleep()
        chosen = {tag for tag in asleep if tags is None or tag in tags or tag not in _DEFERRED}
        before, self._state = self._state, "RESUMING"
        try:
            if chosen:
                _sleeping.wake(sorted(chosen))
        except BaseException:
            self._state = before
            raise
        self._state = "RUNNING" if chosen == asleep else "SUSPENDED"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Gives up the memory of tags, whose contents are lost. Those that sleep stay as they are.

        Raises what `cuvmm.sleep` raises.
        """
        _sleep(dict.fromkeys((_existing() - _sleeping.asleep()) & set(tags), False))
        self._state = "SUSPENDED"

    @classmethod
    def is_supported(cls) -> bool:
        """Returns True if PyTorch has CUDA and the library can be loaded."""
        try:
            _library.get()
        except Error:
            return False
        return torch.version.cuda is not None

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Returns True: communicators have no memory in the pools."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Returns True: addresses stay the same."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Returns False: NCCL may have registered memory of the pools for a graph, which a sleep exchanges."""
        return False

    @classmethod
    def supports_durable_storage(cls) -> bool:
        """Returns False: contents are kept in the memory of the process."""
        return False


def _existing() -> set[str]:
    """Returns the tags of the worker that have memory."""
    figures = _sleeping._figures().values()
    return _tags & {it["name"] for device in figures for it in device["pools"]}


def _sleep(keeps: dict[str, bool]) -> None:
    """Puts tags to sleep, and gives back what PyTorch holds outside of them and does not use."""
    if keeps:
        library = _library.get()
        each = json.dumps({tag: int(keeps) for tag, keeps in keeps.items()})
        library.check(library.sleep_each(each.encode()))
        gc.collect()
        torch.cuda.empty_cache()


def _pool(tag: str) -> AbstractContextManager[None]:
    _tags.add(tag)
    return _pools.pool(tag)


def __getattr__(name: str) -> Any:
    """Makes `Worker` when it is asked for: vLLM's own is not imported in processes without one."""
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.v1.worker import gpu_worker

    class Worker(gpu_worker.Worker):
        """vLLM's worker for GPUs, which allocates in pools of cuvmm if that is its sleep-mode backend."""

        def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
            config = self.vllm_config.model_config
            if config.enable_sleep_mode and config.sleep_mode_backend == NAME:
                return _pool(tag)
            return super()._maybe_get_memory_pool_context(tag)

    Worker.__module__, Worker.__qualname__ = __name__, "Worker"
    globals()["Worker"] = Worker
    return Worker


register()
