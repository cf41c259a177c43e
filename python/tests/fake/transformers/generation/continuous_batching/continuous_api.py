"""The part of a manager that makes a cache."""

from types import SimpleNamespace

from .cache import PagedAttentionCache


class ContinuousBatchProcessor:
    def __init__(self, cache, stream):
        self.cache, self.inputs_and_outputs = cache, SimpleNamespace(compute_stream=stream)


def make(layers, num_blocks, dtype, stream=0, tp_size=1):
    """Makes a cache and its processor, as a manager does."""
    how = SimpleNamespace(num_blocks=num_blocks, max_blocks_per_request=32)
    helper = SimpleNamespace(tp_size=tp_size)
    cache = PagedAttentionCache(SimpleNamespace(layers=layers), how, 0, helper, {}, dtype=dtype)
    return ContinuousBatchProcessor(cache, stream).cache, how
