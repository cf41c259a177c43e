"""Allocation, streams, threads, and figures."""

import gc
import random
import subprocess
import sys
import threading
import unittest

from modes import GIB, LIMIT, MIB, MODE, GpuTest, memory, only_installed, torch


def churn(seed: int, steps: int) -> int:
    """Fills tensors on four streams, and reads them on others just before they are freed.

    Readers are late, so a tensor's memory that is reused too early is seen. Returns the number of
    wrong bytes.
    """
    chosen = random.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(4)]
    live, wrong = [], []
    for step in range(steps):
        home = streams[chosen.randrange(4)]
        size = 1 + chosen.randrange(16 * MIB if chosen.randrange(4) == 0 else MIB)
        byte = (step * 7 + seed) % 251
        with torch.cuda.stream(home):
            live.append((torch.full((size,), byte, dtype=torch.uint8, device="cuda"), byte, home))
        if len(live) <= 24:
            continue
        tensor, byte, home = live.pop(chosen.randrange(len(live)))
        reader = streams[chosen.randrange(4)]
        if reader is not home:
            reader.wait_stream(home)
            tensor.record_stream(reader)
        with torch.cuda.stream(reader):
            torch.cuda._sleep(200_000)
            wrong.append((tensor != byte).sum())
        del tensor
    torch.cuda.synchronize()
    found = sum(int(count) for count in wrong)
    return found + sum(int((tensor != byte).sum()) for tensor, byte, _ in live)


# PyTorch's own functions are not made for threads that outlive the interpreter.
ENDS = """
import itertools, threading, time
import modes
from cuvmm import _library

library, torch = _library.get(), modes.torch
kept = torch.full((modes.MIB,), 1, device="cuda")
streams = [torch.cuda.Stream() for _ in range(3)]

def run(stream):
    for step in itertools.count():
        size = 1 + step * 7919 * 4096 % (64 << 20)
        library.free(library.allocate(size, 0, stream), size, 0, stream)
        if step % 20 == 0:
            library.reset()

for stream in streams:
    threading.Thread(target=run, args=(stream.cuda_stream,), daemon=True).start()
time.sleep(2)
torch.cuda._sleep(1_000_000_000)
print("ends")
"""


class Allocation(GpuTest):
    def test_sizes(self):
        live = []
        for number, size in enumerate((0, 1, 511, 512, 513, MIB - 1, MIB, 3 * MIB + 7, 65 * MIB)):
            live.append((torch.full((size,), number, dtype=torch.uint8, device="cuda"), number))
            self.assertEqual(live[-1][0].data_ptr() % 512, 0)
        for tensor, number in live:
            self.assertTrue(bool((tensor == number).all()), tensor.numel())

    def test_dtypes_and_views(self):
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool):
            made = torch.ones(1001, 33, device="cuda", dtype=dtype)
            # Half precision does not have all numbers of that size.
            found = made[::7, 3:].sum(dtype=torch.float64)
            self.assertEqual(int(found), len(range(0, 1001, 7)) * 30)

    def test_resize_and_clone(self):
        grown = torch.arange(1000, device="cuda")
        grown.resize_(5_000_000)
        self.assertEqual(grown[:1000].tolist(), list(range(1000)))
        copied = grown[:1000].clone()
        del grown
        self.assertEqual(int(copied.sum()), 499_500)

    def test_copies(self):
        stream = torch.cuda.Stream()
        for number in range(20):
            source = torch.full((3_000_001,), number, dtype=torch.uint8).pin_memory()
            with torch.cuda.stream(stream):
                there = source.to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            there.record_stream(torch.cuda.current_stream())
            doubled = there * 2
            del there
            self.assertEqual((int(doubled.min()), int(doubled.max())), (2 * number, 2 * number))

    def test_raw_allocations(self):
        address = torch.cuda.caching_allocator_alloc(5 * MIB)
        self.assertNotEqual(address, 0)
        torch.cuda.caching_allocator_delete(address)


class Streams(GpuTest):
    def test_contents(self):
        self.assertEqual(churn(1, 400), 0)

    def test_record_stream_keeps_memory(self):
        side = torch.cuda.Stream()
        for number in range(10):
            source = torch.full((8 * MIB,), number, dtype=torch.uint8, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                copy = source.clone()
            source.record_stream(side)
            del source
            over = torch.full((8 * MIB,), 255, dtype=torch.uint8, device="cuda")
            side.synchronize()
            self.assertEqual((int(copy.min()), int(copy.max())), (number, number))
            del over

    def test_events_between_streams(self):
        streams = [torch.cuda.Stream() for _ in range(3)]
        value = torch.zeros(MIB, device="cuda")
        torch.cuda.synchronize()
        for step in range(30):
            stream = streams[step % 3]
            with torch.cuda.stream(stream):
                value = value + 1
                value.record_stream(streams[(step + 1) % 3])
                done = stream.record_event()
            streams[(step + 1) % 3].wait_event(done)
        torch.cuda.synchronize()
        self.assertEqual((float(value.min()), float(value.max())), (30.0, 30.0))


class Threads(GpuTest):
    def test_contents(self):
        found = [None] * 4

        def run(number):
            with memory():
                found[number] = churn(10 + number, 150)

        running = [threading.Thread(target=run, args=(number,)) for number in range(len(found))]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        self.assertEqual(found, [0] * len(found))

    @only_installed
    def test_the_process_ends_while_threads_and_kernels_work(self):
        ended = subprocess.run(
            [sys.executable, "-c", ENDS],
            cwd=__file__.rpartition("/")[0],
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual((ended.returncode, ended.stdout), (0, "ends\n"), ended.stderr)

    def test_freed_by_another_thread(self):
        made = [
            torch.full((MIB,), number, dtype=torch.uint8, device="cuda") for number in range(50)
        ]
        thread = threading.Thread(target=made.clear)
        thread.start()
        thread.join()
        again = [torch.full((MIB,), 9, dtype=torch.uint8, device="cuda") for _ in range(50)]
        self.assertTrue(all(bool((tensor == 9).all()) for tensor in again))


class Figures(GpuTest):
    """PyTorch's figures agree with what a program knows, in every mode."""

    def setUp(self):
        super().setUp()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def test_allocated_and_peak(self):
        before = torch.cuda.memory_allocated()
        one = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        two = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        self.assertEqual(torch.cuda.memory_allocated() - before, 96 * MIB)
        del two
        self.assertEqual(torch.cuda.memory_allocated() - before, 32 * MIB)
        self.assertEqual(torch.cuda.max_memory_allocated() - before, 96 * MIB)
        torch.cuda.reset_peak_memory_stats()
        self.assertEqual(torch.cuda.max_memory_allocated() - before, 32 * MIB)
        self.assertGreaterEqual(torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
        self.assertGreaterEqual(torch.cuda.max_memory_reserved(), torch.cuda.memory_reserved())
        del one

    def test_summary_and_counts(self):
        before = torch.cuda.memory_stats()
        made = [torch.empty(3 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
        small = torch.empty(1000, dtype=torch.uint8, device="cuda")
        after = torch.cuda.memory_stats()
        self.assertEqual(set(before), set(after))
        rise = lambda key: after[key] - before[key]
        self.assertEqual(rise("allocation.all.current"), 6)
        self.assertEqual(rise("allocation.large_pool.current"), 5)
        self.assertEqual(rise("allocation.small_pool.allocated"), 1)
        self.assertEqual(rise("requested_bytes.all.current"), 15 * MIB + 1000)
        summary = torch.cuda.memory_summary()
        self.assertIn("Allocated memory", summary)
        del made, small
        freed = torch.cuda.memory_stats()["allocation.all.freed"]
        self.assertEqual(freed - after["allocation.all.freed"], 6)

    @unittest.skipIf(MODE == "pool", "PyTorch keeps the memory of a pool until the pool ends")
    def test_empty_cache(self):
        made = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        held = torch.cuda.memory_reserved()
        del made
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_reserved(), held - 384 * MIB)

    def test_snapshot(self):
        made = torch.empty(7 * MIB, dtype=torch.uint8, device="cuda")
        segments = torch.cuda.memory_snapshot()
        blocks = [
            (segment["address"], block)
            for segment in segments
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        self.assertIn(made.data_ptr(), [block["address"] for _, block in blocks])
        total = sum(segment["total_size"] for segment in segments)
        self.assertEqual(total, torch.cuda.memory_reserved())
        whole = torch.cuda.memory._snapshot()
        self.assertEqual(len(whole["device_traces"]), torch.cuda.device_count())
        from torch.cuda import _memory_viz

        self.assertIn("total_reserved", _memory_viz.segsum(whole))
        self.assertIn("<html>", _memory_viz.trace_plot(whole))

    def test_mem_get_info(self):
        free, total = torch.cuda.mem_get_info()
        self.assertTrue(0 < free <= total)
        if MODE == "install":
            # Other processes on the device do not change it.
            made = torch.empty(GIB, dtype=torch.uint8, device="cuda")
            after = torch.cuda.mem_get_info()[0]
            self.assertEqual(total, LIMIT)
            self.assertTrue(GIB <= free - after <= GIB + 256 * MIB, (free, after))
            del made

    @only_installed
    def test_accelerator(self):
        made = torch.empty(9 * MIB, dtype=torch.uint8, device="cuda")
        self.assertGreaterEqual(torch.cuda.memory_allocated(), 9 * MIB)
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
            found = getattr(torch.accelerator, name)()
            self.assertEqual(found, getattr(torch.cuda, name)(), name)
        if hasattr(torch.accelerator, "get_memory_info"):
            self.assertEqual(torch.accelerator.get_memory_info(), torch.cuda.mem_get_info())
        del made
        torch.accelerator.reset_peak_memory_stats()
        self.assertEqual(torch.accelerator.max_memory_allocated(), torch.cuda.memory_allocated())
        torch.cuda.synchronize()
        torch.accelerator.empty_cache()
        self.assertEqual(torch.accelerator.memory_reserved(), torch.cuda.memory_reserved())


if __name__ == "__main__":
    unittest.main()
