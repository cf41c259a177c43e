"""CUDA graphs and their pools."""

import gc
import unittest

from modes import MIB, GpuTest, memory, torch


class Graphs(GpuTest):
    enters = False

    def full(self, count, value):
        """Makes a tensor that graphs read, as the mode says."""
        with memory():
            return torch.full((count,), float(value), device="cuda")

    def capture(self, work, pool=None):
        """Captures `work` after a warm-up on another stream."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = work()
        return graph, result

    def test_replay(self):
        static = self.full(MIB, 0)
        graph, result = self.capture(lambda: (static * 2 + 1).relu() + static)
        for number in range(5):
            static.fill_(number)
            graph.replay()
            torch.cuda.synchronize()
            self.assertEqual(float(result[0]), 3 * number + 1)
            self.assertEqual(float(result[-1]), 3 * number + 1)

    def test_memory_of_a_graph_is_not_reused_outside(self):
        """Intermediate values of a graph live in its pool, also while it does not run."""
        static = self.full(4 * MIB, 2)

        def work():
            first = static * 3
            second = first + 1
            del first
            return second * second

        graph, result = self.capture(work)
        others = [torch.full((4 * MIB,), float(number), device="cuda") for number in range(8)]
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual((float(result.min()), float(result.max())), (49.0, 49.0))
        for number, other in enumerate(others):
            self.assertTrue(bool((other == number).all()), number)

    def test_two_graphs_share_a_pool(self):
        static = self.full(MIB, 1)
        pool = torch.cuda.graph_pool_handle()
        first, one = self.capture(lambda: static + 1, pool)
        second, two = self.capture(lambda: one * 5, pool)
        static.fill_(4)
        first.replay()
        second.replay()
        torch.cuda.synchronize()
        self.assertEqual(float(two[7]), 25.0)
        # The pool lives as long as one of its graphs does.
        first.reset()
        del first
        gc.collect()
        second.replay()
        torch.cuda.synchronize()
        self.assertEqual(float(two[7]), 25.0)

    def test_memory_comes_back_after_the_last_graph(self):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        static = self.full(16 * MIB, 1)
        for _ in range(6):
            graph, result = self.capture(lambda: (static + 1) * 2)
            graph.replay()
            torch.cuda.synchronize()
            self.assertEqual(float(result[3]), 4.0)
            graph.reset()
            del graph, result
        del static
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_reserved(), before + 96 * MIB)

    def test_training_step(self):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(64, 256, device="cuda")
        goal = torch.randn(64, 8, device="cuda")

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.mse_loss(model(inputs), goal)
            loss.backward()
            optimizer.step()
            return loss

        graph, loss = self.capture(step)
        losses = []
        for _ in range(20):
            graph.replay()
            losses.append(float(loss))
        self.assertLess(losses[-1], losses[0])

    def test_graphed_callables(self):
        layer = torch.nn.Linear(128, 128).cuda()
        sample = torch.randn(32, 128, device="cuda", requires_grad=True)
        graphed = torch.cuda.make_graphed_callables(torch.nn.Sequential(layer), (sample,))
        inputs = torch.randn(32, 128, device="cuda", requires_grad=True)
        made = graphed(inputs)
        made.sum().backward()
        torch.testing.assert_close(made, layer(inputs))

    def test_allocations_beside_a_capture(self):
        """Another thread allocates while a graph is captured."""
        import threading

        static, stop, wrong = self.full(MIB, 1), threading.Event(), []

        def run():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                number = 0
                while not stop.is_set() and number < 2000:
                    number += 1
                    made = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")
                    if made.data_ptr() == 0:
                        wrong.append(number)
                    del made

        thread = threading.Thread(target=run)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        thread.start()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                values = [static + number for number in range(20)]
        finally:
            stop.set()
            thread.join()
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual([float(value[0]) for value in values], [1.0 + it for it in range(20)])
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
