#!/usr/bin/env python3
"""Times a paged decode attention kernel over the layouts of a paged cache and over extents of several sizes.

    python3 python/bench/paged_layouts.py --json layouts.json
    python3 python/bench/paged_layouts.py --layers 16 --quick

Needs a GPU, PyTorch and Triton, and neither the package `cuvmm` nor anything else. One layer of a model is read at
its real strides: 256 sequences of 2,000 tokens, 16 tokens a block, 8 heads of keys and values of 128 elements in
bf16. With 32 layers a block has 2 MiB, and the cache 62.5 GiB; where the device has less, the layers are halved
until it fits.

The memory is that of one `cuMemAlloc`, which `cudaMalloc` makes, and then of extents of 2, 16 and 32 MiB
(`cuMemCreate`, `cuMemMap`), which lie in a random order of their creation, as after a time of use. Block tables are
in order, or random over all blocks. The first memory is measured again at the end, so that drift shows.

Each row is the median of the launches in GB/s of keys and values read, with the ratio to the same layout and order
over one `cuMemAlloc`. The result of each kernel is checked. It all takes less than 90 seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time

import torch
import triton
import triton.language as tl

MIB, GIB = 1 << 20, 1 << 30
SEQUENCES, LENGTH, BLOCK = 256, 2_000, 16
HEADS, SIZE = 8, 128
TABLE = LENGTH // BLOCK
ROW = HEADS * SIZE * 2
LAYOUTS = ("block-major", "token-major", "layer-major")


@triton.jit
def decode(
    keys,
    values,
    query,
    tables,
    out,
    block_stride,
    token_stride,
    length,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One query of each sequence and head over the keys and values of its blocks, in one pass."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, SIZE)
    at = (sequence * tl.num_programs(0) + head) * SIZE + lane
    asked = tl.load(query + at).to(tl.float32)
    most, total = -float("inf"), 0.0
    sums = tl.zeros([SIZE], tl.float32)
    for first in range(0, length, TILE):
        token = first + tl.arange(0, TILE)
        there = token < length
        number = tl.load(tables + sequence * TABLE + token // BLOCK, mask=there, other=0).to(tl.int64)
        place = number * block_stride + (token % BLOCK).to(tl.int64) * token_stride + head * SIZE
        place = place[:, None] + lane[None, :]
        key = tl.load(keys + place, mask=there[:, None], other=0.0).to(tl.float32)
        value = tl.load(values + place, mask=there[:, None], other=0.0).to(tl.float32)
        score = tl.where(there, tl.sum(key * asked[None, :], 1), -float("inf"))
        now = tl.maximum(most, tl.max(score, 0))
        scale, weight = tl.exp(most - now), tl.exp(score - now)
        total = total * scale + tl.sum(weight, 0)
        sums = sums * scale + tl.sum(weight[:, None] * value, 0)
        most = now
    tl.store(out + at, sums / total)


@triton.jit
def fill(keys, values, block_stride, token_stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Sets the keys of a block to zero and its values to a number that follows from that of the block."""
    number = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    place = number * block_stride + token[:, None].to(tl.int64) * token_stride + tl.arange(0, WIDTH)[None, :]
    tl.store(keys + place, tl.zeros([BLOCK, WIDTH], tl.bfloat16))
    tl.store(values + place, tl.zeros([BLOCK, WIDTH], tl.bfloat16) + (number % 128).to(tl.bfloat16))


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Props(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Driver:
    """The calls of libcuda. The context is PyTorch's."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code != 0:
            raise OSError(f"{name}: CUDA error {code}")


U64 = ctypes.c_uint64


class Plain:
    """One `cuMemAlloc`."""

    name = "cuMemAlloc"

    def __init__(self, driver: Driver, size: int) -> None:
        self.driver, address = driver, U64()
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value

    def free(self) -> None:
        self.driver.call("cuMemFree_v2", U64(self.address))


class Extents:
    """A reservation with extents of one size, created in order and mapped in a random one."""

    def __init__(self, driver: Driver, size: int, extent: int) -> None:
        self.driver, self.name = driver, f"extents of {extent // MIB} MiB"
        self.extent, self.count = extent, -(-size // extent)
        self.size, address = self.count * extent, U64()
        self.handles = []
        here = Location(1, torch.cuda.current_device())
        props = Props(type=1, location=here)
        reserve = (ctypes.c_size_t(self.size), ctypes.c_size_t(0), U64(0), U64(0))
        driver.call("cuMemAddressReserve", ctypes.byref(address), *reserve)
        self.address = address.value
        for _ in range(self.count):
            handle = U64()
            driver.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(extent), ctypes.byref(props), U64(0))
            self.handles.append(handle)
        order = list(range(self.count))
        random.Random(7).shuffle(order)
        for at, handle in zip(order, self.handles, strict=True):
            place = U64(self.address + at * extent)
            driver.call("cuMemMap", place, ctypes.c_size_t(extent), ctypes.c_size_t(0), handle, U64(0))
        access = Access(here, 3)
        whole = (U64(self.address), ctypes.c_size_t(self.size))
        driver.call("cuMemSetAccess", *whole, ctypes.byref(access), ctypes.c_size_t(1))

    def free(self) -> None:
        self.driver.call("cuMemUnmap", U64(self.address), ctypes.c_size_t(self.size))
        for handle in self.handles:
            self.driver.call("cuMemRelease", handle)
        self.driver.call("cuMemAddressFree", U64(self.address), ctypes.c_size_t(self.size))


class Pointer:
    """Memory at an address, as Triton takes a tensor."""

    dtype = torch.bfloat16

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def view(layout: str, base: int, layers: int, blocks: int) -> tuple[Pointer, Pointer, int, int]:
    """Returns the keys and values of a layer in the middle, and the strides of blocks and tokens in elements."""
    layer, block = layers // 2, layers * 2 * BLOCK * ROW
    if layout == "block-major":
        offsets, strides = [(2 * layer + part) * BLOCK * ROW for part in (0, 1)], (block, ROW)
    elif layout == "token-major":
        offsets, strides = [(2 * layer + part) * ROW for part in (0, 1)], (block, layers * 2 * ROW)
    else:
        offsets, strides = [(2 * layer + part) * blocks * BLOCK * ROW for part in (0, 1)], (BLOCK * ROW, ROW)
    keys, values = (Pointer(base + offset) for offset in offsets)
    return keys, values, strides[0] // 2, strides[1] // 2


def measure(memory, layers: int, tables: dict, launches: int) -> list[dict]:
    """Times the kernel over the memory, in each layout and with each block table."""
    blocks, rows = SEQUENCES * TABLE, []
    query = torch.randn(SEQUENCES, HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(SEQUENCES, HEADS, SIZE, dtype=torch.float32, device="cuda")
    for layout in LAYOUTS:
        keys, values, block, token = view(layout, memory.address, layers, blocks)
        fill[(blocks,)](keys, values, block, token, BLOCK, HEADS * SIZE)
        for order, table in tables.items():

            def launch() -> None:
                decode[(HEADS, SEQUENCES)](
                    keys, values, query, table, out, block, token, LENGTH, TABLE, BLOCK, SIZE, 64, num_warps=4
                )

            for _ in range(3):
                launch()
            # The keys are zero, so all tokens weigh the same.
            known = (table % 128).float().mean(1)[:, None, None].expand_as(out)
            torch.testing.assert_close(out, known, rtol=1e-3, atol=1e-3)
            times = []
            for _ in range(launches):
                begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begun.record()
                launch()
                ended.record()
                ended.synchronize()
                times.append(begun.elapsed_time(ended))
            read = SEQUENCES * LENGTH * ROW * 2
            speed = read / statistics.median(times) / 1e6
            rows.append({"memory": memory.name, "layout": layout, "order": order, "gb_per_s": speed})
    return rows


def layers_that_fit(wanted: int) -> int:
    free, layers = torch.cuda.mem_get_info()[0], wanted
    while layers > 1 and SEQUENCES * TABLE * layers * 2 * BLOCK * ROW > free - 2 * GIB:
        layers //= 2
    return layers


def run(layers: int, quick: bool) -> list[dict]:
    torch.zeros(1, device="cuda")
    driver, blocks = Driver(), SEQUENCES * TABLE
    size = blocks * layers * 2 * BLOCK * ROW
    order = torch.arange(blocks, dtype=torch.int32, device="cuda").view(SEQUENCES, TABLE)
    torch.manual_seed(3)
    mixed = torch.randperm(blocks, device="cuda").to(torch.int32).view(SEQUENCES, TABLE)
    tables, launches = {"in order": order, "random": mixed}, 15 if quick else 50
    rows: list[dict] = []
    for extent in (None, 2 * MIB, 16 * MIB, 32 * MIB, None):
        begun = time.perf_counter()
        memory = Plain(driver, size) if extent is None else Extents(driver, size, extent)
        try:
            measured = measure(memory, layers, tables, launches)
            torch.cuda.synchronize()
        finally:
            memory.free()
        if extent is None and rows:
            for row in measured:
                row["memory"] += ", again"
        rows += measured
        print(f"# {memory.name}: {time.perf_counter() - begun:.1f} s", flush=True)
    plain = {(row["layout"], row["order"]): row["gb_per_s"] for row in rows if row["memory"] == Plain.name}
    for row in rows:
        row["ratio"] = row["gb_per_s"] / plain[row["layout"], row["order"]]
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--layers", type=int, default=32, help="layers of the model, for the strides")
    arguments.add_argument("--quick", action="store_true", help="15 launches a row instead of 50")
    arguments.add_argument("--json", metavar="FILE", help="writes the rows there")
    given = arguments.parse_args()
    layers = layers_that_fit(given.layers)
    versions = f"PyTorch {torch.__version__}, Triton {triton.__version__}"
    print(f"# {torch.cuda.get_device_name()}, {versions}, {layers} layers")
    rows = run(layers, given.quick)
    print("| layout | blocks | memory | GB/s | of cuMemAlloc |\n|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (LAYOUTS.index(row["layout"]), row["order"])):
        place = f"| {row['layout']} | {row['order']} | {row['memory']} "
        print(f"{place}| {row['gb_per_s']:.0f} | {row['ratio']:.3f} |")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "layers": layers, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
