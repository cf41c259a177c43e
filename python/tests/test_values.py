"""Sizes, element types, settings and snapshots, which need no library."""

import doctest
import unittest

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
        for other in (None, 1.5, True, b"1GiB"):
            with self.assertRaises(TypeError, msg=other):
                bytes_of(other)

    def test_for_people(self):
        for size, text in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 10, "1.00 KiB"),
            (3 << 39, "1.50 TiB"),
        ]:
            self.assertEqual(text_of(size), text)


class ElementTypes(unittest.TestCase):
    def test_names(self):
        for name in ("float32", "bfloat16", "bool", "complex64", "uint8"):
            self.assertEqual(_dtypes.dtype_of(name).name, name)
        torch_like = type("dtype", (), {"__str__": lambda self: "torch.float16"})()
        self.assertEqual(_dtypes.dtype_of(torch_like).name, "float16")
        self.assertEqual(_dtypes.dtype_of(float).name, "float32")
        with self.assertRaises(ValueError):
            _dtypes.dtype_of("float12")

    def test_codes(self):
        for name, code, bits in [("int64", 0, 64), ("float16", 2, 16), ("bfloat16", 4, 16)]:
            self.assertEqual(_dtypes.dtype_of(name)[1:3], (code, bits))
            self.assertEqual(_dtypes.dtype_of_code(code, bits).name, name)


class Settings(unittest.TestCase):
    def test_refused_before_the_library_is_asked(self):
        with self.assertRaises(ValueError):
            _settings.configure(preset="slow")
        with self.assertRaises(ValueError):
            _settings.configure(limit="much")


def load_tests(loader, tests, pattern):
    tests.addTests(doctest.DocTestSuite(_sizes))
    tests.addTests(doctest.DocTestSuite(_dtypes))
    return tests


if __name__ == "__main__":
    unittest.main()
