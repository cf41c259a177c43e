"""Checks the figures of `cuvmm heap --json` on three recorded training runs and on churns.

Usage: heap.py LLAMA LLAMA_WITH_CHECKPOINTING RESNET UNIFORM GROWING SMALL SEQUENCES STREAMS

All but the last are of runs with `--smallest-limit`.
"""

import json
import sys

# Each, at most: the peak of held over live bytes, mappings for a thousand operations, microseconds in
# the driver an operation, held over what PyTorch's expandable segments hold, the smallest limit over
# live bytes. Then what those held of the live bytes on a GPU.
BOUNDS = [
    (1.045, 28, 1.0, 0.99, 1.02, 1.055),
    (1.03, 12, 0.42, 0.92, 1.02, 1.125),
    (1.015, 2.8, 0.12, 1.0, 1.015, 1.01),
    (1.1, 520, 22, 0.93, 1.04, 1.193),
    (1.07, 1360, 67, 0.85, 1.03, 1.262),
    (1.1, 132, 2.9, 0.88, 1.1, 1.262),
    (1.07, 690, 24, 0.92, 1.04, 1.176),
    (1.105, None, 26, 1.04, None, None),
]


def at_most(wrong, path, what, seen, bound):
    if bound is not None and seen > bound:
        wrong.append(f"{path}: {what} is {seen:.4f}, and at most {bound} is allowed")


def main():
    wrong = []
    for path, bounds in zip(sys.argv[1:], BOUNDS, strict=True):
        ratio, mappings, time, beside, limit, measured = bounds
        with open(path, encoding="utf-8") as file:
            seen = json.load(file)
        per_thousand = seen["mappings"] * 1000 / seen["operations"]
        expandable = seen["expandable"]
        smallest = (seen["smallest_limit_bytes"] or 0) / seen["peak_live_bytes"]
        print(
            f"{path}: held over live {seen['ratio']:.4f} (models: native {seen['native']['ratio']:.4f}, "
            f"expandable {expandable['ratio']:.4f}), smallest limit over live {smallest:.4f}, "
            f"{per_thousand:.1f} mappings for 1,000 operations, "
            f"{seen['driver_us_per_operation']:.2f} us in the driver an operation"
        )
        if seen["failed"] or expandable["failed"] or seen["native"]["failed"]:
            wrong.append(f"{path}: allocations failed: {seen}")
        if limit and not smallest:
            wrong.append(f"{path}: there is no smallest limit")
        at_most(wrong, path, "held over live", seen["ratio"], ratio)
        at_most(wrong, path, "mappings for 1,000 operations", per_thousand, mappings)
        at_most(wrong, path, "microseconds an operation", seen["driver_us_per_operation"], time)
        at_most(wrong, path, "held over expandable", seen["ratio"] / expandable["ratio"], beside)
        at_most(wrong, path, "the smallest limit over live", smallest, limit)
        if measured and abs(expandable["ratio"] - measured) > 0.002:
            wrong.append(f"{path}: PyTorch held {measured}, and its model {expandable['ratio']}")
    if wrong:
        sys.exit("\n".join(wrong))


main()
