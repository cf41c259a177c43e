"""No memory is lost over many steps, by the driver's own figures. Runs alone on the device."""

import gc
import os
import random
import unittest

from modes import MIB, MODE, GpuTest, torch

STEPS = int(os.environ.get("CUVMM_LEAK_STEPS", "10000"))


def free_on_the_device() -> int:
    return torch.cuda.cudart().cudaMemGetInfo(0)[0]


class Leaks(GpuTest):
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
            if step % (STEPS // 5 or 1) == 0:
                free.append(self.settle())
        free.append(self.settle())
        # What kernels and libraries take, they take in the first part.
        self.assertGreaterEqual(free[-1], free[1] - 32 * MIB, free)
        print(f"{MODE}: free on the device, MiB: {[it // MIB for it in free]}", flush=True)


if __name__ == "__main__":
    unittest.main()
