"""Memory of cuvmm in PyTorch and CuPy, by DLPack and the CUDA array interface; CuPy's allocator."""

import importlib.util
import unittest

from modes import MIB, MODE, GpuTest, only_cuvmm, torch

if MODE != "native":
    import cuvmm

needs_cupy = unittest.skipUnless(importlib.util.find_spec("cupy"), "CuPy is not installed")


@only_cuvmm
class Exchange(GpuTest):
    def test_torch_writes_in_place(self):
        array = cuvmm.empty((300, 7), "float32")
        tensor = torch.from_dlpack(array)
        self.assertEqual(tensor.data_ptr(), array.address)
        self.assertEqual((tuple(tensor.shape), tensor.dtype), ((300, 7), torch.float32))
        tensor.fill_(3)
        again = torch.from_dlpack(array)
        self.assertEqual(float(again.sum()), 6300.0)

    def test_the_last_tensor_frees(self):
        before = cuvmm.stats().allocations
        array = cuvmm.empty(5 * MIB)
        tensor = torch.from_dlpack(array)
        view = tensor[100:200]
        del array, tensor
        view.fill_(1)
        self.assertEqual(cuvmm.stats().allocations, before + 1)
        del view
        self.assertEqual(cuvmm.stats().allocations, before)

    def test_freed_behind_the_work_of_the_taker(self):
        """The memory is not reused while a kernel that the taker queued writes it."""
        side = torch.cuda.Stream()
        for number in range(5):
            with torch.cuda.stream(side):
                tensor = torch.from_dlpack(cuvmm.empty(8 * MIB))
                torch.cuda._sleep(20_000_000)
                tensor.fill_(7)
                del tensor
            over = torch.from_dlpack(cuvmm.empty(8 * MIB))
            over.fill_(number)
            torch.cuda.synchronize()
            self.assertEqual((int(over.min()), int(over.max())), (number, number))

    def test_where_a_tensor_lies(self):
        tensor = torch.arange(60, dtype=torch.int32, device="cuda").view(3, 20)
        there = cuvmm.from_dlpack(tensor[1:, ::2])
        self.assertEqual(there.address, tensor.data_ptr() + 80)
        self.assertEqual((there.shape, there.strides), ((2, 10), (20, 2)))
        self.assertEqual((there.nbytes, there.dtype), (4 * (20 + 18 + 1), "int32"))
        self.assertEqual((there.device_type, there.device), (2, 0))

    def test_types(self):
        for name in ("float16", "bfloat16", "int64", "uint8", "complex64"):
            tensor = torch.from_dlpack(cuvmm.empty(10, name))
            self.assertEqual(tensor.dtype, getattr(torch, name))

    def test_types_of_8_and_4_bits(self):
        """PyTorch 2.11 takes these by DLPack."""
        names = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")
        has_them = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
        for name in names if has_them else ():
            dtype = getattr(torch, name)
            array = cuvmm.empty((3, 8), name)
            tensor = torch.from_dlpack(array)
            self.assertEqual((tensor.dtype, tuple(tensor.shape)), (dtype, (3, 8)), name)
            self.assertEqual(tensor.data_ptr(), array.address)
            tensor.view(torch.uint8).copy_(torch.arange(24, dtype=torch.uint8).view(3, 8))
            there = cuvmm.from_dlpack(tensor)
            self.assertEqual((there.address, there.nbytes, there.shape), (array.address, 24, (3, 8)))
            self.assertEqual((there.dtype, there.strides), (name, (8, 1)))
            row = cuvmm.from_dlpack(tensor[1])
            self.assertEqual((row.address, row.nbytes), (array.address + 8, 8))
            again = torch.from_dlpack(array).view(torch.uint8)
            self.assertEqual(again.flatten().tolist(), list(range(24)))

    @needs_cupy
    def test_cupy(self):
        import cupy

        array = cuvmm.empty((4, 5), "int32")
        for taken in (cupy.from_dlpack(array), cupy.asarray(array)):
            self.assertEqual(taken.data.ptr, array.address)
            taken[...] = 6
            cupy.cuda.get_current_stream().synchronize()
            self.assertEqual(int(torch.from_dlpack(array).sum()), 120)


@only_cuvmm
@needs_cupy
class CuPy(GpuTest):
    def test_cupy_allocates_from_the_heap(self):
        import cupy
        import cuvmm.cupy

        if not cuvmm.cupy.is_installed():
            cuvmm.cupy.install()
        before = cuvmm.stats()
        made = cupy.arange(3_000_000, dtype=cupy.int64)
        after = cuvmm.stats()
        self.assertEqual(after.live - before.live, 24_000_000)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            total = made.sum()
            halves = made // 2
            del made
        stream.synchronize()
        self.assertEqual(int(total), 3_000_000 * 2_999_999 // 2)
        self.assertEqual(int(halves[-1]), 1_499_999)
        with self.assertRaises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(1 << 50, dtype=cupy.uint8)
        del total, halves
        cuvmm.cupy.is_installed()
        self.assertEqual(cuvmm.stats().live, before.live)


if __name__ == "__main__":
    unittest.main()
