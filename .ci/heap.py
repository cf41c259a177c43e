"""Checks the figures of `cuvmm heap --json` on three recorded training runs.

Usage: heap.py LLAMA LLAMA_WITH_CHECKPOINTING RESNET
"""

import json
import sys

# Each: the peak of held over live bytes, and mappings for a thousand operations, at most.
BOUNDS = [(1.045, 20), (1.06, 5), (1.03, 4)]


def main():
    wrong = []
    for path, (ratio, mappings) in zip(sys.argv[1:], BOUNDS, strict=True):
        with open(path, encoding="utf-8") as file:
            seen = json.load(file)
        per_thousand = seen["mappings"] * 1000 / seen["operations"]
        print(f"{path}: held over live {seen['ratio']:.4f}, {per_thousand:.1f} mappings for 1,000 operations")
        if seen["failed"] or seen["ratio"] > ratio or per_thousand > mappings:
            wrong.append(f"{path}: at most {ratio} and {mappings} are allowed: {seen}")
    if wrong:
        sys.exit("\n".join(wrong))


main()
