"""Copies from and to NumPy, and the README's first script, over the stand-in for libcuda.

NumPy is a stand-in too where it is not installed.
"""

import importlib.util
import os
import re
import unittest

from support import HERE, needs_stand_in, run

FAKES = importlib.util.find_spec("numpy") is None
README = os.path.join(os.path.dirname(HERE), "README.md")


def case(code: str) -> str:
    return run(code, fakes=FAKES)


@needs_stand_in
class NumPy(unittest.TestCase):
    def test_the_first_script_of_the_readme(self):
        with open(README, encoding="utf-8") as file:
            scripts = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)
        (first,) = [script for script in scripts if "import numpy" in script]
        said = case(first)
        self.assertIn("first", said)
        self.assertIn("cannot allocate 100 MiB on device 0: out of memory", said)

    def test_contents_come_back(self):
        case(
            """
            import ctypes, cuvmm, numpy
            values = numpy.arange(3000, dtype="float32").reshape(50, 60)
            array = cuvmm.empty((50, 60), "float32")
            array.copy_from(values)
            back = array.numpy()
            assert back.shape == (50, 60) and (back == values).all()
            # The memory of the stand-in can be read by the CPU.
            assert ctypes.c_float.from_address(array.address + 4 * 2999).value == 2999.0
            # Other libraries name strides of dense arrays too.
            class Named:
                __array_interface__ = {**values.__array_interface__, "strides": (240, 4)}
            again = cuvmm.empty((50, 60), "float32")
            again.copy_from(Named())
            assert (again.numpy() == values).all()
            # A row of a larger array, whose step to the next row leads nowhere.
            row = type(array)(array._memory, (1, 60), array._dtype, (100, 1)).numpy()
            assert row.shape == (1, 60)
            nothing = cuvmm.empty((0, 4), "float32")
            nothing.copy_from(numpy.empty((0, 4), "float32"))
            assert nothing.numpy().shape == (0, 4)
            """
        )

    def test_a_copy_is_behind_the_work_of_its_stream(self):
        case(
            """
            import ctypes, cuvmm, numpy
            array = cuvmm.empty(1 << 20)
            libcuda = ctypes.CDLL("libcuda.so.1")
            context, stream = ctypes.c_void_p(), ctypes.c_void_p()
            assert libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
            assert libcuda.cuCtxSetCurrent(context) == 0
            assert libcuda.cuStreamCreate(ctypes.byref(stream), 1) == 0
            assert libcuda.fakecuda_hold_all(1) == 0
            fill = libcuda.cuMemsetD8Async
            assert fill(ctypes.c_uint64(array.address), 7, ctypes.c_size_t(1 << 20), stream) == 0
            array.record_stream(stream.value)
            libcuda.fakecuda_hold_all(0)
            back = array.numpy(stream=stream.value)
            at = back.__array_interface__["data"][0]
            assert ctypes.string_at(at, 1 << 20) == b"\\7" * (1 << 20)
            """
        )

    def test_what_does_not_fit_says_so(self):
        case(
            """
            import cuvmm, numpy
            array = cuvmm.empty((4, 6), "float32")

            def fails(kind, text, source):
                refused(kind, lambda: array.copy_from(source), text)

            fails(TypeError, "numpy.asarray", [1.0, 2.0])
            fails(ValueError, "shape (6, 4) does not fit one of shape (4, 6)", numpy.empty((6, 4), "float32"))
            fails(TypeError, "astype('float32')", numpy.empty((4, 6), "uint8"))

            class Holes:
                __array_interface__ = {
                    "shape": (4, 6), "typestr": "<f4", "data": (4096, False), "strides": (48, 4), "version": 3}

            fails(ValueError, "numpy.ascontiguousarray", Holes())

            class Picture:
                __array_interface__ = {"shape": (4, 6), "typestr": "<f4", "data": bytes(96), "version": 3}

            fails(TypeError, "numpy.asarray", Picture())

            class Buffer:
                __array_interface__ = {"shape": (4, 6), "typestr": "<f4", "version": 3}

            fails(TypeError, "numpy.asarray", Buffer())
            half = cuvmm.empty(4, "bfloat16")
            refused(TypeError, half.numpy, "bfloat16")
            """
        )
