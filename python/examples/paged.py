#!/usr/bin/env python3
"""Two models share a GPU's memory for keys and values: each has tensors over all of it, and memory under the blocks
that its requests use.

    python3 paged.py [--limit 4GiB] [--turns 4]

The models are busy in turns, and keep the blocks of ended requests for their prefixes. The one that is busy takes the
memory of the other one's prefixes.
"""

import argparse
import time

import torch

import cuvmm
import cuvmm.torch

LAYERS, TOKENS, HEADS, SIZE = 32, 16, 8, 128


class Model:
    """The blocks of one model: those of running requests, and those that are kept for their prefixes."""

    def __init__(self, name: str, blocks: int) -> None:
        group = cuvmm.torch.LayerGroup.keys_and_values(LAYERS, TOKENS, HEADS, SIZE, torch.bfloat16)
        self.kv = cuvmm.torch.paged_kv(blocks, group, pinned=[0], name=name, on_pressure=self.evict)
        self.free, self.prefixes, self.evicted = self.kv.free_numbers(), set(), 0
        self.keys, self.values = self.kv.tensor(0, 0), self.kv.tensor(0, 1)

    def evict(self, kv: cuvmm.torch.PagedKv, missing: int) -> None:
        chosen = kv.emptiest(missing, self.prefixes).numbers
        kv.release(chosen)
        self.prefixes.difference_update(chosen)
        self.free.append_n(chosen)
        self.evicted += len(chosen)

    def serve(self, tokens: int) -> None:
        """Runs a request, and keeps half of its blocks."""
        numbers = self.free.popleft_n(-(-tokens // TOKENS))
        self.kv.back(numbers)
        # An engine passes these numbers to its kernels as a block table.
        table = torch.tensor(numbers, device="cuda")
        ones = torch.ones(len(numbers), TOKENS, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
        self.keys.index_copy_(0, table, ones)
        self.values.index_copy_(0, table, 2 * ones)
        total = self.keys.index_select(0, table).sum(dtype=torch.float32)
        kept = len(numbers) // 2
        with self.kv.step():
            self.kv.release(numbers[kept:])
            assert total.item() == ones.numel()
        self.free.append_n(numbers[kept:])
        self.prefixes.update(numbers[:kept])


def main() -> None:
    parser = argparse.ArgumentParser(description="Two models share a GPU's memory for keys and values.")
    parser.add_argument("--limit", default="4GiB", help="the memory of both")
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    cuvmm.configure(limit=options.limit)
    # 2 MiB a block: each model has addresses of 16 GiB.
    models = [Model(name, 8192) for name in ("chat", "code")]
    for turn in range(options.turns):
        busy, idle = models[turn % 2], models[(turn + 1) % 2]
        begun = time.perf_counter()
        for _ in range(64):
            busy.serve(tokens=1024)
        spent = time.perf_counter() - begun
        print(
            f"turn {turn}: {busy.kv.name} has {busy.kv.stats().committed / 2**30:.2f} GiB,"
            f" {idle.kv.name} {idle.kv.stats().committed / 2**30:.2f} GiB after evicting {idle.evicted} blocks;"
            f" {spent / 64 * 1e3:.2f} ms a request"
        )
    print(cuvmm.stats())


if __name__ == "__main__":
    main()
