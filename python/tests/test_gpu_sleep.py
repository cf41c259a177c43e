"""Pools that sleep and wake, with and without `install`."""

import unittest

from modes import MIB, GpuTest, only_cuvmm, only_installed, torch


def free_on_the_device() -> int:
    return torch.cuda.cudart().cudaMemGetInfo(0)[0]


@only_cuvmm
class Sleep(GpuTest):
    enters = False

    def setUp(self):
        super().setUp()
        import cuvmm
        import cuvmm.torch

        self.cuvmm = cuvmm
        self.addCleanup(lambda: cuvmm.asleep() and cuvmm.wake())

    def model(self, name):
        torch.manual_seed(1)
        with self.cuvmm.torch.pool(name):
            return torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()

    def test_kept(self):
        model = self.model("kept")
        inputs = torch.randn(16, 2048, device="cuda")
        expected = model(inputs)
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        for _ in range(3):
            before = free_on_the_device()
            self.cuvmm.sleep("kept")
            self.assertGreaterEqual(free_on_the_device() - before, 120 * MIB)
            # Other tensors use the memory meanwhile.
            other = torch.full((100 * MIB,), 3, dtype=torch.uint8, device="cuda")
            self.cuvmm.wake("kept")
            torch.testing.assert_close(model(inputs), expected)
            self.assertEqual([it.data_ptr() for it in model.parameters()], addresses)
            del other

    def test_discarded(self):
        model = self.model("discarded")
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        inputs = torch.randn(16, 2048, device="cuda")
        expected = model(inputs)
        before = free_on_the_device()
        self.cuvmm.sleep("discarded", keep=False)
        self.assertGreaterEqual(free_on_the_device() - before, 120 * MIB)
        self.cuvmm.wake("discarded")
        model.load_state_dict(state)
        torch.testing.assert_close(model(inputs), expected)

    def test_tags_are_apart(self):
        with self.cuvmm.torch.pool("one"):
            one = torch.full((32 * MIB,), 1, dtype=torch.uint8, device="cuda")
            with self.cuvmm.torch.pool("two"):
                two = torch.full((32 * MIB,), 2, dtype=torch.uint8, device="cuda")
        self.cuvmm.sleep("one", keep=False)
        self.assertEqual((int(two.min()), int(two.max())), (2, 2))
        with self.assertRaisesRegex(self.cuvmm.Error, "one"):
            self.cuvmm.sleep("one")
        with self.assertRaisesRegex(self.cuvmm.Error, "two"):
            self.cuvmm.wake("two")
        with self.assertRaisesRegex(self.cuvmm.Error, "asleep"):
            with self.cuvmm.torch.pool("one"):
                pass
        self.cuvmm.wake("one")
        one.fill_(5)
        self.assertEqual(int(one.max()), 5)

    def test_a_graph_replays_after_wake(self):
        with self.cuvmm.torch.pool("graphed"):
            weights = torch.full((MIB,), 2.0, device="cuda")
        inputs = torch.ones(MIB, device="cuda")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = inputs * weights
        graph.replay()
        self.cuvmm.sleep("graphed")
        self.cuvmm.wake("graphed")
        inputs.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual((float(result.min()), float(result.max())), (14.0, 14.0))

    @only_installed
    def test_small_tensors_share_memory(self):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with self.cuvmm.torch.pool("small"):
            tensors = [torch.full((1000,), float(it), device="cuda") for it in range(200)]
        # 200 tensors of 4000 bytes, and not 200 granules.
        self.assertLessEqual(torch.cuda.memory_reserved() - before, 4 * MIB)
        self.cuvmm.sleep("small")
        self.cuvmm.wake("small")
        for number, tensor in enumerate(tensors):
            self.assertEqual((float(tensor.min()), float(tensor.max())), (number, number))

    @only_installed
    def test_too_little_memory_wakes_none_of_several(self):
        with self.cuvmm.torch.pool("few"):
            few = torch.full((32 * MIB,), 1, dtype=torch.uint8, device="cuda")
        with self.cuvmm.torch.pool("many"):
            many = torch.full((2048 * MIB,), 2, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
        self.cuvmm.sleep(["few", "many"])
        limit = self.cuvmm.stats().limit
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1024 * MIB / total)
        try:
            with self.assertRaises(self.cuvmm.OutOfMemoryError):
                self.cuvmm.wake(["few", "many"])
            self.assertEqual(self.cuvmm.asleep(), {"few", "many"})
        finally:
            torch.cuda.set_per_process_memory_fraction(limit / total)
        self.cuvmm.wake()
        self.assertEqual((int(few.min()), int(many.max())), (1, 2))

    def test_unknown(self):
        with self.assertRaisesRegex(self.cuvmm.Error, "never"):
            self.cuvmm.sleep("never used")


if __name__ == "__main__":
    unittest.main()
