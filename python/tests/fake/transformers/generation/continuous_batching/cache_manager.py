"""Blocks of a cache by number: those without contents, those with a prefix, and those in use."""

from collections import deque
from types import SimpleNamespace


class BlockManager:
    def __init__(self, num_blocks, block_size, tp_on):
        self.num_blocks = num_blocks
        self._uninit_block_ids, self._init_block_ids = deque(range(num_blocks)), {}
        self._hash_to_id, self._id_to_block = {}, {}

    @property
    def num_free_blocks(self):
        return len(self._uninit_block_ids) + len(self._init_block_ids)

    def has_enough_free_blocks(self, n_blocks):
        while len(self._uninit_block_ids) < n_blocks and self._init_block_ids:
            number, _ = self._init_block_ids.popitem()
            del self._hash_to_id[self._id_to_block[number].hash]
            self._uninit_block_ids.append(number)
        return len(self._uninit_block_ids) >= n_blocks

    def get_free_blocks(self, n_blocks, last_block_id, shareable, group_id):
        if not self.has_enough_free_blocks(n_blocks):
            return None
        numbers = [self._uninit_block_ids.popleft() for _ in range(n_blocks)]
        self._id_to_block.update({number: SimpleNamespace(hash=None) for number in numbers})
        return numbers

    def complete(self, number):
        """Gives a block contents that another request may use."""
        self._id_to_block[number].hash = number + 1000
        self._hash_to_id[number + 1000] = number

    def free_blocks(self, blocks, shareable):
        for number in blocks:
            if self._id_to_block[number].hash is None:
                self._uninit_block_ids.append(number)
            else:
                self._init_block_ids[number] = None
