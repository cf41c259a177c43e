"""Memory that network cards reach, and its pieces: `rdma` and `cuvmm.extents` on a GPU."""

import ctypes
import os
import unittest

# Before `modes` makes the heap.
os.environ["CUVMM_TORCH_RDMA"] = "auto"

from modes import MIB, MODE, GpuTest, memory, only_cuvmm, torch

if MODE != "native":
    import cuvmm

#: `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED` and `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`
PROMISE, DMA_BUF = 110, 124
#: `CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE`
REACHES = 15
#: `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
AS_DMA_BUF = 1

libcuda = ctypes.CDLL("libcuda.so.1")


def promised(attribute: int) -> bool:
    found = ctypes.c_int()
    assert libcuda.cuDeviceGetAttribute(ctypes.byref(found), attribute, 0) == 0
    return found.value == 1


def reaches(address: int) -> bool:
    found = ctypes.c_uint32()
    assert libcuda.cuPointerGetAttribute(ctypes.byref(found), REACHES, ctypes.c_uint64(address)) == 0
    return found.value == 1


class Rdma(GpuTest):
    def test_tensors_say_so(self):
        """PyTorch's own tensors do where there is RDMA."""
        torch.cuda.init()
        for size in (100, 3 * MIB, 200 * MIB):
            tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
            self.assertEqual(reaches(tensor.data_ptr()), promised(PROMISE), size)


@only_cuvmm
class Extents(GpuTest):
    enters = False

    def several(self):
        """Makes a tensor over several pieces: in a heap, of memory that was free in several places."""
        with memory():
            few = [torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
            torch.cuda.synchronize()
            del few[0], few[1]
            return few, torch.zeros(120 * MIB, dtype=torch.uint8, device="cuda")

    def test_pieces_are_the_drivers(self):
        _, tensor = self.several()
        first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel()
        pieces = cuvmm.extents(tensor)
        self.assertLessEqual(pieces[0].address, first)
        self.assertGreaterEqual(sum(pieces[-1]), end)
        for one, behind in zip(pieces, pieces[1:]):
            self.assertEqual(sum(one), behind.address)
        for address, nbytes in pieces:
            base, size = ctypes.c_uint64(), ctypes.c_size_t()
            found = libcuda.cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(max(address, first))
            )
            self.assertEqual((found, base.value, size.value), (0, address, nbytes))

    def test_one_dma_buf_goes_over_several_pieces(self):
        if not promised(DMA_BUF):
            self.skipTest("the device has no dma-bufs")
        _, tensor = self.several()
        pieces = cuvmm.extents(tensor)
        first, end = pieces[0].address, sum(pieces[-1])
        descriptor = ctypes.c_int(-1)
        found = libcuda.cuMemGetHandleForAddressRange(
            ctypes.byref(descriptor),
            ctypes.c_uint64(first),
            ctypes.c_size_t(end - first),
            AS_DMA_BUF,
            ctypes.c_uint64(0),
        )
        self.assertEqual(found, 0, pieces)
        self.addCleanup(os.close, descriptor.value)
        self.assertEqual(os.lseek(descriptor.value, 0, os.SEEK_END), end - first)


if __name__ == "__main__":
    unittest.main()
