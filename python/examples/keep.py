#!/usr/bin/env python3
"""A server that is killed and started again has its weights in milliseconds: a keeper has them meanwhile.

    python3 -m cuvmm.keeper &
    python3 keep.py [--mib 4096]

Run it a second time, or kill it with `kill -9` and start it again: it loads nothing. `cuvmm.drop("weights")` or
`cuvmm share drop weights` gives the memory back.
"""

import argparse
import time

import torch

import cuvmm


def load(mib: int) -> dict[str, torch.Tensor]:
    """Stands for reading a checkpoint."""
    return {f"layer.{number}": torch.full((mib << 16,), float(number)) for number in range(4)}


def weights_of(mib: int) -> cuvmm.Attached:
    try:
        return cuvmm.attach("weights")
    except cuvmm.NotPublishedError:
        cuvmm.publish(load(mib), "weights", device=0).keep()
        return cuvmm.attach("weights")


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights that outlive their server.")
    parser.add_argument("--mib", type=int, default=4096)
    options = parser.parse_args()
    torch.cuda.init()
    begun = time.perf_counter()
    weights = weights_of(options.mib)
    took = time.perf_counter() - begun
    print(f"{weights!r}: ready in {took * 1e3:.1f} ms")
    for number, layer in enumerate(weights.values()):
        assert float(layer[0]) == float(layer[-1]) == number


if __name__ == "__main__":
    main()
