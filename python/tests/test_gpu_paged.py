"""Paged caches under kernels of Triton and PyTorch that write and read by block numbers, eager and in graphs."""

from __future__ import annotations

import gc
import unittest

from modes import MIB, GpuTest, only_cuvmm

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LAYERS, TOKENS, HEADS, SIZE = 2, 16, 2, 64
ROW = HEADS * SIZE
LAYOUTS = ("block-major", "token-major", "layer-major")

if triton is not None:

    @triton.jit
    def _write(cache, table, first, block_stride, token_stride, TOKENS: tl.constexpr, ROW: tl.constexpr):
        """Writes `first + place * TOKENS + token` to each element of a token's row, for each place of the table."""
        place, token = tl.program_id(0), tl.program_id(1)
        number = tl.load(table + place).to(tl.int64)
        value = tl.load(first) + (place * TOKENS + token).to(tl.float32)
        columns = tl.arange(0, ROW)
        rows = cache + number * block_stride + token * token_stride
        tl.store(rows + columns, tl.zeros((ROW,), tl.float32) + value)

    @triton.jit
    def _read(cache, table, out, block_stride, token_stride, TOKENS: tl.constexpr, ROW: tl.constexpr):
        """Copies the rows of each place of the table to `out[place, token]`."""
        place, token = tl.program_id(0), tl.program_id(1)
        number = tl.load(table + place).to(tl.int64)
        columns = tl.arange(0, ROW)
        rows = cache + number * block_stride + token * token_stride
        values = tl.load(rows + columns)
        tl.store(out + (place * TOKENS + token) * ROW + columns, values)


def launch(tensor, table, first, out) -> None:
    """Writes the blocks of a table, and reads them back."""
    block, token, head, _ = tensor.stride()
    assert head == SIZE
    grid = (table.numel(), TOKENS)
    _write[grid](tensor, table, first, block, token, TOKENS=TOKENS, ROW=ROW)
    _read[grid](tensor, table, out, block, token, TOKENS=TOKENS, ROW=ROW)


def expected(count: int, first: float) -> torch.Tensor:
    values = first + torch.arange(count * TOKENS, device="cuda", dtype=torch.float32)
    return values.view(count, TOKENS, 1).expand(count, TOKENS, ROW)


@only_cuvmm
class PagedTest(GpuTest):
    enters = False

    def make(self, blocks: int = 4096, layout: str = "block-major", **options):
        import cuvmm.torch

        group = cuvmm.torch.LayerGroup.keys_and_values(LAYERS, TOKENS, HEADS, SIZE, torch.float32)
        options = {"extent": 2 * MIB, "pinned": (), **options}
        kv = cuvmm.torch.paged_kv(blocks, group, layout=layout, **options)
        self.addCleanup(kv.close)
        return kv

    @unittest.skipIf(triton is None, "Triton is not installed")
    def test_a_kernel_of_triton_writes_and_reads_by_block_numbers(self):
        for layout in LAYOUTS:
            with self.subTest(layout):
                kv = self.make(layout=layout, name=layout, pinned=[0])
                parts = [kv.tensor(layer, part) for layer in range(LAYERS) for part in range(2)]
                first, empty = torch.zeros(1, device="cuda"), kv.stats().held
                for numbers in ([3, 4095, 900], [900, 3, 17, 2000]):
                    kv.back(numbers)
                    table = torch.tensor(numbers, device="cuda", dtype=torch.int32)
                    outs = []
                    for index, tensor in enumerate(parts):
                        first.fill_(1000.0 * (index + 1))
                        out = torch.empty(len(numbers), TOKENS, ROW, device="cuda")
                        launch(tensor, table, first, out)
                        outs.append(out)
                    # After all were written: no part lies over another one.
                    for index, (tensor, out) in enumerate(zip(parts, outs, strict=True)):
                        values = expected(len(numbers), 1000.0 * (index + 1))
                        self.assertTrue(torch.equal(out, values))
                        rows = tensor[table.long()].reshape(len(numbers), TOKENS, ROW)
                        self.assertTrue(torch.equal(rows, values))
                    kv.release(numbers)
                    torch.cuda.synchronize()
                    kv.purge()
                    self.assertEqual((kv.stats().in_use, kv.stats().held), (0, empty))

    @unittest.skipIf(triton is None, "Triton is not installed")
    def test_triton_refuses_tensors_whose_first_bytes_have_no_memory(self):
        for layout in LAYOUTS:
            with self.subTest(layout):
                kv = self.make(layout=layout, name=layout)
                kv.back([4000])
                table = torch.tensor([4000], device="cuda", dtype=torch.int32)
                first, out = torch.zeros(1, device="cuda"), torch.empty(1, TOKENS, ROW, device="cuda")
                tensor = kv.tensor(1, 1)
                with self.assertRaisesRegex(ValueError, "cannot be accessed from Triton"):
                    launch(tensor, table, first, out)
                kv.back([0])
                launch(tensor, table, first, out)
                self.assertTrue(torch.equal(out, expected(1, 0.0)))

    @unittest.skipIf(triton is None, "Triton is not installed")
    def test_a_captured_graph_follows_the_table_after_release_and_back(self):
        import cuvmm

        for layout in LAYOUTS:
            with self.subTest(layout):
                kv = self.make(layout=layout, name=layout, pinned=[0])
                tensor = kv.tensor(1, 1)
                first, count = torch.zeros(1, device="cuda"), 3
                table = torch.zeros(count, device="cuda", dtype=torch.int32)
                out = torch.empty(count, TOKENS, ROW, device="cuda")
                # Compiles the kernels: that is not part of a capture.
                launch(tensor, table, first, out)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    launch(tensor, table, first, out)
                for turn, numbers in enumerate(([1, 2, 3], [4000, 2, 77], [3, 2, 1])):
                    kv.back(numbers)
                    table.copy_(torch.tensor(numbers, dtype=torch.int32))
                    first.fill_(100.0 * turn)
                    graph.replay()
                    self.assertTrue(torch.equal(out, expected(count, 100.0 * turn)))
                    kv.release(numbers)
                    torch.cuda.synchronize()
                    kv.purge()
                    # Other memory takes the physical memory meanwhile.
                    other = cuvmm.empty(64 * MIB)
                    del other
                del graph

    def test_a_cache_sleeps_with_its_pool_and_a_captured_graph_replays_after_waking(self):
        import cuvmm
        import cuvmm.torch

        for layout in LAYOUTS:
            with self.subTest(layout):
                name = f"sleeps-{layout}"
                kv = self.make(layout=layout, name=name, pinned=[4095])
                self.addCleanup(lambda: cuvmm.asleep() and cuvmm.wake())
                with cuvmm.torch.pool(name):
                    weights = torch.randn(4 << 20, device="cuda")
                saved = weights.cpu()
                numbers = [0, 3, 4095, 900]
                kv.back([0, 3, 900])
                table = torch.tensor(numbers, device="cuda")
                tensors = [kv.tensor(layer, part) for layer in range(LAYERS) for part in range(2)]
                contents = [torch.randn(4, TOKENS, HEADS, SIZE, device="cuda") for _ in tensors]
                for tensor, content in zip(tensors, contents, strict=True):
                    tensor.index_copy_(0, table, content)
                out = torch.empty(4, TOKENS, HEADS, SIZE, device="cuda")
                torch.index_select(tensors[1], 0, table, out=out)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    torch.index_select(tensors[1], 0, table, out=out)
                addresses, before = [it.data_ptr() for it in tensors], kv.stats()
                for _ in range(2):
                    # Work that is queued keeps the memory, on a stream that the cache does not know too.
                    with torch.cuda.stream(torch.cuda.Stream()):
                        torch.cuda._sleep(500_000_000)
                        graph.replay()
                    slept = cuvmm.sleep(name)
                    self.assertGreaterEqual(slept.given[name], before.committed + 16 * MIB)
                    self.assertEqual((kv.stats().committed, kv.stats().asleep), (0, before.committed))
                    with self.assertRaisesRegex(cuvmm.Error, "call cuvmm.wake"):
                        kv.back([7])
                    # Other memory takes the physical memory meanwhile.
                    other = cuvmm.empty(256 * MIB)
                    del other
                    out.fill_(-1.0)
                    cuvmm.wake(name)
                    self.assertEqual([it.data_ptr() for it in tensors], addresses)
                    for tensor, content in zip(tensors, contents, strict=True):
                        self.assertTrue(torch.equal(tensor.index_select(0, table), content))
                    self.assertTrue(torch.equal(weights.cpu(), saved))
                    graph.replay()
                    self.assertTrue(torch.equal(out, contents[1]))
                    contents[1] = contents[1] + 1.0
                    tensors[1].index_copy_(0, table, contents[1])
                    graph.replay()
                    self.assertTrue(torch.equal(out, contents[1]))
                torch.cuda.synchronize()
                cuvmm.sleep(name, keep=False)
                cuvmm.wake(name)
                for tensor in tensors:
                    self.assertEqual(tensor.index_select(0, table).abs().sum().item(), 0.0)
                self.assertEqual(kv.stats().in_use, 3)
                del graph, weights
                kv.close()

    def test_operations_of_pytorch_work_on_the_tensors(self):
        kv = self.make(name="operations", layout="token-major", pinned=[4095])
        keys, values = kv.tensor(0, 0), kv.tensor(0, 1)
        numbers = torch.tensor([5, 4095, 60])
        kv.back(numbers)
        table = numbers.cuda()
        content = torch.randn(3, TOKENS, HEADS, SIZE, device="cuda")
        keys.index_copy_(0, table, content)
        values[table] = -content
        self.assertTrue(torch.equal(keys.index_select(0, table), content))
        self.assertTrue(torch.equal(values[table], -content))
        # Rows of all blocks at one stride, as transformers keeps them.
        rows = keys.view(-1, HEADS, SIZE)
        at = torch.arange(5 * TOKENS, 6 * TOKENS, device="cuda")
        self.assertTrue(torch.equal(rows[at], content[0]))
        whole = kv.whole()
        self.assertEqual(whole.shape, (4096, LAYERS, 2, TOKENS, HEADS, SIZE))
        self.assertTrue(torch.equal(whole[60, 0, 1], -content[2]))

    def test_elements_of_eight_bits(self):
        import cuvmm.torch

        eight = torch.float8_e4m3fn
        group = cuvmm.torch.LayerGroup(1, TOKENS, [cuvmm.torch.Part(HEADS, SIZE, eight)])
        kv = cuvmm.torch.paged_kv(64, group, name="eight", extent=2 * MIB)
        self.addCleanup(kv.close)
        kv.back([7])
        tensor = kv.tensor(0)
        self.assertIs(tensor.dtype, eight)
        content = torch.randn(TOKENS, HEADS, SIZE, device="cuda").to(eight)
        tensor[7].copy_(content)
        self.assertTrue(torch.equal(tensor[7].float(), content.float()))

    def test_memory_waits_for_queued_kernels(self):
        kv, other = self.make(name="waits"), torch.cuda.Stream()
        tensor = kv.tensor(0)
        kv.record_use(other)
        for stream in (torch.cuda.current_stream(), other):
            kv.back([1])
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000_000)
                with kv.step():
                    kv.release([1])
                    tensor[1].fill_(1.0)
            self.assertEqual(kv.purge(), 0)
            self.assertEqual((kv.stats().committed, kv.stats().withdrawn), (0, 2 * MIB))
            torch.cuda.synchronize()
            self.assertEqual(kv.purge(), 2 * MIB)

    def test_a_tensor_keeps_the_memory(self):
        import cuvmm

        kv = self.make(name="kept")
        kv.back([1])
        tensor = kv.tensor(0)
        tensor[1].fill_(3.0)
        kv.close()
        gc.collect()
        self.assertEqual(tensor[1].sum().item(), 3.0 * TOKENS * ROW)
        torch.cuda.synchronize()
        cuvmm.empty_cache()
        held = cuvmm.stats().held
        del tensor
        torch.cuda.synchronize()
        cuvmm.empty_cache()
        self.assertEqual(held - cuvmm.stats().held, 2 * MIB)

    def test_a_hook_gives_blocks_up_for_other_memory(self):
        import cuvmm

        free = cuvmm._library.get().headroom(0)[0] // (16 * MIB) * 16
        prefixes = set(range(free))

        def evict(kv, missing):
            chosen = kv.emptiest(missing, prefixes)
            kv.release(chosen.numbers)
            prefixes.difference_update(chosen.numbers)

        # 1 MiB a block.
        group = cuvmm.torch.LayerGroup(64, TOKENS, [cuvmm.torch.Part(HEADS, 256, torch.float16)])
        kv = cuvmm.torch.paged_kv(len(prefixes), group, name="hook", extent="16MiB", pinned=(), on_pressure=evict)
        self.addCleanup(kv.close)
        self.assertEqual(kv.block_bytes, MIB)
        kv.back(range(free))
        array = cuvmm.empty(256 * MIB)
        self.assertLess(len(prefixes), free)
        del array


if __name__ == "__main__":
    unittest.main()
