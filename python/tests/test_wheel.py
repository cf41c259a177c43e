"""The wheel: its library runs on old systems and unwinds as the process does."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import unittest

from support import HERE

import cuvmm

sys.path.insert(0, os.path.dirname(HERE))

import build
import elf


def installed():
    try:
        return importlib.metadata.distribution("cuvmm")
    except importlib.metadata.PackageNotFoundError:
        return None


class Wheel(unittest.TestCase):
    def test_the_version_is_the_workspace_s(self):
        with open(os.path.join(os.path.dirname(HERE), "..", "Cargo.toml"), "rb") as file:
            version = tomllib.load(file)["workspace"]["package"]["version"]
        self.assertEqual(cuvmm.__version__, version)
        if installed():
            self.assertEqual(installed().version, version)

    @unittest.skipUnless(installed(), "the wheel is not installed")
    def test_files(self):
        names = {str(file) for file in installed().files}
        self.assertIn("cuvmm/py.typed", names)
        self.assertIn("cuvmm/torch/__init__.py", names)
        self.assertIn("cuvmm/lib/libcuvmm_torch.so", names)
        self.assertTrue(any(name.endswith("licenses/LICENSE-MIT") for name in names))
        tag = installed().read_text("WHEEL")
        self.assertIn("Tag: py3-none-manylinux_2_28_x86_64", tag)

    @unittest.skipUnless(installed(), "the wheel is not installed")
    def test_the_library_needs_no_newer_glibc_and_no_unwinder_of_its_own(self):
        found = elf.read(cuvmm.library_path())
        self.assertEqual(elf.complaints(found, build.GLIBC), [])
        self.assertIn("cuvmm_malloc", found.defined)
        # Nothing of CUDA or PyTorch is linked: both are found when the library runs.
        for name in found.needed:
            self.assertRegex(name, r"^(lib(c|m|dl|rt|pthread|gcc_s)\.so|ld-linux)")

    def test_other_libraries_are_complained_about(self):
        gcc = subprocess.check_output(["cc", "-print-file-name=libgcc_s.so.1"], text=True).strip()
        complaints = elf.complaints(elf.read(gcc), build.GLIBC)
        self.assertIn("it defines _Unwind_Resume", complaints)
        self.assertIn("it does not use libgcc_s to unwind", complaints)
        newer = elf.Library(
            ["libgcc_s.so.1"], {"GLIBC_2.4", "GLIBC_2.34"}, set(), {"_Unwind_Resume"}
        )
        self.assertEqual(elf.complaints(newer, (2, 28)), ["it needs GLIBC_2.34"])


if __name__ == "__main__":
    unittest.main()
