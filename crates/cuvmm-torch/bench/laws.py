"""Sequences of allocations that are made by a law of sizes.

The first four laws are those of `cuvmm heap --churn`, with the same random numbers, so a law and a
seed give the same sequence here and there. All laws have one rule: before an allocation that would
exceed the cap of live bytes, live allocations are freed, each chosen uniformly at random, until it
fits.
"""

import math
from fractions import Fraction

MIB = 1 << 20
GIB = 1 << 30
MASK = (1 << 64) - 1


class Random:
    """SplitMix64."""

    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        mixed = self.state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        return mixed ^ (mixed >> 31)

    def below(self, bound):
        return self.next() % bound

    def fraction(self):
        return (self.next() >> 11) / (1 << 53)

    def normal(self):
        """A normally distributed number (Box-Muller, the cosine)."""
        radius = math.sqrt(-2.0 * math.log(max(self.fraction(), 1e-12)))
        return radius * math.cos(2.0 * math.pi * self.fraction())


def fused(factor, other, summand):
    """The product and the sum, rounded once."""
    return float(Fraction(factor) * Fraction(other) + Fraction(summand))


def uniform(random, progress):
    return MIB + random.below(511 * MIB), 0


def growing(random, progress):
    even = fused(504.0, progress, 8.0)
    return int(even * fused(0.5, random.fraction(), 0.75) * float(MIB)), 0


def small(random, progress):
    return min(int(math.exp(1.5 * random.normal()) * float(MIB)), 64 * MIB), 0


def sequences(random, progress):
    tokens = 128 + random.below(3969)
    return tokens * ([16, 64, 128][random.below(3)] << 10), 0


def moving(random, progress):
    """Four streams. One of them makes most of the allocations, and it changes eight times."""
    size = MIB + random.below(255 * MIB)
    hot = int(progress * 8) % 4
    return size, hot if random.below(100) < 85 else random.below(4)


# Each law: its function, the cap of live bytes, the number of allocations.
LAWS = {
    "uniform": (uniform, 32 * GIB, 4000),
    "growing": (growing, 32 * GIB, 4000),
    "small": (small, 4 * GIB, 40000),
    "sequences": (sequences, 48 * GIB, 4000),
    "moving": (moving, 16 * GIB, 4000),
}


def trace(name, seed):
    """The operations of a law: `(id, size, stream)` allocates, `(id,)` frees."""
    law, cap, count = LAWS[name]
    random = Random(seed)
    operations, live, held = [], [], 0
    for number in range(count):
        size, stream = law(random, number / count)
        size = max(size // 512 * 512, 512)
        while held + size > cap and live:
            victim = random.below(len(live))
            freed, bytes_freed = live[victim]
            last = live.pop()
            if victim < len(live):
                live[victim] = last
            held -= bytes_freed
            operations.append((freed,))
        operations.append((number, size, stream))
        live.append((number, size))
        held += size
    return operations


def peak(operations):
    """The highest sum of live sizes."""
    sizes, live, most = {}, 0, 0
    for operation in operations:
        if len(operation) == 3:
            sizes[operation[0]] = operation[1]
            live += operation[1]
            most = max(most, live)
        else:
            live -= sizes.pop(operation[0])
    return most


def checksum(operations):
    """A number that differs for different sequences: FNV-1a over their lines."""
    value = 0xCBF29CE484222325
    for operation in operations:
        if len(operation) == 3:
            line = "a %d %d %d\n" % operation
        else:
            line = "f %d\n" % operation
        for byte in line.encode():
            value = ((value ^ byte) * 0x100000001B3) & MASK
    return value
