"""The parts of vLLM's worker for GPUs that sleep."""

import contextlib

from ...device_allocator.sleep_mode_backend import SleepModeBackendFactory


class Worker:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self._backend = None

    def _maybe_get_memory_pool_context(self, tag):
        return contextlib.nullcontext("vLLM's own")

    def backend(self):
        if self._backend is None:
            self._backend = SleepModeBackendFactory.create_backend(self.vllm_config.model_config)
        return self._backend

    def sleep(self, level=1):
        self.backend().suspend(level)

    def wake_up(self, tags=None):
        self.backend().resume(tags)
