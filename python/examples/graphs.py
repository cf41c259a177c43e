#!/usr/bin/env python3
"""Graphs of several batch sizes sleep with their intermediate values, and are replayed after they wake.

    python3 graphs.py [--gib 2] [--install]

`--install` makes all of PyTorch use cuvmm; without it only the memory of the graphs does.
"""

import argparse
import time

import torch

import cuvmm
import cuvmm.torch

WIDTH = 4096


def timed(call) -> float:
    """Returns the milliseconds that a call takes, with the work that it queues."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Captures graphs, puts their memory to sleep and wakes it.")
    parser.add_argument("--gib", type=float, default=2, help="the intermediate values of the largest graph")
    parser.add_argument("--install", action="store_true", help="all of PyTorch uses cuvmm")
    options = parser.parse_args()
    if options.install:
        cuvmm.torch.install()

    rows = max(4, int(options.gib * 2**30) // (WIDTH * 4 * 2))
    inputs = torch.randn(rows, WIDTH, device="cuda")
    graphs = {}
    # Small batches after large ones: each finds the memory of the one before.
    with cuvmm.torch.graphs("decode"):
        for batch in (rows, rows // 2, rows // 4):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                hidden = inputs[:batch].sin()
                output = (hidden * 2).sum(dim=1)
                del hidden
            graphs[batch] = (graph, output)

    def replay(batch):
        graph, output = graphs[batch]
        graph.replay()
        torch.cuda.synchronize()
        return output.clone()

    expected = {batch: replay(batch) for batch in graphs}
    for turn in range(3):
        free = torch.cuda.cudart().cudaMemGetInfo(0)[0]
        asleep = timed(lambda: cuvmm.sleep("decode"))
        freed = torch.cuda.cudart().cudaMemGetInfo(0)[0] - free
        awake = timed(lambda: cuvmm.wake("decode"))
        print(f"turn {turn}: {freed / 2**30:.2f} GiB given up, asleep in {asleep:.2f} ms, awake in {awake:.2f} ms")
        for batch, value in expected.items():
            assert torch.equal(replay(batch), value), "the same bits"
    print(cuvmm.stats())


if __name__ == "__main__":
    main()
