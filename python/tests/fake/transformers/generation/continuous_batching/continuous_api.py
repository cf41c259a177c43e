"""The part of a manager that makes a cache and runs steps."""

from types import SimpleNamespace

from .cache import PagedAttentionCache


class ContinuousBatchProcessor:
    def __init__(self, cache, stream, cb_config):
        self.cache, self.cb_config = cache, cb_config
        self.inputs_and_outputs = SimpleNamespace(compute_stream=stream)
        self.arrived, self.cancelled, self.requests = [], [], {}
        self.scheduler = SimpleNamespace(clear_cancelled_requests=self.cancelled.clear)

    def _update_tp_group_state(self):
        for name, blocks in self.arrived:
            self.requests[name] = blocks
        self.arrived = []
        return False

    def has_pending_requests(self):
        return bool(self.requests)

    def prepare_next_batch(self):
        """Gives each request its blocks."""
        self._update_tp_group_state()
        for name, blocks in self.requests.items():
            if name not in self.cache.tables and self.cache.allocate_blocks(blocks, name, 0) is None:
                raise RuntimeError("No requests can be scheduled and no requests can be offloaded.")
        return bool(self.requests)

    def update_batch(self):
        """Ends all requests."""
        self.fail_all_requests(None)

    def fail_all_requests(self, error):
        while self.requests:
            self.cache.free_blocks(self.requests.popitem()[0])

    def warmup(self, model):
        if self.cache.allocate_blocks(self.cache.num_blocks, "__warmup_PREFILLING_0__", 0) is None:
            return
        self.cache.free_blocks("__warmup_PREFILLING_0__")
        model()


def processor(layers, num_blocks, dtype, stream=0, tp_size=1):
    """Makes a cache and its processor, as a manager does."""
    how = SimpleNamespace(num_blocks=num_blocks, max_blocks_per_request=32)
    helper = SimpleNamespace(tp_size=tp_size)
    cache = PagedAttentionCache(SimpleNamespace(layers=layers), how, 0, helper, {}, dtype=dtype)
    return ContinuousBatchProcessor(cache, stream, how)


def make(layers, num_blocks, dtype, **options):
    """Makes a cache and its processor, and returns the cache and its configuration."""
    made = processor(layers, num_blocks, dtype, **options)
    return made.cache, made.cb_config
