"""What needs PyTorch's own allocator works in the other modes, and says so under `install`."""

import unittest
import warnings

from modes import MIB, MODE, GpuTest, only_installed, torch


def receive(queue, answers):
    tensor = queue.get(timeout=60)
    answers.put(float(tensor.sum()))
    del tensor


class Refusals(GpuTest):
    @unittest.skipIf(MODE == "install", "the functions are replaced")
    def test_the_stand_in_has_pytorch_s_names(self):
        """The package replaces what is there, and the stand-in for PyTorch in the tests has it."""
        for name in (
            "_cuda_memoryStats",
            "_cuda_memorySnapshot",
            "_cuda_resetPeakMemoryStats",
            "_cuda_resetAccumulatedMemoryStats",
            "_cuda_getMemoryFraction",
            "_cuda_getCheckpointState",
            "_cuda_setCheckpointPoolState",
            "_cuda_record_memory_history",
            "_cuda_record_memory_history_legacy",
            "_cuda_attach_out_of_memory_observer",
            "_set_cudnn_benchmark",
            "_accelerator_isAllocatorInitialized",
            "_accelerator_emptyCache",
            "_accelerator_getDeviceStats",
            "_accelerator_resetPeakStats",
            "_accelerator_resetAccumulatedStats",
        ):
            self.assertTrue(hasattr(torch._C, name), name)
        for name in ("_share_cuda_", "_new_shared_cuda"):
            self.assertTrue(hasattr(torch.UntypedStorage, name), name)
        allocator = torch._C._CUDAPluggableAllocator
        for name in (
            "set_reset_fn",
            "set_memory_fraction_fn",
            "set_base_alloc_fn",
            "set_record_stream_fn",
            "set_begin_allocate_to_pool",
            "set_end_allocate_to_pool_fn",
            "set_release_pool",
        ):
            self.assertTrue(hasattr(allocator, name), name)
        self.assertTrue(hasattr(vars(type(torch.backends.cudnn))["benchmark"], "__set__"))

    def test_the_compiler_has_one_rule_for_each_function(self):
        """It looks up all of PyTorch's functions by name and keeps them as keys."""
        from torch._dynamo import trace_rules

        rules = trace_rules.get_torch_obj_rule_map()
        for function in (torch._C._cuda_memoryStats, torch._C._cuda_resetPeakMemoryStats):
            self.assertIn(function, rules)

    @only_installed
    def test_memory_pools(self):
        with self.assertRaisesRegex(RuntimeError, "cuvmm.torch.pool"):
            torch.cuda.MemPool()

    @only_installed
    def test_the_benchmark_of_cudnn(self):
        with self.assertWarnsRegex(RuntimeWarning, "cuvmm"):
            torch.backends.cudnn.benchmark = True
        self.assertFalse(torch.backends.cudnn.benchmark)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                self.convolve()

    def convolve(self):
        made = torch.nn.Conv2d(3, 8, 3).cuda()(torch.randn(2, 3, 32, 32, device="cuda"))
        self.assertEqual(tuple(made.shape), (2, 8, 30, 30))

    @unittest.skipIf(MODE == "install", "refused with a warning")
    def test_the_benchmark_of_cudnn_works(self):
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            self.convolve()

    @only_installed
    def test_sharing_a_tensor(self):
        with self.assertRaisesRegex(RuntimeError, "cuvmm"):
            torch.ones(MIB, device="cuda").untyped_storage()._share_cuda_()

    @unittest.skipUnless(MODE == "native", "memory of cuvmm has no CUDA IPC handle")
    def test_sharing_a_tensor_works(self):
        context = torch.multiprocessing.get_context("spawn")
        queue, answers = context.Queue(), context.Queue()
        child = context.Process(target=receive, args=(queue, answers))
        child.start()
        tensor = torch.ones(1000, device="cuda")
        queue.put(tensor)
        self.assertEqual(answers.get(timeout=120), 1000.0)
        child.join(60)

    @only_installed
    def test_a_second_install(self):
        import cuvmm.torch

        with self.assertRaisesRegex(RuntimeError, "already"):
            cuvmm.torch.install()

    @unittest.skipIf(MODE == "install", "installed")
    def test_install_after_the_start(self):
        import cuvmm.torch

        torch.cuda.init()
        with self.assertRaisesRegex(RuntimeError, "has started CUDA"):
            cuvmm.torch.install()


if __name__ == "__main__":
    unittest.main()
