"""`cuvmm.torch.memory_saver` on a GPU, with and without `install`."""

import unittest

from modes import MIB, GpuTest, only_cuvmm, torch


def free_on_the_device() -> int:
    return torch.cuda.cudart().cudaMemGetInfo(0)[0]


def filled(value: int, size: int = 64 * MIB):
    return torch.full((size,), value, dtype=torch.uint8, device="cuda")


def is_full(tensor, value: int) -> bool:
    return (int(tensor.min()), int(tensor.max())) == (value, value)


@only_cuvmm
class Saver(GpuTest):
    enters = False

    def setUp(self):
        super().setUp()
        import cuvmm
        from cuvmm.torch import memory_saver

        self.cuvmm, self.saver = cuvmm, memory_saver.torch_memory_saver
        self.addCleanup(cuvmm.limit_host, None)
        self.addCleanup(lambda: cuvmm.asleep() and cuvmm.wake())

    def test_contents_are_kept_or_lost_as_the_region_says(self):
        with self.saver.region("s1", enable_cpu_backup=True):
            kept = filled(1)
        with self.saver.region("s1"):
            lost = filled(2)
        outside = filled(3)
        addresses = kept.data_ptr(), lost.data_ptr()
        for _ in range(3):
            before, held = free_on_the_device(), self.cuvmm.stats().held
            self.saver.pause("s1")
            self.assertEqual(held - self.cuvmm.stats().held, 128 * MIB)
            # The page tables of the pinned host memory, where contents are kept, take a little of the device's.
            self.assertGreaterEqual(free_on_the_device() - before, 120 * MIB)
            self.assertTrue(is_full(outside, 3))
            self.saver.resume("s1")
            self.assertTrue(is_full(kept, 1))
            lost.fill_(2)
            self.assertTrue(is_full(lost, 2))
        self.assertEqual((kept.data_ptr(), lost.data_ptr()), addresses)

    def test_backups_of_parameters(self):
        torch.manual_seed(2)
        with self.saver.region("s2", enable_cpu_backup=True):
            model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.LayerNorm(2048)).cuda()
            model.to(torch.bfloat16)
            large = torch.arange(12 * MIB, dtype=torch.int64, device="cuda")
        expected = {name: value.cpu() for name, value in model.state_dict().items()}
        everything = large.cpu()
        self.assertIsNone(self.saver.get_cpu_backup(large))
        self.saver.pause("s2")
        for name, parameter in model.named_parameters():
            backup = self.saver.get_cpu_backup(parameter, zero_copy=True)
            self.assertEqual((backup.device.type, backup.dtype), ("cpu", torch.bfloat16))
            self.assertTrue(torch.equal(backup, expected[name]), name)
        self.assertTrue(torch.equal(self.saver.get_cpu_backup(large), everything))
        # A view at an offset that no part of the host memory begins at.
        view = large[1_234_567 : 7_654_321]
        self.assertTrue(torch.equal(self.saver.get_cpu_backup(view), everything[1_234_567 : 7_654_321]))
        with self.assertRaisesRegex(ValueError, "contiguous"):
            self.saver.get_cpu_backup(large[::2])
        self.saver.resume("s2")
        self.assertTrue(torch.equal(large.cpu(), everything))
        self.assertIsNone(self.saver.get_cpu_backup(large))

    def test_a_backup_of_what_is_lost(self):
        with self.saver.region("s3"):
            lost = filled(1)
        self.saver.pause("s3")
        with self.assertRaisesRegex(self.cuvmm.Error, "discarded"):
            self.saver.get_cpu_backup(lost)
        self.saver.resume("s3")

    def test_disable(self):
        with self.saver.region("s4", enable_cpu_backup=True):
            kept = filled(1)
            with self.saver.disable():
                outside = filled(2)
                with self.saver.region("s4", enable_cpu_backup=True):
                    inner = filled(3)
            last = filled(4)
        self.saver.pause("s4")
        self.assertTrue(is_full(outside, 2))
        self.saver.resume("s4")
        for tensor, value in ((kept, 1), (inner, 3), (last, 4)):
            self.assertTrue(is_full(tensor, value))
        del outside
        before = free_on_the_device()
        with self.saver.disable():
            large = filled(5, 512 * MIB)
            self.assertTrue(is_full(large, 5))
            del large
        self.assertGreaterEqual(free_on_the_device(), before - 16 * MIB)

    def test_all_pause_or_none(self):
        with self.saver.region("s5a"):
            lost = filled(1)
        with self.saver.region("s5b", enable_cpu_backup=True):
            kept = filled(2)
        self.cuvmm.release_host()
        self.cuvmm.limit_host(16 * MIB)
        with self.assertRaises(self.cuvmm.OutOfMemoryError):
            self.saver.pause()
        self.assertFalse(self.cuvmm.asleep())
        self.assertTrue(is_full(lost, 1) and is_full(kept, 2))
        self.cuvmm.limit_host(None)
        self.saver.pause()
        with self.assertRaisesRegex(self.cuvmm.Error, "paused"):
            self.saver.pause("s5a")
        self.saver.resume()
        self.assertTrue(is_full(kept, 2))

    def test_a_graph_of_which_all_memory_pauses(self):
        try:
            from cuvmm.torch import graphs  # noqa: F401
        except ImportError:
            self.skipTest("this package has no cuvmm.torch.graphs")
        with self.saver.region("s6", enable_cpu_backup=True):
            weights = torch.full((16 * MIB,), 2.0, device="cuda")
        inputs = torch.ones(16 * MIB, device="cuda")

        def work():
            first = inputs * weights
            second = first + 1
            return (second * second).sum()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        captured = []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with self.saver.cuda_graph(graph, pool=pool, tag="s6g"):
                result = work()
            captured.append((graph, result))
        for graph, result in captured:
            graph.replay()
            self.assertEqual(float(result), 9.0 * 16 * MIB)
        before = free_on_the_device()
        self.saver.pause("s6g")
        self.assertGreaterEqual(free_on_the_device() - before, 128 * MIB)
        self.saver.pause("s6")
        self.saver.resume()
        inputs.fill_(2)
        for graph, result in captured:
            graph.replay()
            self.assertEqual(float(result), 25.0 * 16 * MIB)

    def test_two_devices(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("needs two GPUs")
        tensors = []
        for device in (0, 1):
            with torch.cuda.device(device), self.saver.region("s7", enable_cpu_backup=True):
                tensors.append(filled(device + 1))
        self.saver.pause("s7")
        self.saver.resume("s7")
        for device, tensor in enumerate(tensors):
            self.assertTrue(is_full(tensor, device + 1))

    def test_a_margin(self):
        limit = self.cuvmm.stats().limit
        total = torch.cuda.get_device_properties(0).total_memory
        try:
            self.saver.memory_margin_bytes = total - 1024 * MIB
            self.assertAlmostEqual(self.cuvmm.stats().limit, 1024 * MIB, delta=64 * MIB)
            with self.assertRaises(torch.cuda.OutOfMemoryError), self.saver.region("s8"):
                filled(1, 2048 * MIB)
        finally:
            self.saver.memory_margin_bytes = 0
        self.assertAlmostEqual(self.cuvmm.stats().limit, limit, delta=4 * MIB)


if __name__ == "__main__":
    unittest.main()
