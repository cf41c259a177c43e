"""Streams that come and go, memory that several streams use, and the memory of pools when it is short."""

import gc
import unittest

from modes import LIMIT, MIB, MODE, GpuTest, not_installed, only_cuvmm, only_installed, torch

try:
    import cupy
except ImportError:
    cupy = None

needs_cupy = unittest.skipIf(cupy is None, "needs CuPy")


class RecordedMemory(GpuTest):
    enters = False

    def test_recorded_memory_is_used_again_at_its_address(self):
        """As `test_record_stream` of PyTorch's own tests expects."""
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        result = torch.zeros(4, device="cuda")
        # Nothing else is freed, so that what is found again is what was freed.
        kept = []
        for size in (16, 64 << 10):
            with torch.cuda.stream(side):
                first = torch.empty(size, dtype=torch.uint8, device="cuda")
            address = first.data_ptr()
            main.wait_stream(side)
            first.record_stream(main)
            torch.cuda._sleep(200_000_000)
            first.fill_(1)
            del first
            with torch.cuda.stream(side):
                second = torch.empty(size, dtype=torch.uint8, device="cuda")
            self.assertNotEqual(second.data_ptr(), address, "used again too soon")
            main.synchronize()
            with torch.cuda.stream(side):
                third = torch.empty(size, dtype=torch.uint8, device="cuda")
            self.assertEqual(third.data_ptr(), address, "not used again")
            kept += [second, third]
        self.assertEqual(float(result.sum()), 0.0)

    def test_the_fraction_of_the_memory(self):
        """As `test_get_per_process_memory_fraction` of PyTorch's own tests expects."""
        before = torch.cuda.get_per_process_memory_fraction()
        self.addCleanup(torch.cuda.set_per_process_memory_fraction, before)
        for fraction in (1.0, 0.0, 0.3, 0.0, 0.8):
            torch.cuda.set_per_process_memory_fraction(fraction)
            found = torch.cuda.get_per_process_memory_fraction()
            self.assertAlmostEqual(found, fraction, places=6)

    def test_out_of_memory_begins_as_pytorch_s_does(self):
        with self.assertRaisesRegex(
            RuntimeError, "Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of"
        ):
            torch.empty(1024**3 * 800000000, dtype=torch.int8, device="cuda")
        with self.assertRaisesRegex(RuntimeError, "Tried to allocate more than 1EB memory"):
            torch.empty(1024**3 * 8000000000, dtype=torch.int8, device="cuda")


@only_cuvmm
class Pools(GpuTest):
    enters = False

    def setUp(self):
        super().setUp()
        import cuvmm
        import cuvmm.torch

        self.cuvmm = cuvmm
        self.addCleanup(lambda: cuvmm.asleep() and cuvmm.wake())

    def test_products_outside_of_a_pool_that_sleeps(self):
        with self.cuvmm.torch.pool("products"):
            one = torch.ones(512, 512, device="cuda")
            inside = one @ one
        self.assertEqual(float(inside[0, 0]), 512.0)
        self.cuvmm.sleep("products")
        two = torch.full((512, 512), 2.0, device="cuda")
        self.assertEqual(float((two @ two)[0, 0]), 2048.0)
        self.cuvmm.wake("products")
        self.assertEqual(float((one @ one)[0, 0]), 512.0)

    @not_installed
    def test_wake_gives_back_what_pytorch_keeps_free(self):
        with self.cuvmm.torch.pool("woken"):
            kept = torch.full((1 << 30,), 3, dtype=torch.uint8, device="cuda")
        slept = self.cuvmm.sleep("woken")
        self.assertEqual(slept.given, {"woken": 1 << 30})
        # PyTorch keeps free nearly all that the device has.
        free = torch.cuda.cudart().cudaMemGetInfo(0)[0]
        cached = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
        del cached
        self.cuvmm.wake("woken")
        self.assertEqual((int(kept.min()), int(kept.max())), (3, 3))

    def test_sleep_says_what_is_held(self):
        import threading

        made = []

        def load():
            made.append(torch.ones(64 * MIB, dtype=torch.uint8, device="cuda"))

        with self.cuvmm.torch.pool("held"):
            load()
            thread = threading.Thread(target=load)
            thread.start()
            thread.join()
        slept = self.cuvmm.sleep("held")
        self.assertEqual(slept.given, {"held": 64 * MIB})
        name = "torch" if MODE == "install" else "PyTorch"
        self.assertGreaterEqual(slept.held[name], 64 * MIB, slept)


@needs_cupy
@only_installed
class CuPyStreams(GpuTest):
    enters = False

    @classmethod
    def setUpClass(cls):
        import cuvmm.cupy

        if not cuvmm.cupy.is_installed():
            cuvmm.cupy.install()
        cls.cuvmm = cuvmm

    def test_streams_that_come_and_go(self):
        before = self.cuvmm.stats().held
        for number in range(20_000):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                array = cupy.full(4 * MIB, number % 100, dtype=cupy.uint8)
            del array, stream
        held = self.cuvmm.stats().held
        self.assertLessEqual(held - before, 600 * MIB)

    def test_other_memory_stays_usable_after_a_stream_is_gone(self):
        own = cupy.cuda.Stream(non_blocking=True)
        with cupy.cuda.ExternalStream(own.ptr):
            array = cupy.full(64 * MIB, 7, dtype=cupy.uint8)
        self.cuvmm.end_stream(own)
        self.assertEqual(int(array.max()), 7)
        del own
        gc.collect()
        for number in range(5000):
            other = cupy.full((number % 32 + 1) * MIB, 1, dtype=cupy.uint8)
            del other
        del array
        large = cupy.full(LIMIT // 2, 5, dtype=cupy.uint8)
        self.assertEqual(int(large[-1]), 5)

    def test_an_array_of_another_device(self):
        if cupy.cuda.runtime.getDeviceCount() < 2:
            self.skipTest("needs two GPUs")
        with cupy.cuda.Device(1):
            array = cupy.zeros(64 * MIB, dtype=cupy.uint8)
        before = self.cuvmm.stats(1).live
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
            del array
        self.assertEqual(self.cuvmm.stats(1).live, before - 64 * MIB)


if __name__ == "__main__":
    unittest.main()
