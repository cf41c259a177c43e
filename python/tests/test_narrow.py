"""Elements of 8 and 4 bits: `cuvmm.empty`, DLPack, `publish` and `attach`, over the stand-in for libcuda."""

import unittest

from support import needs_stand_in, run
from test_sharing import case

#: Descriptions that a test changes.
CHANGED = """
import cuvmm
from cuvmm import _dlpack

class Changed:
    "A tensor of bytes, whose description is changed before a library reads it."
    def __init__(self, shape, change):
        self.shape, self.change = shape, change
    def __dlpack_device__(self):
        return (2, 0)
    def __dlpack__(self, stream, max_version):
        capsule = cuvmm.empty(self.shape).__dlpack__(max_version=max_version)
        address = _dlpack._pointer(id(capsule), b"dltensor_versioned")
        managed = _dlpack._ManagedVersioned.from_address(address)
        self.change(managed, managed.dl_tensor)
        return capsule

def typed(code, bits, lanes=1, strides=None, flags=0):
    def change(managed, tensor):
        managed.flags = flags
        tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes = code, bits, lanes
        for place, step in enumerate(strides or ()):
            tensor.strides[place] = step
    return change
"""


@needs_stand_in
class Narrow(unittest.TestCase):
    def test_descriptions_of_arrays(self):
        run(
            """
            import cuvmm
            from cuvmm import _dlpack
            codes = {"float8_e3m4": 7, "float8_e4m3": 8, "float8_e4m3b11fnuz": 9, "float8_e4m3fn": 10,
                "float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13, "float8_e8m0fnu": 14,
                "float4_e2m1fn_x2": 17}
            for name, code in codes.items():
                array = cuvmm.empty((3, 5), name)
                assert (array.nbytes, array.dtype, array.span) == (15, name, 15), array
                for version in ((1, 1), None):
                    there, is_padded = _dlpack.read(capsule := array.__dlpack__(max_version=version))
                    bits, lanes = (4, 2) if code == 17 else (8, 1)
                    found = there.dtype.code, there.dtype.bits, there.dtype.lanes, is_padded
                    assert found == (code, bits, lanes, False), (name, found)
                there = cuvmm.from_dlpack(array)
                assert (there.nbytes, there.shape, there.strides) == (15, (3, 5), (5, 1)), there
                assert (there.dtype, there.address) == (name, array.address), there
                assert array.__cuda_array_interface__["typestr"] == "<V1"
            """
        )

    def test_numbers_of_4_bits_that_are_counted_singly(self):
        run(
            CHANGED
            + """
single = typed(17, 4)
there = cuvmm.from_dlpack(Changed((3, 8), single))
assert (there.dtype, there.shape, there.strides) == ("float4_e2m1fn_x2", (3, 4), (4, 1)), there
assert there.nbytes == 12, there
# Rows with a gap between them, which are 20 numbers apart.
there = cuvmm.from_dlpack(Changed((3, 8), typed(17, 4, strides=(20, 1))))
assert (there.shape, there.strides, there.nbytes) == ((3, 4), (10, 1), 24), there
for shape, change, text in [
    ((), single, "last dimension"),
    ((3, 5), single, "last dimension of (3, 5) is not even"),
    ((3, 8), typed(17, 4, strides=(9, 1)), "within a byte"),
    ((3, 8), typed(17, 4, strides=(16, 2)), "gaps"),
]:
    refused(BufferError, lambda: cuvmm.from_dlpack(Changed(shape, change)), text)
# With a byte for each they have no name here. Numbers of other types lie side by side too.
for change, name, nbytes in [
    (typed(17, 4, flags=4), "dlpack:17:4", 15),
    (typed(0, 4), "dlpack:0:4", 8),
    (typed(15, 6), "dlpack:15:6", 12),
    (typed(15, 6, flags=4), "dlpack:15:6", 15),
    (typed(1, 1), "dlpack:1:1", 2),
]:
    there = cuvmm.from_dlpack(Changed((3, 5), change))
    assert (there.dtype, there.shape, there.nbytes) == (name, (3, 5), nbytes), there
    refused(ValueError, lambda: cuvmm.publish({"it": Changed((3, 5), change)}, "it"), "without a name")
assert cuvmm.stats().published == 0
"""
        )

    def test_descriptions_that_cannot_be(self):
        run(
            CHANGED
            + """
def many(managed, tensor):
    tensor.ndim = (1 << 31) - 1
def large(managed, tensor):
    typed(17, 4)(managed, tensor)
    for place in range(2):
        tensor.shape[place] = (1 << 63) - 2
        tensor.strides[place] = (1 << 63) - 1
    tensor.strides[1] = 1
for change, text in [
    (typed(10, 8, 0), "no size"),
    (typed(10, 0), "no size"),
    (typed(10, 3), "have 8 bits, not 3"),
    (typed(14, 255), "have 8 bits, not 255"),
    (typed(17, 8), "have 4 bits, not 8"),
    (typed(16, 8), "have 6 bits, not 8"),
    (many, "2147483647 dimensions has more than 64"),
    (large, "bytes at"),
]:
    for use in (cuvmm.from_dlpack, lambda it: cuvmm.publish({"it": it}, "it")):
        try:
            use(Changed((4, 8), change))
        except (BufferError, ValueError) as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
        assert cuvmm.stats().allocations == 0, text
        assert cuvmm.stats().published == 0, text
"""
        )

    def test_contents_of_an_array_that_names_its_type(self):
        """The types of `ml_dtypes` have one name in the array interface, and one has another."""
        run(
            """
            import ctypes, cuvmm
            held = (ctypes.c_uint8 * 6)(*range(6))

            class Array:
                def __init__(self, name, typestr):
                    self.dtype = type("dtype", (), {"name": name})
                    self.__array_interface__ = {"shape": (2, 3), "typestr": typestr, "version": 3,
                        "data": (ctypes.addressof(held), False)}

            def bytes_of(array):
                return ctypes.string_at(array.address, array.nbytes)

            for name, typestr in [("float8_e4m3fn", "<V1"), ("float8_e5m2", "<f1"), ("float8_e8m0fnu", "<V1")]:
                array = cuvmm.empty((2, 3), name)
                array.copy_from(Array(name, typestr))
                assert bytes_of(array) == bytes(range(6)), name
                refused(TypeError, lambda: array.copy_from(Array("float8_e3m4", "<V1")), "float8_e3m4", name)
            """
        )


@needs_stand_in
class Publications(unittest.TestCase):
    def test_files_count_numbers(self):
        case(
            """
            import json
            from cuvmm import _library
            kind = torch.tensors.types["float4_e2m1fn_x2"]
            state = {"dense": made((3, 4), kind), "turned": made((4, 6), kind).as_strided((6, 4), (1, 6)),
                "none": made((2, 0), kind), "e8m0": made((3, 2), torch.tensors.types["float8_e8m0fnu"]),
                "ours": cuvmm.empty((5, 3), "float4_e2m1fn_x2")}
            ctypes.memmove(state["ours"].address, bytes(range(15)), 15)
            cuvmm.publish(state, "model", device=0)
            weights = cuvmm.attach("model")
            said = json.loads(_library.get().required("attached", weights._memory.number))
            found = {it["name"]: (it["dtype"], it["shape"], it["size"]) for it in said["manifest"]["tensors"]}
            assert found == {"dense": ("F4", [3, 8], 12), "turned": ("F4", [6, 8], 24),
                "none": ("F4", [2, 0], 0), "e8m0": ("F8_E8M0", [3, 2], 6), "ours": ("F4", [5, 6], 15)}, found
            for name in ("dense", "turned", "e8m0"):
                tensor = weights[name]
                assert (tensor.shape, tensor.stride()) == (state[name].shape, state[name].stride()), name
                assert tensor.dtype is state[name].dtype and tensor.bytes() == state[name].bytes(), name
                # The array is of the same type for other libraries.
                array = weights.array(name)
                assert (array.dtype, array.strides) == (tensor.dtype.name, tensor.stride()), array
            assert weights["none"].shape == (2, 0)
            assert weights["ours"].bytes() == bytes(range(15))
            """
        )

    def test_what_has_no_shape_in_numbers(self):
        case(
            """
            from cuvmm import _publishing
            kind = torch.tensors.types["float4_e2m1fn_x2"]
            refused(ValueError, lambda: cuvmm.publish({"it": made((), kind)}, "it"), "'it'", "no shape")
            assert cuvmm.stats().published == 0
            # A publisher in another language may have rows that end within a byte.
            _publishing.shape_in_files = lambda name, shape: (2, 3)
            cuvmm.publish({"it": made((3,), kind), "other": made((3,), kind)}, "odd")
            weights = cuvmm.attach("odd")
            assert len(weights) == 2
            for use in (weights.__getitem__, weights.array):
                refused(cuvmm.Error, lambda: use("it"), "'it'", "F4", "(2, 3) is not even")
            """
        )
