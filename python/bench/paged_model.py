"""The model of `paged_servers.py`: a transformer with random weights over keys and values in blocks, and the times of
its decode kernel.

It has the shapes of Qwen1.5-1.8B: 24 layers of 2,048 with 16 heads, 1.2 billion weights in bf16. It has no rotary
embedding, vocabulary or sampling: lengths come from the trace, and the tokens from the numbers of requests, so that
the keys of the first layer are known.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import numpy
import torch
import triton
import triton.language as tl
from paged_caches import BLOCK, BLOCK_BYTES, GIB, HEADS, LAYERS, SIZE, Paged, Whole, blocks_of
from paged_engine import CHUNK, LONGEST, RUNNING, Request

WIDTH, INNER, TOKENS = HEADS * SIZE, 5504, 1024
#: Rows of a tile of queries: those of a prompt, and the fewest for tensor cores.
ROWS, ONE = 64, 16
#: Triton's interpreter runs the kernels on the CPU, for a try without a GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


@triton.jit
def store(mixed, keys, values, slots, block_stride, token_stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Writes the keys and values of a row of `[query, key, value]` to its slot of the cache."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    place = slot // BLOCK * block_stride + slot % BLOCK * token_stride + lane
    own = mixed + row.to(tl.int64) * 3 * WIDTH + lane
    tl.store(keys + place, tl.load(own + WIDTH))
    tl.store(values + place, tl.load(own + 2 * WIDTH))


@triton.jit
def attend(
    mixed,
    keys,
    values,
    out,
    tables,
    tiles,
    block_stride,
    token_stride,
    table_stride,
    scale,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Computes attention of one head for a tile of successive rows of one request, in one pass over its blocks.

    A tile is `[first row, rows, position of the first row, row of the block table]`.
    """
    tile, head = tiles + tl.program_id(0) * 4, tl.program_id(1)
    start, count = tl.load(tile).to(tl.int64), tl.load(tile + 1)
    first, table = tl.load(tile + 2), tables + tl.load(tile + 3).to(tl.int64) * table_stride
    row, lane = tl.arange(0, ROWS), head * SIZE + tl.arange(0, SIZE)
    mine = (row < count)[:, None]
    query = tl.load(mixed + (start + row)[:, None] * 3 * WIDTH + lane[None, :], mask=mine, other=0.0)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total, sums = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, SIZE], tl.float32)
    end = first + count
    for at in range(0, end, TILE):
        token = at + tl.arange(0, TILE)
        there = token < end
        number = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
        place = number * block_stride + (token % BLOCK).to(tl.int64) * token_stride
        key = tl.load(keys + place[None, :] + lane[:, None], mask=there[None, :], other=0.0)
        score = tl.dot(query, key) * scale
        seen = (token[None, :] <= first + row[:, None]) & there[None, :]
        score = tl.where(seen, score, -float("inf"))
        now = tl.maximum(most, tl.max(score, 1))
        weight, kept = tl.exp(score - now[:, None]), tl.exp(most - now)
        value = tl.load(values + place[:, None] + lane[None, :], mask=there[:, None], other=0.0)
        total = total * kept + tl.sum(weight, 1)
        sums = sums * kept[:, None] + tl.dot(weight.to(value.dtype), value)
        most = now
    found = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (start + row)[:, None] * WIDTH + lane[None, :], found, mask=mine)


def launch_attend(mixed, part, out, tables, tiles, rows: int) -> None:
    keys, values = part
    block, token, head, _ = keys.stride()
    assert head == SIZE and values.stride() == keys.stride()
    strides = (block, token, tables.stride(0), SIZE**-0.5)
    attend[(tiles.shape[0], HEADS)](
        mixed, keys, values, out, tables, tiles, *strides, rows, 64, BLOCK, SIZE, WIDTH, num_warps=4
    )


class Model:
    """The model over a cache whose layers' keys and values are `parts`. `take` and `give` lend blocks to try it."""

    def __init__(self, parts: list[tuple[Any, Any]], take: Any, give: Any) -> None:
        torch.manual_seed(0)
        self.parts, self.wrong = parts, 0
        weights = lambda rows, columns: torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE) * rows**-0.5
        shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * INNER), (INNER, WIDTH))
        self.layers = [[weights(*shape) for shape in shapes] for _ in range(LAYERS)]
        self.embedded = weights(TOKENS, WIDTH) * TOKENS**0.5
        self.first_keys = (self.norm(self.embedded) @ self.layers[0][0])[:, WIDTH : 2 * WIDTH].float()
        host = torch.zeros(RUNNING, blocks_of(LONGEST) + 1, dtype=torch.int32)
        self.host = host if INTERPRETED else host.pin_memory()
        self.rows, self.tables = self.host.numpy(), torch.zeros_like(self.host, device=DEVICE)
        # Compiles the kernels, and takes the memory of the largest prompt.
        tried = Request(0, 0.0, 1, 1, prompt=CHUNK, numbers=take(blocks_of(CHUNK + 1)), slot=0)
        self.place(tried, 0)
        self.run([], [(tried, CHUNK)])
        tried.length = CHUNK
        self.run([tried], [])
        tried.length = CHUNK + 1
        self.ends(tried)
        give(tried.numbers)
        if self.wrong:
            raise SystemExit("the keys in the cache are not those that were written")

    def place(self, request: Request, at: int) -> None:
        """Writes a request's numbers from one on into the block table."""
        self.rows[request.slot, at : len(request.numbers)] = request.numbers[at:]

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (WIDTH,))

    def ids(self, request: Request, begin: int, end: int) -> numpy.ndarray:
        return (request.number * 31 + numpy.arange(begin, end)) % TOKENS

    def run(self, decodes: list[Request], chunks: list[tuple[Request, int]]) -> None:
        """Computes a token of each of some requests and parts of prompts, and waits for it."""
        parts = [(one, 1) for one in decodes] + chunks
        ids = [self.ids(one, one.length, one.length + count) for one, count in parts]
        slots, tiles, row = [], ([], []), 0
        for one, count in parts:
            at = numpy.arange(one.length, one.length + count)
            slots.append(self.rows[one.slot, at // BLOCK].astype(numpy.int64) * BLOCK + at % BLOCK)
            size = ONE if count == 1 else ROWS
            for begin in range(0, count, size):
                tile = (row + begin, min(size, count - begin), one.length + begin, one.slot)
                tiles[size == ROWS].append(tile)
            row += count
        self.tables.copy_(self.host, non_blocking=True)
        tiles = [torch.tensor(some, dtype=torch.int32, device=DEVICE).view(-1, 4) for some in tiles]
        slots = torch.from_numpy(numpy.concatenate(slots)).to(DEVICE)
        x = self.embedded[torch.from_numpy(numpy.concatenate(ids)).to(DEVICE)]
        self.compute(x, slots, tiles)
        if not INTERPRETED:
            torch.cuda.synchronize()

    def compute(self, x: torch.Tensor, slots: torch.Tensor, tiles: list[torch.Tensor]) -> torch.Tensor:
        out = torch.empty_like(x)
        for part, (mix, project, widen, narrow) in zip(self.parts, self.layers, strict=True):
            mixed = self.norm(x) @ mix
            keys, values = part
            store[(x.shape[0],)](mixed, keys, values, slots, *keys.stride()[:2], BLOCK, WIDTH)
            for some, rows in zip(tiles, (ONE, ROWS), strict=True):
                if some.shape[0]:
                    launch_attend(mixed, part, out, self.tables, some, rows)
            x = torch.addmm(x, out, project)
            gate, up = (self.norm(x) @ widen).chunk(2, 1)
            x = torch.addmm(x, torch.nn.functional.silu(gate) * up, narrow)
        return x

    def ends(self, request: Request) -> None:
        """Compares the keys of a request's tokens in the first layer with what was written."""
        length = request.length
        numbers = torch.from_numpy(self.rows[request.slot, : blocks_of(length)].astype(numpy.int64)).to(DEVICE)
        found = self.parts[0][0][numbers].reshape(-1, WIDTH)[:length].float()
        known = self.first_keys[torch.from_numpy(self.ids(request, 0, length)).to(DEVICE)]
        # Matrix products of other sizes round in another way; keys of other tokens are far away.
        close = (found - known).norm(dim=1) < 0.1 * known.norm(dim=1)
        self.wrong += not bool(close.all())


def reference(mixed, part, tables, tiles) -> torch.Tensor:
    """Computes what `attend` computes for tiles of one row, in float32."""
    found = []
    for start, _, first, table in tiles.tolist():
        numbers = tables[table, : blocks_of(first + 1)].long()
        keys, values = (it[numbers].reshape(-1, HEADS, SIZE)[: first + 1].float() for it in part)
        query = mixed[start, :WIDTH].view(HEADS, SIZE).float()
        weight = torch.einsum("hs,ths->ht", query, keys).mul(SIZE**-0.5).softmax(1)
        found.append(torch.einsum("ht,ths->hs", weight, values).reshape(-1))
    return torch.stack(found)


class Decode:
    """One decode step's attention in all layers, launched and as a captured graph."""

    def __init__(self, name: str, parts: list[tuple[Any, Any]], numbers: list[int], length: int) -> None:
        self.name, self.parts, blocks = name, parts, blocks_of(length)
        count = len(numbers) // blocks
        torch.manual_seed(1)
        self.mixed = torch.randn(count, 3 * WIDTH, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.empty(count, WIDTH, dtype=torch.bfloat16, device=DEVICE)
        self.tables = torch.tensor(numbers, dtype=torch.int32, device=DEVICE).view(count, blocks)
        rows = [(row, 1, length - 1, row) for row in range(count)]
        self.tiles = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        for keys, values in parts:
            for one in self.tables.long():
                keys[one] = torch.randn(blocks, BLOCK, HEADS, SIZE, dtype=torch.bfloat16, device=DEVICE)
                values[one] = torch.randn(blocks, BLOCK, HEADS, SIZE, dtype=torch.bfloat16, device=DEVICE)
        self.launch()
        known = reference(self.mixed, parts[-1], self.tables, self.tiles)
        torch.testing.assert_close(self.out.float(), known, rtol=2e-2, atol=2e-2)

    def launch(self) -> None:
        for part in self.parts:
            launch_attend(self.mixed, part, self.out, self.tables, self.tiles, ONE)

    def capture(self) -> Any:
        """Captures the step, and checks that a replay computes the same."""
        known = self.out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch()
        self.out.zero_()
        graph.replay()
        assert torch.equal(self.out, known)
        return graph.replay


def milliseconds(run: Any) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    run()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended)


def kernel_rows(requests: int = 64, length: int = 2000, turns: int = 30) -> list[dict[str, Any]]:
    """Times a decode step over one tensor, over a paged cache whose blocks were taken and given back at random, and
    over the tensor of its default extents and of small ones, in turns. Prints a table."""
    count = requests * blocks_of(length)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2)).tolist()
    whole = Whole(count)
    decodes = [Decode("one tensor", whole.parts(), order, length)]
    caches = [(f"paged cache, extents of {extent}", Paged(count, extent, None, extent)) for extent in ("16MiB", "2MiB")]
    for name, cache in caches:
        # Extents get their memory in the order of first use.
        for number in order:
            if number > 0:
                cache.kv.back([number])
        decodes.append(Decode(name, cache.parts(), order, length))
    for one in decodes[1:]:
        assert torch.equal(one.out, decodes[0].out)
    runs = {}
    for one in decodes:
        runs |= {(one.name, "launched"): one.launch, (one.name, "graph"): one.capture()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for _ in range(turns):
        for key, run in runs.items():
            times[key].append(milliseconds(run))
    rows = []
    size = count * BLOCK_BYTES / GIB
    print(f"# {torch.cuda.get_device_name()}: {requests} requests of {length} tokens, {size:.1f} GiB")
    print("| memory | how | ms a step | of one tensor |\n|---|---|---|---|")
    for (name, how), found in times.items():
        ms = statistics.median(found[3:])
        ratio = ms / statistics.median(times[decodes[0].name, how][3:])
        rows.append({"memory": name, "how": how, "ms": ms, "ratio": ratio})
        print(f"| {name} | {how} | {ms:.2f} | {ratio:.3f} |")
    return rows
