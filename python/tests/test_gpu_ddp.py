"""Two GPUs: copies between them, and data-parallel training over NCCL."""

import os
import subprocess
import sys
import tempfile
import unittest

from modes import MIB, GpuTest, memory, only_cuvmm, only_installed, torch

two = unittest.skipUnless(torch.cuda.device_count() >= 2, "needs two GPUs")


def train(rank: int, store: str) -> None:
    """Trains a model on one of two ranks, and checks that both have the same weights."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", rank),
    )
    with memory():
        torch.manual_seed(rank)
        model = torch.nn.Sequential(
            torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)
        ).cuda()
        parallel = DistributedDataParallel(model, device_ids=[rank])
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
        for step in range(20):
            optimizer.zero_grad(set_to_none=True)
            inputs = torch.randn(32 + 16 * (step % 5), 512, device="cuda")
            parallel(inputs).square().mean().backward()
            optimizer.step()
        mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        both = [torch.empty_like(mine) for _ in range(2)]
        distributed.all_gather(both, mine)
        assert torch.equal(both[0], both[1]), "the ranks have different weights"
        total = torch.full((5 * MIB,), float(rank + 1), device="cuda")
        distributed.all_reduce(total)
        assert float(total[0]) == float(total[-1]) == 3.0, total
        torch.cuda.synchronize()
    distributed.destroy_process_group()


@two
class TwoGpus(GpuTest):
    def test_copies(self):
        for number in range(5):
            here = torch.full((3_000_001,), number, device="cuda:0")
            there = here.to("cuda:1", non_blocking=True)
            back = (there * 2).to("cuda:0")
            self.assertEqual((float(back.min()), float(back.max())), (2.0 * number, 2.0 * number))

    def test_kernels_read_and_write_the_other_device(self):
        here, there = (torch.arange(2_000_000.0, device=f"cuda:{number}") for number in (0, 1))
        for _ in range(5):
            there.copy_(here[:1_000_000].repeat(2))
            here.add_(there.to("cuda:0"))
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        self.assertTrue(torch.equal(here[:1_000_000].cpu(), torch.arange(1_000_000.0) * 32))

    @only_cuvmm
    def test_memory_of_a_pool_is_open_to_peers(self):
        import cuvmm.torch

        with cuvmm.torch.pool("weights"):
            here = torch.arange(3_000_001.0, device="cuda:0")
        expected = here.cpu()
        for keep in (True, False):
            cuvmm.torch.check_access(here, "cuda:1")
            there = here.to("cuda:1")
            self.assertTrue(torch.equal(there.cpu(), expected))
            cuvmm.sleep("weights", keep=keep)
            cuvmm.wake("weights")
            # Work of the other device writes to what has slept.
            here.copy_(there)
            torch.cuda.synchronize(1)
            self.assertTrue(torch.equal(here.cpu(), expected))

    @only_installed
    def test_access_is_there_with_peers_and_is_missed_without(self):
        import cuvmm.torch

        here = torch.ones(1000, device="cuda:0")
        cuvmm.torch.check_access(here, "cuda:1")
        code = """
import cuvmm.torch
cuvmm.torch.install()
import torch
here = torch.ones(1000, device="cuda:0")
try:
    here.to("cuda:1")
    torch.cuda.synchronize("cuda:1")
    print("copied")
except RuntimeError as error:
    print("failed")
try:
    cuvmm.torch.check_access(here, "cuda:1")
except cuvmm.Error as error:
    print("peers=[0, 1]" in str(error))
"""
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(ended.stdout.split(), ["failed", "True"], ended.stderr)

    def test_data_parallel_training(self):
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train, args=(os.path.join(folder, "store"),), nprocs=2)


if __name__ == "__main__":
    unittest.main()
