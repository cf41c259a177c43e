"""Memory of graphs that sleeps and wakes with a pool's name, with and without `install`."""

import gc
import os
import tempfile
import time
import unittest

from modes import GIB, MIB, MODE, GpuTest, only_cuvmm, torch


def free_on_the_device() -> int:
    return torch.cuda.cudart().cudaMemGetInfo(0)[0]


@only_cuvmm
class GraphsSleep(GpuTest):
    enters = False

    def setUp(self):
        super().setUp()
        import cuvmm
        import cuvmm.torch

        self.cuvmm = cuvmm
        self.graphs = []
        self.addCleanup(lambda: cuvmm.asleep() and cuvmm.wake())

    def capture(self, work, **named):
        """Captures `work` after a warm-up on another stream. Returns the graph and the result."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, **named):
            result = work()
        return graph, result

    def replayed(self, graph, result):
        graph.replay()
        torch.cuda.synchronize()
        return result.clone()

    def test_twenty_graphs_over_2_gib_of_intermediates(self):
        inputs, captured = torch.randn(256 * MIB, device="cuda"), []
        with self.cuvmm.torch.graphs("decode"):
            for number in range(20):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    first = inputs * (number + 1)
                    second = first.sin()
                    result = second[::1024] + first[1::1024]
                    del first, second
                captured.append((graph, result))
        expected = [self.replayed(*one) for one in captured]
        kept = [result.clone() for _, result in captured]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for keep in (True, False):
            before, begun = free_on_the_device(), time.perf_counter()
            slept = self.cuvmm.sleep("decode", keep=keep)
            slept_at, between = time.perf_counter(), free_on_the_device()
            self.assertGreaterEqual(slept.given["decode"], 2 * GIB)
            self.assertGreaterEqual(between - before, 2 * GIB)
            # Other tensors use the memory meanwhile.
            other = torch.full((2 * GIB,), 3, dtype=torch.uint8, device="cuda")
            del other
            torch.cuda.empty_cache()
            waking = time.perf_counter()
            self.cuvmm.wake("decode")
            print(
                f"20 graphs: {slept.given['decode'] / GIB:.2f} GiB, free {before / GIB:.2f} GiB, asleep"
                f" {between / GIB:.2f}, awake {free_on_the_device() / GIB:.2f}; sleep {slept_at - begun:.3f} s,"
                f" wake {time.perf_counter() - waking:.3f} s",
                flush=True,
            )
            for (_, result), value in zip(captured, kept):
                self.assertTrue(torch.equal(result, value), "the contents were kept")
            for one, value in zip(captured, expected):
                self.assertTrue(torch.equal(self.replayed(*one), value), "the same bits")

    def test_the_cuda_graph_test_of_torch_memory_saver(self):
        """Its steps: weights, a cache and the graph's intermediate values are paused one by one."""

        class Model:
            def __init__(self, pool):
                with pool("weights"):
                    self.linear = torch.nn.Linear(1024, 1024, device="cuda")
                    torch.nn.init.ones_(self.linear.weight)
                    torch.nn.init.zeros_(self.linear.bias)

            def __call__(self, inputs):
                return self.linear(inputs).mean()

        class Cache:
            def __init__(self, pool):
                with pool("kv_cache"):
                    self.buffer = torch.full((5, 50_000_000), 1.0, device="cuda")

            def execute(self, inputs):
                # A large intermediate value.
                return (inputs + self.buffer.mean(dim=1)).mean() + (self.buffer * 0).sum()

        cache, model = Cache(self.cuvmm.torch.pool), Model(self.cuvmm.torch.pool)
        inputs, ones = torch.zeros(5, device="cuda"), torch.ones(1024, device="cuda")
        with self.cuvmm.torch.graphs("graph"):
            graph, result = self.capture(lambda: cache.execute(inputs) + model(ones) * 0)
        inputs[...] = 100
        self.assertEqual(float(self.replayed(graph, result)), 101.0)
        weights = model.linear.weight.data_ptr()
        before = free_on_the_device()
        self.cuvmm.sleep("kv_cache", keep=False)
        self.assertGreaterEqual(free_on_the_device() - before, 950 * MIB)
        before = free_on_the_device()
        self.cuvmm.sleep("graph")
        # Contents that are kept are in pinned host memory, whose page tables take a little of the device's.
        self.assertGreaterEqual(free_on_the_device() - before, 900 * MIB, "the values of the graph")
        self.cuvmm.sleep("weights")
        other = torch.full((GIB,), 7, dtype=torch.uint8, device="cuda")
        self.assertEqual(int(other.max()), 7)
        del other
        torch.cuda.empty_cache()
        self.cuvmm.wake(["kv_cache", "graph", "weights"])
        self.assertEqual(model.linear.weight.data_ptr(), weights)
        self.assertEqual(float(model(ones)), 1024.0)
        cache.buffer[...] = 2
        inputs[...] = 200
        self.assertEqual(float(self.replayed(graph, result)), 202.0)

    def test_contents_that_replays_write_first_are_not_kept(self):
        static = torch.full((16 * MIB,), 3.0, device="cuda")
        with self.cuvmm.torch.graphs("written", keep=False):
            graph, result = self.capture(lambda: (static + 1) * 2)
        host = self.cuvmm.stats().all["host"]
        self.cuvmm.sleep("written")
        self.assertEqual(self.cuvmm.stats().all["host"], host)
        self.cuvmm.wake("written")
        value = self.replayed(graph, result)
        self.assertEqual((float(value.min()), float(value.max())), (8.0, 8.0))

    def test_graphed_callables(self):
        torch.manual_seed(3)
        layer = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 8)).cuda()
        sample = torch.randn(64, 512, device="cuda", requires_grad=True)
        with self.cuvmm.torch.graphs("callables"):
            graphed = torch.cuda.make_graphed_callables(layer, (sample,))
        inputs = torch.randn(64, 512, device="cuda", requires_grad=True)

        def once():
            made = graphed(inputs)
            made.sum().backward()
            gradient, inputs.grad = inputs.grad.clone(), None
            torch.cuda.synchronize()
            return made.detach().clone(), gradient

        expected = once()
        slept = self.cuvmm.sleep("callables")
        self.assertGreater(slept.given["callables"], 0)
        self.cuvmm.wake("callables")
        for value, before in zip(once(), expected):
            self.assertTrue(torch.equal(value, before))

    def test_a_pool_named_by_its_handle(self):
        static = torch.ones(MIB, device="cuda")
        with self.cuvmm.torch.graphs("named") as pool:
            first, one = self.capture(lambda: static * 3, pool=pool)
            second, two = self.capture(lambda: one + 1, pool=pool)
            with self.cuvmm.torch.graphs("inner"), torch.cuda.stream(torch.cuda.Stream()):
                with self.assertRaisesRegex(self.cuvmm.Error, "'named'"):
                    refused = torch.cuda.CUDAGraph()
                    refused.capture_begin(pool=pool)
                    # One that was not refused does not stay open for the tests that follow.
                    refused.capture_end()
        self.cuvmm.sleep("named")
        self.cuvmm.wake("named")
        first.replay()
        self.assertEqual(float(self.replayed(second, two)[5]), 4.0)
        self.assertEqual(float(one[7]), 3.0)

    def test_a_name_that_is_entered_in_a_capture_wins(self):
        """And one that was entered before does not."""
        static = torch.full((8 * MIB,), 2.0, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outside = static * 2
            with self.cuvmm.torch.pool("inside"):
                inside = static * 5
        given = self.cuvmm.sleep("inside").given
        self.assertGreaterEqual(given["inside"], 32 * MIB)
        self.assertTrue(bool(torch.isfinite(outside.sum())), "it is awake")
        self.cuvmm.wake("inside")
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual((float(outside[3]), float(inside[3])), (4.0, 10.0))

    def test_memory_of_a_pool_in_a_capture_serves_captures_only(self):
        static = torch.full((8 * MIB,), 2.0, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with self.cuvmm.torch.pool("scratch"):
                value = static * 5
            result = value + 1
            del value
        with self.cuvmm.torch.pool("scratch"):
            others = [torch.full((8 * MIB,), float(number), device="cuda") for number in range(4)]
        value = self.replayed(graph, result)
        self.assertEqual((float(value.min()), float(value.max())), (11.0, 11.0))
        for number, other in enumerate(others):
            self.assertTrue(bool((other == number).all()), number)
        self.cuvmm.sleep("scratch")
        self.cuvmm.wake("scratch")
        value = self.replayed(graph, result)
        self.assertEqual((float(value.min()), float(value.max())), (11.0, 11.0))

    def test_memory_comes_back_after_the_last_graph(self):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        static = torch.ones(16 * MIB, device="cuda")
        for is_asleep in (False, True):
            with self.cuvmm.torch.graphs("ends"):
                graph, result = self.capture(lambda: (static + 1) * 2)
            if is_asleep:
                self.cuvmm.sleep("ends")
            graph.reset()
            del graph, result
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            if MODE == "pool":
                self.cuvmm.trim("ends")
        del static
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_reserved(), before + 96 * MIB)

    def elsewhere(self, work, name):
        """Captures `work` under a name, and again under another one, and lets the first sleep.

        What a library has made for the first capture and keeps must serve the second and code outside.
        """
        with self.cuvmm.torch.graphs(name):
            first = self.capture(work)
        # A communicator of NCCL ends after the graphs that use it, also where this fails.
        self.graphs.append(first[0])
        with self.cuvmm.torch.graphs(name + " too"):
            second = self.capture(work)
        self.graphs.append(second[0])
        expected = [self.replayed(*first), self.replayed(*second), work().clone()]
        self.cuvmm.sleep(name)
        value, outside = self.replayed(*second), work().clone()
        stream = torch.cuda.graph.default_capture_stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            beside = work().clone()
        torch.cuda.synchronize()
        self.cuvmm.wake(name)
        for one, other in ((value, 1), (outside, 2), (beside, 2), (self.replayed(*first), 0)):
            self.assertTrue(torch.equal(one, expected[other]))

    def test_the_workspace_of_cublas(self):
        left, right = (torch.randn(2048, 2048, device="cuda", dtype=torch.float16) for _ in range(2))
        self.elsewhere(lambda: left @ right, "cublas")

    def test_the_workspace_of_cublaslt(self):
        linear = torch.nn.Linear(2048, 2048, device="cuda", dtype=torch.float16)
        inputs = torch.randn(512, 2048, device="cuda", dtype=torch.float16)
        with torch.no_grad():
            self.elsewhere(lambda: torch.nn.functional.gelu(linear(inputs)), "cublaslt")

    def test_the_workspace_of_cudnn(self):
        if not torch.backends.cudnn.is_available():
            self.skipTest("this PyTorch has no cuDNN")
        convolution = torch.nn.Conv2d(64, 128, 3, padding=1, device="cuda")
        inputs = torch.randn(16, 64, 64, 64, device="cuda")
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, deterministic=True):
            self.elsewhere(lambda: convolution(inputs), "cudnn")

    def test_buffers_of_nccl(self):
        import torch.distributed as group

        if not group.is_available() or not group.is_nccl_available():
            self.skipTest("this PyTorch has no NCCL")
        # A group of one registers no memory of a graph; with several, NCCL_GRAPH_REGISTER=0 keeps it from that.
        os.environ["NCCL_GRAPH_REGISTER"] = "0"
        with tempfile.TemporaryDirectory() as folder:
            group.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                values = torch.arange(4 * MIB, device="cuda", dtype=torch.float32)

                def work():
                    made = values * 2
                    group.all_reduce(made)
                    return made

                self.elsewhere(work, "nccl")
            finally:
                for graph in self.graphs:
                    graph.reset()
                group.destroy_process_group()


if __name__ == "__main__":
    unittest.main()
