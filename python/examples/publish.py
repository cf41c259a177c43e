#!/usr/bin/env python3
"""A process publishes a model, and others serve from the same bytes and take up a newer version.

    python3 publish.py [--gib 2] [--readers 2] [--in-place]

The device has the weights once, however many processes read them: the figure that each prints is what
became less free while it attached. With `--in-place` the publisher's own tensors are published, so that it
has no copy of them either; it writes to them only when all readers have answered.
"""

import argparse
import contextlib
import multiprocessing
import time

import torch

import cuvmm
import cuvmm.torch

NAME = "publish-example"


class Model(torch.nn.Module):
    """Layers whose weights are 32 MiB each. The last one is tied to the first."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        make = lambda: torch.nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
        self.layers = torch.nn.ModuleList(make() for _ in range(layers))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = torch.tanh(layer(tokens))
        return tokens


def answer_of(model: Model) -> float:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randn(8, 4096, generator=generator).to("cuda", torch.bfloat16)
    with torch.inference_mode():
        return float(model(tokens).float().square().sum())


def free() -> int:
    return torch.cuda.cudart().cudaMemGetInfo(0)[0]


def serve(number: int, layers: int, answers) -> None:
    """Attaches the model, answers, waits for the next version, and answers again."""
    torch.cuda.init()
    # Kernels and the workspaces of libraries are loaded before it is measured.
    answer_of(Model(2).cuda())
    before, begun = free(), time.perf_counter()
    weights = cuvmm.attach(NAME, timeout=60)
    took = (time.perf_counter() - begun) * 1e3
    taken = before - free()
    with torch.device("meta"):
        model = Model(layers)
    model.load_state_dict(weights, assign=True)
    print(
        f"reader {number}: {weights}, {took:.1f} ms, {taken / 2**20:.0f} MiB less free", flush=True
    )
    answers.put((weights.version, answer_of(model)))
    newer = weights.newer(timeout=60)
    model.load_state_dict(newer, assign=True)
    del weights
    answers.put((newer.version, answer_of(model)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Publishes a model for several processes.")
    parser.add_argument("--gib", type=float, default=2, help="the size of the model")
    parser.add_argument("--readers", type=int, default=2, help="processes that attach it")
    parser.add_argument("--in-place", action="store_true", help="publish without a copy")
    options = parser.parse_args()
    layers = max(2, int(options.gib * 32))
    processes = multiprocessing.get_context("spawn")
    answers = processes.Queue()
    readers = [
        processes.Process(target=serve, args=(number, layers, answers))
        for number in range(options.readers)
    ]
    for reader in readers:
        reader.start()

    torch.manual_seed(1)
    # Memory that other processes may get is created so.
    memory = cuvmm.torch.pool(NAME, shareable=True) if options.in_place else contextlib.nullcontext()
    with memory:
        model = Model(layers).cuda()
    for version in (1, 2):
        torch.cuda.synchronize()
        before, begun = free(), time.perf_counter()
        published = cuvmm.publish(model.state_dict(), NAME, copy=not options.in_place)
        took, taken = (time.perf_counter() - begun) * 1e3, before - free()
        print(f"{published}: {took:.1f} ms, {taken / 2**20:.0f} MiB less free", flush=True)
        assert published.version == version
        expected = answer_of(model)
        for _ in readers:
            found = answers.get(timeout=120)
            assert found == (version, expected), (found, expected)
        with torch.no_grad():
            for layer in model.layers[1:-1]:
                layer.weight.add_(0.001)
    for reader in readers:
        reader.join()
        assert reader.exitcode == 0
    published.withdraw()
    print("all readers answered as the publisher does, with both versions")


if __name__ == "__main__":
    main()
