#!/usr/bin/env python3
"""A model is put to sleep and woken, with its contents kept and discarded, and the times printed.

    python3 sleep.py [--gib 8] [--install]

`--install` makes all of PyTorch use cuvmm; without it only the pool of the weights does.
"""

import argparse
import time

import torch

import cuvmm
import cuvmm.torch


def timed(call) -> float:
    """Returns the milliseconds that a call takes, with the work that it queues."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts a model to sleep and wakes it.")
    parser.add_argument("--gib", type=float, default=8, help="the size of the model")
    parser.add_argument("--install", action="store_true", help="all of PyTorch uses cuvmm")
    options = parser.parse_args()
    if options.install:
        cuvmm.torch.install()

    count = max(1, int(options.gib * 32))
    with cuvmm.torch.pool("weights"):
        # Each is 32 MiB.
        weights = [
            torch.full((4096, 4096), float(it), device="cuda", dtype=torch.bfloat16)
            for it in range(count)
        ]
    addresses = [tensor.data_ptr() for tensor in weights]
    sums = [float(tensor[0].float().sum()) for tensor in weights]

    for keep in (True, False):
        for turn in range(3):
            free = torch.cuda.cudart().cudaMemGetInfo(0)[0]
            asleep = timed(lambda: cuvmm.sleep("weights", keep=keep))
            freed = torch.cuda.cudart().cudaMemGetInfo(0)[0] - free
            awake = timed(lambda: cuvmm.wake("weights"))
            what = "kept" if keep else "discarded"
            print(f"{what}, turn {turn}: {freed / 2**30:.2f} GiB given up", end=", ")
            print(f"asleep in {asleep:.2f} ms, awake in {awake:.2f} ms")
            assert [tensor.data_ptr() for tensor in weights] == addresses
            if keep:
                assert [float(tensor[0].float().sum()) for tensor in weights] == sums
            else:
                for number, tensor in enumerate(weights):
                    tensor.fill_(number)
    print(cuvmm.stats())


if __name__ == "__main__":
    main()
