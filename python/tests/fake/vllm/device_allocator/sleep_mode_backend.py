"""vLLM's interface for sleep-mode backends."""

import abc
import importlib


class SleepModeBackend(abc.ABC):
    def __init__(self):
        self._state = "RUNNING"

    @abc.abstractmethod
    def suspend(self, level=1): ...

    @abc.abstractmethod
    def resume(self, tags=None): ...

    def discard(self, tags):
        raise RuntimeError("no selective discard")

    def state(self):
        return self._state

    @classmethod
    def is_supported(cls):
        return True

    preserves_communicators = is_supported
    preserves_compiled_artifacts = is_supported
    preserves_graphs_with_communicators = is_supported
    supports_durable_storage = is_supported


class SleepModeBackendFactory:
    _registry = {}

    @classmethod
    def register_backend(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"{name} is registered")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def create_backend(cls, model_config):
        found = cls._registry[model_config.sleep_mode_backend]()
        if not found.is_supported():
            raise ValueError("not supported")
        return found()
