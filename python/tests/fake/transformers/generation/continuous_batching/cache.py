"""A cache of one group of layers, whose requests have tables of blocks."""

import torch

from .cache_manager import BlockManager


class PagedAttentionMemoryHandler:
    def __init__(self, blocks, page_size, group_size, dtype):
        self.block_size, self.page_size, self.group_size, self.cache_dtype = 16, page_size, group_size, dtype
        self.available_memory = blocks

    def compute_memory_footprint(self, max_batch_tokens, num_blocks):
        row = self.page_size * self.cache_dtype.itemsize
        return 1000 + 2 * (self.group_size + 1) * row * num_blocks * self.block_size


class PagedAttentionCache:
    def __init__(self, config, continuous_batching_config, device, distributed_helper, tp_plan, dtype=None):
        self.config, self.device, self.dtype = config, device, dtype
        self.block_size, self.num_key_value_heads, self.head_dim = 16, 8, 1024
        self.num_blocks = continuous_batching_config.num_blocks
        handler = PagedAttentionMemoryHandler(1000, 8 * 1024, config.layers, dtype)
        if handler.compute_memory_footprint(1, self.num_blocks) > handler.available_memory:
            raise MemoryError("the cache is too large")
        rows = (self.num_blocks + 2) * self.block_size
        self.cache_shape = (rows, self.num_key_value_heads, self.head_dim)
        self.read_trash_index, self.write_trash_index = rows - 2 * self.block_size, rows - self.block_size
        memory = [None if device == "meta" else torch.empty(self.cache_shape, dtype) for _ in range(2 * config.layers)]
        self.key_cache, self.value_cache = memory[: config.layers], memory[config.layers :]
        self._block_manager = BlockManager(self.num_blocks, self.block_size, False)
        self.tables = {}

    def blocks_needed(self, num_requested_blocks, allocated_blocks):
        return num_requested_blocks

    def get_num_free_blocks(self):
        return self._block_manager.num_free_blocks

    def allocate_blocks(self, n_blocks, request_id, allocated_blocks):
        if n_blocks > self.get_num_free_blocks():
            return None
        numbers = self._block_manager.get_free_blocks(n_blocks, None, True, 0)
        if numbers is None:
            raise ValueError(f"no blocks for request {request_id}")
        self.tables.setdefault(request_id, []).extend(numbers)
        return n_blocks

    def free_blocks(self, request_id):
        self._block_manager.free_blocks(self.tables.pop(request_id), True)

    def fork_request(self, source_request_id, destination_request_ids):
        source, copied = self.tables[source_request_id], []
        for name in destination_request_ids:
            self.tables[name] = self._block_manager.get_free_blocks(len(source), None, True, 0)
            copied += self.tables[name]
        return source * len(destination_request_ids), copied

    def compute_max_num_forks(self, source_request_id):
        return self.get_num_free_blocks() // len(self.tables[source_request_id])

    def search_prefix_match(self, request_id, prompt_ids):
        return 0

    def mark_shareable_blocks_as_complete(self, state, num_complete_blocks):
        for number in self.tables[state][:num_complete_blocks]:
            self._block_manager.complete(number)
