"""No memory is lost over many steps, by the driver's own figures. Runs alone on the device."""

import gc
import os
import random
import unittest

from modes import MIB, MODE, GpuTest, memory, not_installed, torch

STEPS = int(os.environ.get("CUVMM_LEAK_STEPS", "10000"))


def free_on_the_device() -> int:
    return torch.cuda.cudart().cudaMemGetInfo(0)[0]


class Leaks(GpuTest):
    enters = False

    def settle(self) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return free_on_the_device()

    @unittest.skipIf(MODE == "pool", "PyTorch keeps the memory of a pool until the pool ends")
    def test_empty_cache_gives_memory_back(self):
        before = self.settle()
        made = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        self.assertLessEqual(free_on_the_device(), before - 448 * MIB)
        del made
        self.assertGreaterEqual(self.settle(), before - 16 * MIB)

    def test_steps_with_varying_shapes(self):
        chosen = random.Random(7)
        layer = torch.nn.Linear(256, 256).cuda()
        side = torch.cuda.Stream()
        free = []
        for step in range(STEPS):
            # Each step enters the pool: inside of one, PyTorch keeps what other streams have used.
            with memory():
                rows = 1 + chosen.randrange(4096)
                inputs = torch.randn(rows, 256, device="cuda")
                if step % 10 == 0:
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        copy = inputs * 2
                    inputs.record_stream(side)
                    del copy
                loss = layer(inputs).square().mean()
                loss.backward()
                layer.zero_grad(set_to_none=True)
                del inputs, loss
            # Outside, PyTorch takes back what these streams have used.
            torch.empty(1, device="cuda")
            if step % (STEPS // 5 or 1) == 0:
                free.append(self.settle())
        free.append(self.settle())
        # What kernels and libraries take, they take in the first part. PyTorch's pools keep their
        # segments, and may need a few of 20 MiB more later, as lengths come together by chance.
        slack = 96 * MIB if MODE == "pool" else 32 * MIB
        self.assertGreaterEqual(free[-1], free[1] - slack, free)
        print(f"{MODE}: free on the device, MiB: {[it // MIB for it in free]}", flush=True)

    @not_installed
    def test_what_other_streams_have_used_comes_back(self):
        """Inside of a pool PyTorch keeps it, in one of its own too. It comes back outside."""
        entered = memory("kept") if MODE == "pool" else torch.cuda.use_mem_pool(self.mem_pool())
        side = torch.cuda.Stream()
        self.settle()
        with entered:
            for _ in range(20):
                made = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
                made.record_stream(side)
                del made
            torch.cuda.synchronize()
            torch.empty(1, device="cuda")
            inside = waiting()
        for _ in range(2):
            torch.empty(1, device="cuda")
            torch.cuda.synchronize()
        print(f"{MODE}: MiB that other streams have used, inside: {inside // MIB}", flush=True)
        self.assertEqual(waiting(), 0)

    def mem_pool(self):
        self.kept = torch.cuda.MemPool()
        return self.kept


def waiting() -> int:
    """Returns the bytes that were freed, but that PyTorch does not reuse yet."""
    stats = torch.cuda.memory_stats()
    return stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]


if __name__ == "__main__":
    unittest.main()
