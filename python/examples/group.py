#!/usr/bin/env python3
"""The workers of a model put their memory to sleep and wake it together, and undo it when one of them fails.

    python3 group.py [--workers 2] [--mib 256]

Each worker has a part of the weights, on a device of its own where there are enough. Then one is killed: the others
stay awake, and their error names it.
"""

import argparse
import multiprocessing
import os
import signal

import torch

import cuvmm
import cuvmm.torch


def work(number: int, workers: int, mib: int, barrier) -> None:
    """Is one rank of the group."""
    device = number % torch.cuda.device_count()
    group = cuvmm.group("group-example", workers, rank=number)
    with cuvmm.torch.pool("weights"):
        weights = torch.full((mib, 1 << 20), number + 1, device=f"cuda:{device}", dtype=torch.uint8)
    # A collective of the group: every rank calls it.
    slept = group.sleep("weights", timeout=60)
    print(f"{group}: gave up {slept.given['weights'] >> 20} MiB", flush=True)
    group.wake("weights", timeout=60)
    assert int(weights[-1, -1]) == number + 1

    if number == 1:
        # This rank cannot sleep with the others, since it sleeps already.
        cuvmm.sleep("weights")
    try:
        group.sleep("weights", timeout=60)
    except cuvmm.Error as error:
        print(f"rank {number}: {error}", flush=True)
    if number == 1:
        cuvmm.wake("weights")
    assert not cuvmm.asleep() and int(weights[0, 0]) == number + 1

    barrier.wait(60)
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.sleep("weights", timeout=60)
        raise AssertionError("a rank is missing")
    except cuvmm.Error as error:
        print(f"rank {number}: {error}", flush=True)
    assert not cuvmm.asleep() and int(weights[0, 0]) == number + 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Puts the workers of a model to sleep together.")
    parser.add_argument("--workers", type=int, default=2, help="processes, at least 2")
    parser.add_argument("--mib", type=int, default=256, help="the weights of each")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    barrier = processes.Barrier(options.workers)
    workers = [
        processes.Process(target=work, args=(number, options.workers, options.mib, barrier))
        for number in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    codes = [worker.exitcode for worker in workers]
    assert codes == [0, -signal.SIGKILL] + [0] * (options.workers - 2), codes
    print("all ranks slept together, or none")


if __name__ == "__main__":
    main()
