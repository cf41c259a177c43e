#!/usr/bin/env python3
"""Two processes under one ledger: one serves requests, one trains. None runs out of memory.

    python3 two_models.py [--limit 8GiB] [--seconds 20]

Both may use the whole limit; the ledger keeps their sum below it. When a process finds no memory, it
waits for a moment and tries again with less: the other gives back what it does not use.
"""

import argparse
import multiprocessing
import os
import random
import tempfile
import time


def work(name, ledger, limit, until, step, answers):
    """Runs steps until a time, in a process of its own, and reports."""
    import cuvmm.torch

    cuvmm.torch.install(tenant=name, ledger=ledger, ledger_limit=limit)
    import torch

    chosen, done, waits, peak = random.Random(name), 0, 0, 0
    state = {}
    while time.time() < until:
        try:
            step(torch, state, chosen)
            done += 1
        except torch.cuda.OutOfMemoryError:
            waits += 1
            torch.cuda.empty_cache()
            time.sleep(0.02)
        peak = max(peak, torch.cuda.memory_reserved())
        if done % 50 == 0:
            # Memory that this process has idle is the other's.
            torch.cuda.empty_cache()
    answers.put((name, done, waits, peak, str(cuvmm.stats())))


def serve(torch, state, chosen):
    """Answers a request: weights, and a cache whose length varies from request to request."""
    if "weights" not in state:
        state["weights"] = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    rows = chosen.choice((1 << 12, 1 << 14, 1 << 16, 1 << 17))
    cache = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    found = (cache @ state["weights"]).float().mean()
    assert not torch.isnan(found)


def train(torch, state, chosen):
    """Trains on a batch whose size varies from step to step."""
    if "model" not in state:
        layers = [torch.nn.Linear(2048, 2048) for _ in range(8)]
        state["model"] = torch.nn.Sequential(*layers).cuda()
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=1e-3)
    state["optimizer"].zero_grad(set_to_none=True)
    rows = chosen.choice((1 << 10, 1 << 13, 1 << 15, 1 << 16))
    loss = state["model"](torch.randn(rows, 2048, device="cuda")).square().mean()
    loss.backward()
    state["optimizer"].step()


def main() -> None:
    parser = argparse.ArgumentParser(description="Two processes under one ledger.")
    parser.add_argument("--limit", default="8GiB", help="the most that both may have together")
    parser.add_argument("--seconds", type=float, default=20, help="how long they run")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers, until = context.Queue(), time.time() + options.seconds
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        ledger = os.path.join(folder, "gpu0")
        processes = [
            context.Process(target=work, args=(name, ledger, options.limit, until, step, answers))
            for name, step in (("serve", serve), ("train", train))
        ]
        for process in processes:
            process.start()
        for _ in processes:
            name, done, waits, peak, table = answers.get(timeout=options.seconds + 120)
            print(f"{name}: {done} steps, {waits} of them again after a moment,", end=" ")
            print(f"held {peak / 2**20:.0f} MiB at most\n{table}")
            assert done > 0, f"{name} did nothing"
        for process in processes:
            process.join()
            assert process.exitcode == 0, process.exitcode


if __name__ == "__main__":
    main()
