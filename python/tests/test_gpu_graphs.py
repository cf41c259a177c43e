"""CUDA graphs and their pools."""

import gc
import time
import os
import threading
import unittest

from modes import MIB, GpuTest, memory, only_cuvmm, only_installed, torch

try:
    import cuvmm
    from cuvmm import _library
except ImportError:
    pass


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

    def test_a_tensor_that_outlives_its_pool_keeps_no_more_than_its_extent(self):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, kept = torch.cuda.memory_reserved(), []
        static = self.full(16 * MIB, 1)

        def work():
            small = static[:128] * 2
            kept.append(small)
            return (static + 1) * 2

        for _ in range(6):
            graph, result = self.capture(work)
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
        self.assertEqual([float(small[5]) for small in kept[1::2]], [2.0] * 6)

    def test_many_graph_pools(self):
        static, captured = self.full(MIB // 4, 1), []
        side = torch.cuda.Stream()
        for number in range(120):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                result = static + number
            captured.append((graph, result))
        for graph, _ in captured:
            graph.replay()
        torch.cuda.synchronize()
        for number, (_, result) in enumerate(captured):
            self.assertEqual(float(result[number]), 1.0 + number)

    def test_many_graphs_in_one_pool(self):
        """Each graph has 288 MiB in parts and another 300 MiB while it is captured."""
        static, pool = self.full(36 * MIB, 1), torch.cuda.graph_pool_handle()
        side, graphs, sums = torch.cuda.Stream(), [], []
        large = self.full(75 * MIB, 1)
        torch.cuda.synchronize()
        for number in range(300):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                parts = [static * number for _ in range(2)]
                total = parts[0][:16] + parts[1][:16]
                del parts
                temporary = large * 2
                total += temporary[:16]
                del temporary
            graphs.append(graph)
            sums.append(total)
        for number, (graph, total) in enumerate(zip(graphs, sums)):
            graph.replay()
            torch.cuda.synchronize()
            self.assertEqual(float(total[3]), 2.0 * number + 2)
        self.assertLessEqual(torch.cuda.memory_reserved(), 2 << 30)

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

    def begin(self, graph, pool):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def break_capture(self, work):
        """Captures `work` and breaks the capture."""
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with self.assertRaises(RuntimeError), torch.cuda.graph(graph):
            work()
            torch.cuda.synchronize()
        # PyTorch leaves the stream of the capture only if the capture ends well.
        torch.cuda.set_stream(before)

    def test_a_second_capture_into_an_open_pool_is_refused(self):
        static, pool = self.full(MIB, 1), torch.cuda.graph_pool_handle()
        first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            self.begin(first, pool)
            early = static + 1
            with (
                torch.cuda.stream(two),
                self.assertRaisesRegex(RuntimeError, "already recording"),
            ):
                self.begin(second, pool)
            late = early * 5
            first.capture_end()
        del second
        # What the graph writes is not what is allocated outside of it.
        others = [torch.full((MIB,), float(number), device="cuda") for number in range(20)]
        first.replay()
        torch.cuda.synchronize()
        self.assertEqual((float(late.min()), float(late.max())), (10.0, 10.0))
        for number, other in enumerate(others):
            self.assertTrue(bool((other == number).all()), number)

    @only_installed
    def test_captures_that_failed_disable_nothing(self):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, static = torch.cuda.memory_reserved(), self.full(16 * MIB, 1)
        self.break_capture(lambda: None)
        self.break_capture(lambda: static * 2)
        for _ in range(3):
            graph, result = self.capture(lambda: (static + 1) * 2)
            graph.replay()
            torch.cuda.synchronize()
            self.assertEqual(float(result[3]), 4.0)
            graph.reset()
            del graph, result
        published = cuvmm.publish({"it": static}, "after captures")
        published.withdraw()
        del static
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.assertLessEqual(torch.cuda.memory_reserved(), before + 96 * MIB)

    @only_installed
    def test_nothing_waits_while_a_graph_is_captured(self):
        static, mode = self.full(MIB, 1), "thread_local"
        with cuvmm.torch.pool("sleeps"):
            tagged, freed = torch.ones(MIB, device="cuda"), torch.ones(MIB, device="cuda")
        before = cuvmm.stats().published
        published = cuvmm.publish({"it": static}, "beside captures")
        weights = cuvmm.attach("beside captures")
        attached, number = _library.get().text, weights._memory.number
        graph, refused = torch.cuda.CUDAGraph(), []

        def elsewhere():
            for call in (
                lambda: cuvmm.sleep("sleeps"),
                lambda: cuvmm.publish({"it": tagged}, "beside captures"),
            ):
                try:
                    call()
                except cuvmm.Error as error:
                    refused.append(str(error))

        with torch.cuda.graph(graph, capture_error_mode=mode):
            result = static + 1
            del weights, freed
            gc.collect()
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            published.withdraw()
            torch.cuda.empty_cache()
            result = result * 2
        self.assertEqual(len(refused), 2)
        for text in refused:
            self.assertIn("a graph is captured", text)
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual(float(result[5]), 4.0)
        self.assertTrue(attached("attached", number))
        torch.cuda.empty_cache()
        self.assertFalse(attached("attached", number))
        # A reader can keep a version for a moment.
        deadline = time.monotonic() + 10
        while cuvmm.stats().published > before and time.monotonic() < deadline:
            torch.cuda.empty_cache()
        self.assertEqual(cuvmm.stats().published, before)
        cuvmm.sleep("sleeps", keep=True)
        cuvmm.wake("sleeps")
        self.assertEqual(float(tagged.sum()), MIB)

    @only_installed
    def test_captures_beside_waits(self):
        """Another thread publishes, attaches and sleeps while graphs are captured."""
        static, stop, wrong = self.full(MIB, 1), threading.Event(), []
        with cuvmm.torch.pool("beside"):
            tagged = torch.ones(MIB, device="cuda")

        def once():
            if "beside" in cuvmm.asleep():
                cuvmm.wake("beside")
            published = cuvmm.publish({"it": static}, "waits")
            try:
                weights = cuvmm.attach("waits")
                del weights
                cuvmm.sleep("beside")
                cuvmm.wake("beside")
            finally:
                published.withdraw()

        def run():
            while not stop.is_set():
                try:
                    once()
                except cuvmm.Error as error:
                    if "captur" not in str(error):
                        wrong.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            for _ in range(50):
                graph, result = torch.cuda.CUDAGraph(), None
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    result = (static + 1) * 2
                graph.replay()
                torch.cuda.synchronize()
                self.assertEqual(float(result[7]), 4.0)
        finally:
            stop.set()
            thread.join()
        self.assertEqual(wrong, [])
        if "beside" in cuvmm.asleep():
            cuvmm.wake("beside")
        self.assertEqual(float(tagged.sum()), MIB)

    @only_cuvmm
    def test_garbage_collection_inside_of_a_capture(self):
        static, name = self.full(MIB, 1), f"collected {os.getpid()}"
        cuvmm.publish({"it": static}, name)
        weights = cuvmm.attach(name)
        attached, number = _library.get().text, weights._memory.number

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = static + 1
            del weights
            gc.collect()
            result = result * 2
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual(float(result[3]), 4.0)
        again = cuvmm.attach(name)
        self.assertFalse(attached("attached", number))
        self.assertEqual(float(again["it"][3]), 1.0)


if __name__ == "__main__":
    unittest.main()
