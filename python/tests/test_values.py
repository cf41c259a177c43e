"""Sizes, element types, settings and snapshots, which need no library."""

import ast
import doctest
import glob
import os
import unittest

import cuvmm
from cuvmm import _dtypes, _settings, _sizes
from cuvmm._sizes import bytes_of, text_of


class Sizes(unittest.TestCase):
    def test_text(self):
        for text, expected in [
            ("60GiB", 60 << 30),
            ("1.5 GiB", 3 << 29),
            ("2GB", 2 * 10**9),
            ("512mib", 512 << 20),
            ("17", 17),
            (17, 17),
        ]:
            self.assertEqual(bytes_of(text), expected, text)

    def test_refused(self):
        for text in ("", "GiB", "-1", "0", 0, -5, "5 parsecs", "0.1", "1e9", "6 0GiB"):
            with self.assertRaises(ValueError, msg=text):
                bytes_of(text)
        for more in (1 << 63, "8388608TiB", "99999999999.5TiB"):
            with self.assertRaises(ValueError, msg=more):
                bytes_of(more)
        self.assertEqual(bytes_of((1 << 63) - 1), (1 << 63) - 1)
        for other in (None, 1.5, True, b"1GiB"):
            with self.assertRaises(TypeError, msg=other):
                bytes_of(other)

    def test_for_people(self):
        for size, text in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 10, "1 KiB"),
            (6 << 20, "6 MiB"),
            (3 << 29, "1.5 GiB"),
            (1538 << 20, "1538 MiB"),
            (5000, "5000 B"),
            ((2 << 20) + 1, "2.00 MiB"),
            (149_123_456_789, "138.88 GiB"),
            (3 << 39, "1.5 TiB"),
            (1 << 62, "4 EiB"),
            ((1 << 64) - 1, "16.00 EiB"),
        ]:
            self.assertEqual(text_of(size), text)


class Swapped:
    """As NumPy's type for big-endian numbers."""

    name, isnative = "float32", False


class ElementTypes(unittest.TestCase):
    def test_names(self):
        for name in ("float32", "bfloat16", "bool", "complex64", "uint8"):
            self.assertEqual(_dtypes.dtype_of(name).name, name)
        torch_like = type("dtype", (), {"__str__": lambda self: "torch.float16"})()
        self.assertEqual(_dtypes.dtype_of(torch_like).name, "float16")
        for other, text in [("float12", "float12"), (float, "64 bits"), (Swapped(), "another order")]:
            with self.assertRaisesRegex(ValueError, text):
                _dtypes.dtype_of(other)

    def test_codes(self):
        for name, code, bits, lanes in [
            ("int64", 0, 64, 1),
            ("float16", 2, 16, 1),
            ("bfloat16", 4, 16, 1),
            ("float8_e4m3fn", 10, 8, 1),
            ("float8_e5m2", 12, 8, 1),
            ("float8_e8m0fnu", 14, 8, 1),
            ("float4_e2m1fn_x2", 17, 4, 2),
        ]:
            dtype = _dtypes.dtype_of(name)
            self.assertEqual((dtype.code, dtype.bits, dtype.lanes), (code, bits, lanes))
            self.assertEqual(_dtypes.dtype_of_code(code, bits, lanes), dtype)
            self.assertEqual(dtype.itemsize, max(1, bits // 8))

    def test_every_type_of_files_has_one_name(self):
        """The list is that of safetensors 0.8, without the two of 6 bits, which nothing here has."""
        names = "F64 F32 F16 BF16 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ F8_E8M0 F4 BOOL C64"
        names += " I64 I32 I16 I8 U64 U32 U16 U8"
        for name in names.split():
            ours = _dtypes.name_from_files(name)
            self.assertNotEqual(ours, name)
            self.assertEqual(_dtypes.dtype_of(ours).name, ours)
            self.assertEqual(_dtypes.name_in_files(ours), name)

    def test_elements_that_have_no_size_or_another_one(self):
        for codes, text in [
            ((2, 0), "no size"),
            ((2, 32, 0), "no size"),
            ((10, 3), "float8_e4m3fn have 8 bits, not 3"),
            ((17, 8), "float4_e2m1fn have 4 bits, not 8"),
            ((15, 8), "float6_e2m3fn have 6 bits, not 8"),
        ]:
            with self.assertRaisesRegex(BufferError, text):
                _dtypes.dtype_of_code(*codes)
        self.assertEqual(_dtypes.dtype_of_code(0, 3).name, "dlpack:0:3")
        self.assertEqual(_dtypes.dtype_of_code(18, 8, 2).name, "dlpack:18:8x2")

    def test_two_numbers_of_4_bits_in_a_byte(self):
        single = _dtypes.dtype_of_code(17, 4)
        for shape, strides, pairs, steps in [
            ((8,), (1,), (4,), (1,)),
            ((3, 8), (8, 1), (3, 4), (4, 1)),
            ((3, 8), (20, 1), (3, 4), (10, 1)),
            # A dimension of one element has no step.
            ((1, 8), (7, 1), (1, 4), (3, 1)),
            ((0, 8), (5, 3), (0, 4), (2, 1)),
            ((3, 0), (1, 1), (3, 0), (0, 1)),
        ]:
            dtype, *found = _dtypes.pairs_of(single, shape, strides)
            self.assertEqual((dtype.name, *found), ("float4_e2m1fn_x2", pairs, steps))
            self.assertEqual(_dtypes.shape_in_files("F4", pairs), shape)
        for shape, strides, text in [
            ((), (), "not even"),
            ((3, 5), (5, 1), "not even"),
            ((3, 8), (9, 1), "within a byte"),
            ((4, 2), (1, 4), "within a byte"),
            ((4, 8), (16, 2), "gaps"),
        ]:
            with self.assertRaisesRegex(ValueError, text):
                _dtypes.pairs_of(single, shape, strides)
        with self.assertRaisesRegex(ValueError, "name 'float4_e2m1fn_x2'"):
            _dtypes.dtype_of("float4_e2m1fn")


class Settings(unittest.TestCase):
    def test_refused_before_the_library_is_asked(self):
        with self.assertRaises(ValueError):
            _settings.configure(preset="slow")
        with self.assertRaises(ValueError):
            _settings.configure(limit="much")
        with self.assertRaisesRegex(TypeError, r"such as \[0, 1\], not 1"):
            _settings.configure(peers=1)
        with self.assertRaisesRegex(TypeError, "names pools, .* not 3"):
            cuvmm.sleep(3)


class Documentation(unittest.TestCase):
    def test_every_public_function_has_an_example(self):
        """Those of modules that need PyTorch or CuPy are found in their sources."""
        folder = os.path.dirname(cuvmm.__file__)
        public = {}
        for path in sorted(glob.glob(os.path.join(folder, "**", "*.py"), recursive=True)):
            with open(path) as file:
                tree = ast.parse(file.read())
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    public.setdefault(node.name, []).append(ast.get_docstring(node) or "")
        names = {name for name in cuvmm.__all__ if callable(getattr(cuvmm, name))}
        names -= {name for name in names if isinstance(getattr(cuvmm, name), type)}
        names = names - {"library_path"} | {"path", "install", "is_installed", "pool", "check_access"}
        for name in names:
            self.assertTrue(public[name], name)
            for text in public[name]:
                self.assertIn(">>> ", text, name)


def load_tests(loader, tests, pattern):
    tests.addTests(doctest.DocTestSuite(_sizes))
    tests.addTests(doctest.DocTestSuite(_dtypes))
    return tests
