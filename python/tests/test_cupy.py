"""`cuvmm.cupy` with a stand-in for CuPy, over the stand-in for libcuda."""

import unittest

from support import needs_stand_in, run


@needs_stand_in
class CuPy(unittest.TestCase):
    def test_arrays_are_of_the_heap(self):
        run(
            """
            import cupy, cuvmm, cuvmm.cupy
            assert not cuvmm.cupy.is_installed()
            cuvmm.cupy.install(limit="64MiB", tenant="arrays")
            assert cuvmm.cupy.is_installed()
            array = cupy.empty(5 << 20)
            found = cuvmm.stats()
            assert (found.live, found.limit) == (5 << 20, 64 << 20), found
            assert cupy.empty(0).ptr == 0
            try:
                cupy.empty(65 << 20)
            except cupy.cuda.memory.OutOfMemoryError as error:
                assert (error.size, error.limit) == (65 << 20, 64 << 20)
                assert 5 << 20 <= error.total <= 64 << 20, error.total
            else:
                raise AssertionError("more than the limit")
            del array
            assert cuvmm.stats().live == 0
            try:
                cuvmm.cupy.install()
            except RuntimeError as error:
                assert "already" in str(error)
            else:
                raise AssertionError("a second time")
            """,
            fakes=True,
        )


if __name__ == "__main__":
    unittest.main()
