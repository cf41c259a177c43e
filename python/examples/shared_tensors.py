#!/usr/bin/env python3
"""Two processes work on one tensor in turn, which passes between them through queues without a copy.

    python3 shared_tensors.py [--mib 256] [--rounds 3]

The device has the tensor once: the worker prints how much less of it was free when the tensor came.
"""

import argparse
import time

import torch
import torch.multiprocessing

import cuvmm
import cuvmm.torch


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def work(tensors, answers) -> None:
    """Adds 1 to all that comes, and answers when the work is complete."""
    torch.cuda.init()
    while True:
        before, begun = free(), time.perf_counter()
        message = tensors.get()
        if message is None:
            return
        tensor, scale = message
        took = time.perf_counter() - begun
        print(f"worker: {tensor.nbytes >> 20} MiB came in {took * 1e3:.1f} ms and took {(before - free()) >> 20} MiB")
        tensor += float(scale[0])
        # The other process may use the tensor from here on.
        torch.cuda.synchronize()
        del tensor, scale, message
        answers.put("done")


def main() -> None:
    parser = argparse.ArgumentParser(description="Two processes work on one tensor in turn.")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    tensors, answers = context.Queue(), context.Queue()
    worker = context.Process(target=work, args=(tensors, answers))
    worker.start()
    with cuvmm.torch.pool("shared", shareable=True):
        tensor = torch.zeros(options.mib << 18, device="cuda")
        scale = torch.ones(1, device="cuda")
    for round in range(options.rounds):
        tensors.put((tensor, cuvmm.torch.read_only(scale)))
        answers.get(timeout=300)
        value = float(tensor[0])
        assert value == round + 1, value
        print(f"sender: round {round}, the tensor is {value}, {cuvmm.torch.sent()} storages are kept")
    tensors.put(None)
    worker.join()
    print(f"peak of this process: {torch.cuda.max_memory_allocated() >> 20} MiB")


if __name__ == "__main__":
    main()
