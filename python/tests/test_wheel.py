"""The wheel: its library runs on old systems and unwinds as the process does."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import unittest

from support import HERE, needs_stand_in, run

import cuvmm

ROOT = os.path.dirname(os.path.dirname(HERE))
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
        with open(os.path.join(ROOT, "Cargo.toml"), "rb") as file:
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

    @needs_stand_in
    @unittest.skipUnless(shutil.which("c++"), "there is no C++ compiler")
    def test_an_exception_of_pytorch_passes_through_the_library(self):
        """A program in C++ catches what the library throws, with a stand-in for libc10."""
        source = os.path.join(ROOT, "crates", "cuvmm-torch", "tests", "cxx", "c10.cpp")
        with tempfile.TemporaryDirectory() as folder:
            library = os.path.join(folder, "libc10.so")
            options = ["-shared", "-fPIC", "-std=c++17", "-Wl,-soname,libc10.so"]
            subprocess.run(["c++", *options, "-o", library, source], check=True)
            said = run(
                f"""
                import ctypes
                import cuvmm
                c10 = ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)
                malloc = ctypes.CDLL(cuvmm.library_path()).cuvmm_malloc
                address, text = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
                attempt = lambda size: c10.c10_attempt(
                    malloc, ctypes.c_long(size), None, ctypes.byref(address), text, 8192)
                cuvmm.configure(limit="100MiB")
                assert attempt(8 << 20) == 0 and address.value
                print(attempt(200 << 20), text.value.decode())
                assert attempt(8 << 20) == 0
                """
            )
        self.assertTrue(said.startswith("1 CUDA out of memory. Tried to allocate 200"), said)
        self.assertIn("limit", said)

    def test_other_libraries_are_complained_about(self):
        gcc = subprocess.check_output(["cc", "-print-file-name=libgcc_s.so.1"], text=True).strip()
        complaints = elf.complaints(elf.read(gcc), build.GLIBC)
        self.assertIn("it defines _Unwind_Resume", complaints)
        self.assertIn("it does not use libgcc_s to unwind", complaints)
        newer = elf.Library(
            ["libgcc_s.so.1"], {"GLIBC_2.4", "GLIBC_2.34"}, set(), {"_Unwind_Resume"}
        )
        self.assertEqual(elf.complaints(newer, (2, 28)), ["it needs GLIBC_2.34"])
