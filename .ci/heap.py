"""Checks the figures of `cuvmm heap --json` on three recorded training runs and on a churn.

Usage: heap.py LLAMA LLAMA_WITH_CHECKPOINTING RESNET STREAMS
"""

import json
import sys

# Each: the peak of held over live bytes, mappings for a thousand operations, and held over what
# PyTorch's expandable segments hold, at most. Then what those held of the live bytes on a GPU.
BOUNDS = [
    (1.045, 20, 1.04, 1.055),
    (1.06, 5, 1.0, 1.125),
    (1.03, 4, 1.04, 1.01),
    (1.15, None, 1.04, None),
]


def main():
    wrong = []
    for path, (ratio, mappings, beside, measured) in zip(sys.argv[1:], BOUNDS, strict=True):
        with open(path, encoding="utf-8") as file:
            seen = json.load(file)
        per_thousand = seen["mappings"] * 1000 / seen["operations"]
        expandable = seen["expandable"]
        print(
            f"{path}: held over live {seen['ratio']:.4f} (models: native {seen['native']['ratio']:.4f}, "
            f"expandable {expandable['ratio']:.4f}), {per_thousand:.1f} mappings for 1,000 operations"
        )
        if seen["failed"] or expandable["failed"] or seen["native"]["failed"]:
            wrong.append(f"{path}: allocations failed: {seen}")
        if seen["ratio"] > ratio or (mappings and per_thousand > mappings):
            wrong.append(f"{path}: at most {ratio} and {mappings} are allowed: {seen}")
        if seen["ratio"] > expandable["ratio"] * beside:
            wrong.append(f"{path}: at most {beside} of what expandable segments hold is allowed: {seen}")
        if measured and abs(expandable["ratio"] - measured) > 0.002:
            wrong.append(f"{path}: PyTorch held {measured}, and its model {expandable['ratio']}")
    if wrong:
        sys.exit("\n".join(wrong))


main()
