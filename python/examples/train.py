#!/usr/bin/env python3
"""Trains a small language model on cuvmm: one line puts it in.

    python3 train.py [--steps 200] [--limit 8GiB] [--native]

Prints the peak of what was live and of what was held, and the heap's figures. `--native` trains on
PyTorch's own allocator, for comparison.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional


class Model(nn.Module):
    """A causal decoder over bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small language model on cuvmm.")
    parser.add_argument("--steps", type=int, default=200, help="batches to train on")
    parser.add_argument("--limit", help="the most that the heap may hold, such as 8GiB")
    parser.add_argument(
        "--preset", default="tight", choices=["tight", "fast"], help="which heap"
    )
    parser.add_argument("--native", action="store_true", help="PyTorch's own allocator")
    parser.add_argument("--width", type=int, default=512, help="the size of a token's vector")
    parser.add_argument("--layers", type=int, default=8, help="the number of layers")
    options = parser.parse_args()

    if not options.native:
        import cuvmm.torch

        cuvmm.torch.install(limit=options.limit, preset=options.preset)

    torch.manual_seed(0)
    model = Model(options.width, options.layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    text = torch.arange(1 << 20).mul(7).remainder(251).cuda()
    begun, loss = time.perf_counter(), None
    for step in range(options.steps):
        # Lengths vary from batch to batch, as in real data: that is what divides memory.
        length = 64 + step * 37 % 448
        starts = torch.randint(len(text) - length - 1, (16384 // length,))
        batch = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        optimizer.zero_grad(set_to_none=True)
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {float(loss):.3f}", flush=True)
    print(f"step {options.steps}: loss {float(loss):.3f}")
    spent = time.perf_counter() - begun

    live, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"{spent / max(1, options.steps) * 1e3:.1f} ms a step")
    print(f"peak live {live / 2**20:.0f} MiB, peak held {held / 2**20:.0f} MiB: {held / live:.3f}")
    if not options.native:
        print(cuvmm.stats())


if __name__ == "__main__":
    main()
