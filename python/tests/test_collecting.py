"""Garbage is collected where memory is short, over the stand-ins for libcuda, PyTorch and CuPy.

The time limits of the processes are guards against threads that wait for each other.
"""

import os
import shutil
import subprocess
import tempfile
import textwrap
import unittest

from support import frame, needs_stand_in

#: Objects in a reference cycle, which only a collection frees, and a count of collections.
BEGIN = textwrap.dedent(
    """
    import gc
    import threading
    import cuvmm
    gc.collect()
    gc.disable()
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase) if phase == "start" else None)
    MIB = 1 << 20


    class Garbage:
        def __init__(self, *owned, end=None):
            self.owned, self.end, self.itself = owned, end, self

        def __del__(self):
            if self.end:
                self.end()
    """
)
TORCH = BEGIN + textwrap.dedent(
    """
    import cuvmm.torch
    import torch


    def allocate(mib):
        \"\"\"Returns a tensor that frees its memory with itself, or None.\"\"\"
        tensor = torch.empty(mib * MIB)
        if not tensor.address:
            return None
        return Owner(tensor)


    class Owner:
        def __init__(self, tensor):
            self.tensor = tensor

        def __del__(self):
            self.tensor.free()
    """
)


plain, case = frame(BEGIN, fakes=True), frame(TORCH, fakes=True)


@needs_stand_in
class Arrays(unittest.TestCase):
    """Those of `cuvmm.empty` and of CuPy, which are made with the interpreter's lock."""

    def test_an_array_in_a_cycle_is_garbage_at_the_limit(self):
        for make in ("cuvmm.empty", "cupy.empty"):
            with self.subTest(make):
                plain(
                    f"""
                    import cupy, cuvmm.cupy
                    cuvmm.cupy.install(limit="100MiB")
                    make = {make}
                    for _ in range(3):
                        Garbage(make(80 * MIB))
                    assert len(collections) == 2, collections
                    kept = make(80 * MIB)
                    assert len(collections) == 3, collections
                    refused(MemoryError, lambda: make(80 * MIB))
                    assert len(collections) == 4, "once"
                    """
                )

    def test_a_finalizer_that_allocates_begins_no_collection(self):
        plain(
            """
            import cupy, cuvmm.cupy
            cuvmm.cupy.install(limit="100MiB")
            failed = []

            def end():
                try:
                    cupy.empty(200 * MIB)
                except MemoryError as error:
                    failed.append(error)

            Garbage(cupy.empty(80 * MIB), end=end)
            kept = cupy.empty(80 * MIB)
            assert len(failed) == 1 and len(collections) == 1, (failed, collections)
            """
        )

    def test_threads_that_do_not_end_before_the_interpreter(self):
        """One that asks for the interpreter's lock after its end would end within the library, which aborts."""
        plain(
            """
            cuvmm.configure(limit="100MiB")
            kept, lacks = cuvmm.empty(80 * MIB), threading.Event()

            def work():
                while True:
                    try:
                        cuvmm.empty(80 * MIB)
                    except MemoryError:
                        lacks.set()

            for _ in range(4):
                threading.Thread(target=work, daemon=True).start()
            lacks.wait()
            """
        )

    def test_a_finalizer_that_waits_for_a_thread_that_lacks_memory(self):
        plain(
            """
            from cuvmm import _library
            cuvmm.configure(limit="100MiB")
            _library.PATIENCE = 0.1
            kept, failed = cuvmm.empty(80 * MIB), []

            def lacks():
                try:
                    cuvmm.empty(80 * MIB)
                except MemoryError as error:
                    failed.append(error)

            def end():
                thread = threading.Thread(target=lacks)
                thread.start()
                thread.join()

            Garbage(end=end)
            lacks()
            assert len(failed) == 2 and len(collections) == 1, (failed, collections)
            """
        )


@needs_stand_in
class PyTorch(unittest.TestCase):
    def test_it_is_a_setting_and_off(self):
        case(
            """
            cuvmm.torch.install(limit="100MiB")
            Garbage(allocate(80))
            assert allocate(80) is None and not collections
            """
        )
        case(
            """
            refused(TypeError, lambda: cuvmm.torch.install(limit="100MiB", collect=1), "collect")
            assert not cuvmm.torch.is_installed()
            cuvmm.torch.install(limit="100MiB", collect=True)
            for _ in range(3):
                Garbage(allocate(80))
            kept = allocate(80)
            assert kept and len(collections) == 3, collections
            assert allocate(80) is None and len(collections) == 4, collections
            """
        )

    def test_threads_that_lack_memory_while_one_frees(self):
        """Each allocation lets the interpreter's lock go, and needs it again to collect."""
        case(
            """
            cuvmm.torch.install(limit="100MiB", collect=True)
            kept = [allocate(30) for _ in range(3)]
            made = []

            def work():
                for _ in range(20):
                    made.append(allocate(30) is not None)
                    if kept:
                        Garbage(kept.pop())

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(made) == 80 and any(made), made
            """
        )

    def test_a_finalizer_that_allocates(self):
        case(
            """
            cuvmm.torch.install(limit="100MiB", collect=True)
            failed = []
            Garbage(allocate(80), end=lambda: failed.append(allocate(200) is None))
            kept = allocate(80)
            assert kept and failed == [True] and len(collections) == 1, (failed, collections)
            """
        )

    def test_not_for_pools_and_not_without_an_exception(self):
        case(
            """
            from cuvmm import _library
            cuvmm.torch.install(limit="100MiB", collect=True)
            Garbage(allocate(80))
            with cuvmm.torch.pool("tag"):
                assert torch.empty(80 * MIB).address is None
            assert not _library.get().try_malloc(80 * MIB, 0, None)
            assert not collections
            """
        )

    def test_threads_that_do_not_end_before_the_interpreter(self):
        case(
            """
            cuvmm.torch.install(limit="100MiB", collect=True)
            kept, lacks = allocate(80), threading.Event()

            def work():
                while True:
                    assert allocate(80) is None
                    lacks.set()

            for _ in range(4):
                threading.Thread(target=work, daemon=True).start()
            lacks.wait()
            """
        )

    @unittest.skipUnless(shutil.which("c++"), "there is no C++ compiler")
    def test_threads_of_which_python_does_not_know(self):
        """Backward runs in threads of C++."""
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        source = os.path.join(root, "crates", "cuvmm-torch", "tests", "cxx", "c10.cpp")
        with tempfile.TemporaryDirectory() as folder:
            library = os.path.join(folder, "libc10.so")
            options = ["-shared", "-fPIC", "-pthread", "-std=c++17", "-Wl,-soname,libc10.so"]
            subprocess.run(["c++", *options, "-o", library, source], check=True)
            case(
                f"""
                import ctypes
                cuvmm.torch.install(limit="100MiB", collect=True)
                c10 = ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)
                malloc = ctypes.CDLL(cuvmm.library_path()).cuvmm_malloc
                attempt = lambda mib, threads: c10.c10_attempts(malloc, ctypes.c_long(mib * MIB), threads)
                Garbage(allocate(80))
                assert attempt(20, 4) == 4, "four threads, of which some collect"
                assert 1 <= len(collections) <= 4, collections
                del collections[:]
                assert attempt(30, 4) == 0, "out of memory, in each of them"
                """
            )
