"""Memory that network cards reach: the setting `rdma`, over the stand-in for libcuda."""

import unittest

from support import needs_stand_in
from test_sharing import case

ASK = """
libcuda = ctypes.CDLL("libcuda.so.1")

def reaches(address):
    "CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE"
    found = ctypes.c_uint32()
    assert libcuda.cuPointerGetAttribute(ctypes.byref(found), 15, ctypes.c_uint64(address)) == 0
    return found.value

library = ctypes.CDLL(cuvmm.library_path())
library.cuvmm_malloc.restype = ctypes.c_void_p
library.cuvmm_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
library.cuvmm_tag_end.argtypes = [ctypes.c_uint64]

def everywhere(device=0):
    "What the driver says of the heap's memory, and of a pool's."
    array, token = cuvmm.empty(5 << 20, device=device), ctypes.c_uint64()
    assert library.cuvmm_tag_begin(b"weights", ctypes.byref(token)) == 0
    address = library.cuvmm_malloc(5 << 20, device, None)
    library.cuvmm_tag_end(token)
    return reaches(array.address), reaches(address)

def fail(faults):
    assert libcuda.fakecuda_fail(faults and faults.encode()) == 0
"""


@needs_stand_in
class Rdma(unittest.TestCase):
    def check(self, code: str) -> None:
        import textwrap

        case(ASK + textwrap.dedent(code))

    def test_it_is_so_where_a_device_has_it(self):
        self.check(
            """
            cuvmm.configure(rdma="auto")
            assert everywhere() == (1, 1)
            """
        )

    def test_it_is_left_out(self):
        self.check("assert everywhere() == (0, 0)")
        self.check(
            """
            cuvmm.configure(rdma=True)
            cuvmm.configure(rdma=False, limit="64MiB")
            cuvmm.configure(preset="fast")
            assert everywhere() == (0, 0)
            """
        )

    def test_a_device_that_refuses_it(self):
        """Each call that tries it fails once. WSL2 refuses the access."""
        for call in ("cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
            self.check(
                f"""
                cuvmm.configure(rdma="auto")
                fail("{call}:1:UNKNOWN")
                assert everywhere() == (0, 0)
                # The other device is tried for itself.
                assert everywhere(1) == (1, 1)
                """
            )

    def test_a_device_that_lacks_what_is_required(self):
        self.check(
            """
            cuvmm.configure(rdma=True)
            assert libcuda.cuInit(0) == 0
            fail("cuMemSetAccess:1-:UNKNOWN")
            before = live()
            for _ in range(2):
                refused(cuvmm.Error, lambda: cuvmm.empty(1), "RDMA", "cuMemSetAccess")
            assert live() == before
            # A failure is not kept where there is no heap yet.
            fail(None)
            assert everywhere() == everywhere(1) == (1, 1)
            """
        )

    def test_too_little_memory_to_try_it(self):
        self.check(
            """
            cuvmm.configure(rdma="auto")
            fail("cuMemCreate:1:OUT_OF_MEMORY")
            assert everywhere() == (0, 0)
            cuvmm.empty(1, device=1)
            """
        )
