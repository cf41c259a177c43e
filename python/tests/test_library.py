"""The library through ctypes, over the stand-in for libcuda."""

import unittest

from support import frame, needs_stand_in, run

case = frame("\nimport cuvmm")


class Missing(unittest.TestCase):
    def test_the_path_is_named_once(self):
        case(
            """
            try:
                cuvmm.stats()
            except cuvmm.Error as error:
                text = str(error)
                assert text.startswith("cannot load /nowhere/lib.so: "), text
                assert text.count("/nowhere/lib.so") == 1, text
            else:
                raise AssertionError("there is no library")
            """,
            CUVMM_LIBRARY="/nowhere/lib.so",
        )


@needs_stand_in
class Interface(unittest.TestCase):
    def test_figures(self):
        case(
            """
            from cuvmm import _library
            library = _library.get()
            assert library.version().decode() == cuvmm.__version__
            assert cuvmm.stats().held == 0 and "nothing" in str(cuvmm.stats())
            array = cuvmm.empty(3 << 20)
            found = cuvmm.stats()
            assert found.live == 3 << 20 and found.allocations == 1, found
            assert found.held >= found.live and found.limit > 0
            assert "MiB" in str(found), str(found)
            stats = library.figures("memory_stats", 0)
            assert stats["requested_bytes"]["all"]["current"] == 3 << 20, stats
            assert stats["requested_bytes"]["large_pool"]["current"] == 3 << 20, stats
            assert stats["reserved_bytes"]["all"]["current"] == found.held, stats
            snapshot = library.figures("snapshot", 0)
            (only,) = snapshot["allocations"]
            assert only["address"] == array.address and only["requested"] == 3 << 20, only
            del array
            library.reset_peak_stats(0)
            stats = library.figures("memory_stats", 0)
            assert stats["requested_bytes"]["all"]["peak"] == 0, stats
            assert stats["requested_bytes"]["all"]["freed"] == 3 << 20, stats
            cuvmm.empty_cache()
            assert cuvmm.stats().held == 0, cuvmm.stats()
            """
        )

    def test_settings(self):
        case(
            """
            from cuvmm import _library
            library = _library.get()
            assert library.configure(b'{"lmit": 5}') < 0
            assert "lmit" in library.reason(), library.reason()
            cuvmm.configure(limit="64MiB", tenant="mine")
            array = cuvmm.empty(8 << 20)
            assert cuvmm.stats().limit == 64 << 20
            refused(cuvmm.Error, lambda: cuvmm.configure(limit="32MiB"))
            try:
                cuvmm.empty(65 << 20)
            except cuvmm.OutOfMemoryError as error:
                assert isinstance(error, MemoryError)
                assert "out of memory" in str(error) and "64 MiB" in str(error), error
            else:
                raise AssertionError("more than the limit")
            assert cuvmm.stats().failed == 1
            """
        )

    def test_a_ledger_of_two_processes(self):
        run(
            """
            import subprocess, sys, tempfile
            import cuvmm
            other = '''
            import sys
            import cuvmm
            cuvmm.configure(ledger=sys.argv[1], tenant="other")
            small = cuvmm.empty(8 << 20)
            try:
                cuvmm.empty(40 << 20)
            except cuvmm.OutOfMemoryError as error:
                print(error)
            '''
            with tempfile.TemporaryDirectory() as folder:
                cuvmm.configure(ledger=folder, ledger_limit="64MiB", tenant="first")
                array = cuvmm.empty(40 << 20)
                ended = subprocess.run(
                    [sys.executable, "-c", other, folder], capture_output=True, text=True)
                assert ended.returncode == 0, ended.stderr
                assert "cannot allocate 40 MiB" in ended.stdout, ended
                assert "holds 8 MiB of 64 MiB" in ended.stdout, ended.stdout
            """
        )

    def test_a_guarantee_keeps_memory_from_other_processes(self):
        run(
            """
            import subprocess
            import sys
            import tempfile
            import cuvmm
            other = '''
            import sys
            import cuvmm
            cuvmm.configure(ledger=sys.argv[1], tenant="other", guarantee=int(sys.argv[2]))
            try:
                print(cuvmm.empty(int(sys.argv[3])).nbytes)
            except cuvmm.Error as error:
                print(error)
            '''
            with tempfile.TemporaryDirectory() as folder:
                cuvmm.configure(
                    ledger=folder, ledger_limit="64MiB", tenant="first", guarantee="24MiB", priority=1)
                small = cuvmm.empty(2 << 20)
                def ask(guarantee, size):
                    command = [sys.executable, "-c", other, folder, str(guarantee), str(size)]
                    ended = subprocess.run(command, capture_output=True, text=True)
                    assert ended.returncode == 0, ended.stderr
                    return ended.stdout
                assert "cannot allocate 42 MiB" in ask(0, 42 << 20)
                assert ask(0, 40 << 20) == f"{40 << 20}\\n"
                assert "at most the ledger's limit: 66 MiB" in ask(66 << 20, 2 << 20)
                assert ask(40 << 20, 40 << 20) == f"{40 << 20}\\n"
                whole = cuvmm.empty(22 << 20)
            """
        )

    def test_sizes_and_devices_that_cannot_be(self):
        case(
            """
            first = cuvmm.empty(512)
            for kind, wrong in [
                (cuvmm.OutOfMemoryError, {"shape": 1 << 62}),
                # The rest of the division by 2**64 would be 4096 bytes.
                (cuvmm.OutOfMemoryError, {"shape": (1 << 64) + 4096}),
                (cuvmm.OutOfMemoryError, {"shape": (1 << 40, 1 << 40), "dtype": "float64"}),
                # So would the sizes and the strides beside a size of 0.
                (cuvmm.OutOfMemoryError, {"shape": (0, 1 << 70)}),
                (cuvmm.OutOfMemoryError, {"shape": (1 << 40, 0, 1 << 40)}),
                (ValueError, {"shape": -1}),
                (TypeError, {"shape": (1.5,)}),
                (ValueError, {"shape": 1, "dtype": "float12"}),
                (ValueError, {"shape": 1, "device": -1}),
                (ValueError, {"shape": 1, "device": 1 << 32}),
                (ValueError, {"shape": 1, "device": "cuda:64"}),
                (cuvmm.Error, {"shape": 1, "device": 63}),
            ]:
                try:
                    cuvmm.empty(**wrong)
                except kind as error:
                    assert str(error), wrong
                    is_short = isinstance(error, cuvmm.OutOfMemoryError)
                    assert is_short == (kind is cuvmm.OutOfMemoryError), error
                else:
                    raise AssertionError(wrong)
            assert cuvmm.stats().allocations == 1
            assert cuvmm.stats("cuda:0").live == cuvmm.stats(0).live == 512
            for device in (-1, 64, "cpu"):
                refused(ValueError, lambda: cuvmm.stats(device), "device")
            """
        )

    def test_two_devices(self):
        case(
            """
            one, two = cuvmm.empty(5000), cuvmm.empty(7000, device="cuda:1")
            assert (one.device, two.device) == (0, 1)
            assert (cuvmm.stats(0).live, cuvmm.stats(1).live) == (5000, 7000)
            """
        )


@needs_stand_in
class Exchange(unittest.TestCase):
    def test_a_tensor_keeps_the_memory(self):
        case(
            """
            array = cuvmm.empty((3, 5), "float32")
            assert array.__dlpack_device__() == (2, 0)
            there = cuvmm.from_dlpack(array)
            assert (there.address, there.nbytes) == (array.address, 60), there
            assert (there.shape, there.strides, there.dtype) == ((3, 5), (5, 1), "float32"), there
            interface = array.__cuda_array_interface__
            assert interface["data"] == (array.address, False) and interface["typestr"] == "<f4"
            del array
            assert cuvmm.stats().allocations == 1
            del there
            assert cuvmm.stats().allocations == 0
            """
        )

    def test_copies_are_refused(self):
        """A copy would have the address of memory that it does not keep."""
        run(
            """
            import copy, pickle, cuvmm
            array = cuvmm.empty(1 << 20)
            for take in (copy.deepcopy, pickle.dumps):
                refused(TypeError, lambda: take(array), "from_dlpack")
            same = copy.copy(array)
            del array
            assert cuvmm.stats().live == 1 << 20
            del same
            assert cuvmm.stats().live == 0
            hash(cuvmm.stats())
            """
        )

    def test_devices_of_other_libraries(self):
        case(
            """
            from cuvmm._arrays import device_of

            class Torch:
                def __init__(self, type, index):
                    self.type, self.index = type, index
                def __str__(self):
                    return self.type + ("" if self.index is None else f":{self.index}")

            class CuPy:
                id = 1

            for device, expected in [(1, 1), ("cuda:1", 1), ("cuda", 0), (CuPy(), 1),
                    (Torch("cuda", 1), 1), (Torch("cuda", None), 0)]:
                assert device_of(device) == expected, device
            for device, kind in [(Torch("cpu", 0), ValueError), ("cpu", ValueError),
                    (1.5, TypeError), (None, TypeError)]:
                refused(kind, lambda: device_of(device), "cuda:0")
            """
        )

    def test_streams(self):
        case(
            """

            class Torch:
                cuda_stream = 0

            class CuPy:
                ptr = 0

            array = cuvmm.empty(4)
            for stream in (0, Torch(), CuPy()):
                array.record_stream(stream)
                array.__dlpack__(stream=stream)
                cuvmm.empty(4, stream=stream)
            for stream, kind in [("x", TypeError), (b"x", TypeError), (1.5, TypeError),
                    (object(), TypeError), (-7, ValueError), (1 << 70, ValueError)]:
                for use in (array.record_stream, lambda it: array.__dlpack__(stream=it),
                        lambda it: cuvmm.empty(4, stream=it)):
                    refused(kind, lambda: use(stream), "stream")
            try:
                array.record_stream(None)
            except TypeError as error:
                assert "None is not a stream" in str(error), error
            assert cuvmm.empty(range(2)).shape == (0, 1)
            for shape in (None, 1.5, "ab"):
                refused(TypeError, lambda: cuvmm.empty(shape), "a shape is")
            """
        )

    def test_producers(self):
        case(
            """

            class Old:
                def __init__(self, array):
                    self.array = array
                def __dlpack_device__(self):
                    return self.array.__dlpack_device__()
                def __dlpack__(self, stream=None):
                    return self.array.__dlpack__(stream=stream)

            class ReadOnly(Old):
                def __dlpack__(self, stream=None, max_version=None):
                    if max_version is None:
                        raise BufferError("a read-only array has no place for its flag")
                    return self.array.__dlpack__(stream=stream, max_version=max_version)

            array = cuvmm.empty((2, 3), "float32")
            for other in (array, Old(array), ReadOnly(array)):
                there = cuvmm.from_dlpack(other)
                assert (there.address, there.shape) == (array.address, (2, 3)), there
            """
        )

    def test_a_capsule_that_ends_while_an_exception_is_raised(self):
        """A list that is made of a generator ends with what it has when the generator raises."""
        case(
            """
            array = cuvmm.empty((4,), "float32")

            def capsules(**named):
                yield array.__dlpack__(**named)
                raise KeyError("raised")

            for named in ({}, {"max_version": (1, 0)}):
                try:
                    list(capsules(**named))
                except KeyError as error:
                    assert error.args == ("raised",), error
                else:
                    raise AssertionError("not raised")
            # A capsule keeps the memory without the array.
            capsule = array.__dlpack__()
            del array
            assert cuvmm.stats().allocations == 1
            del capsule
            assert cuvmm.stats().allocations == 0
            """
        )

    def test_a_library_of_host_memory_is_refused(self):
        """NumPy names a device and no stream."""
        case(
            """
            array = cuvmm.empty((4,), "float32")
            for device in (None, (1, 0), (2, 0)):
                try:
                    array.__dlpack__(dl_device=device, copy=None, max_version=(1, 0))
                except BufferError as error:
                    assert "CUDA device 0" in str(error), error
                else:
                    raise AssertionError(device)
            assert array.__dlpack__(dl_device=(2, 0), stream=-1)
            assert array.__dlpack__(dl_device=None, stream=None)
            try:
                import numpy
            except ImportError:
                pass
            else:
                try:
                    numpy.from_dlpack(array)
                except BufferError as error:
                    assert "CUDA device 0" in str(error), error
            del array
            assert cuvmm.stats().allocations == 0
            """
        )

    def test_a_stream_whose_use_cannot_be_recorded_loses_nothing(self):
        """Each thread's default stream has the handle 2. CuPy can pass it."""
        case(
            """
            array = cuvmm.empty(4)
            for use, kind in ((array.record_stream, cuvmm.Error),
                    (lambda stream: array.__dlpack__(stream=stream), BufferError)):
                refused(kind, lambda: use(2), "per-thread default stream")
            assert array.__dlpack__(stream=1) and array.__dlpack__(stream=-1)
            del array
            assert cuvmm.stats().allocations == 0
            """
        )

    def test_tensors_that_cannot_be(self):
        """A description that another library got wrong, or of a later version, is not believed."""
        case(
            """
            from cuvmm import _dlpack

            class Changed:
                def __init__(self, change):
                    self.change = change
                def __dlpack_device__(self):
                    return (2, 0)
                def __dlpack__(self, stream, max_version):
                    capsule = cuvmm.empty((2, 3), "float32").__dlpack__(max_version=max_version)
                    address = _dlpack._pointer(id(capsule), b"dltensor_versioned")
                    managed = _dlpack._ManagedVersioned.from_address(address)
                    self.change(managed, managed.dl_tensor)
                    return capsule

            def later(managed, tensor):
                managed.major = 2
            def no_sizes(managed, tensor):
                tensor.shape = None
            def negative_size(managed, tensor):
                tensor.shape[0] = -2
            def negative_count(managed, tensor):
                tensor.ndim = -1
            def nowhere(managed, tensor):
                tensor.data = None
            def beyond(managed, tensor):
                tensor.byte_offset = (1 << 64) - 1
            for change in (later, no_sizes, negative_size, negative_count, nowhere, beyond):
                refused(BufferError, lambda: cuvmm.from_dlpack(Changed(change)), "tensor")
                assert cuvmm.stats().allocations == 0, change

            def vectors(managed, tensor):
                tensor.dtype.lanes = 4
            there = cuvmm.from_dlpack(Changed(vectors))
            assert (there.dtype, there.nbytes) == ("dlpack:2:32x4", 96), there
            try:
                cuvmm.publish({"it": Changed(vectors)}, "it", device=0)
            except ValueError as error:
                assert "without a name" in str(error), error
            else:
                raise AssertionError("published")
            """
        )

    def test_versions_and_refusals(self):
        case(
            """
            array = cuvmm.empty(())
            assert array.shape == () and array.nbytes == 1
            assert "dltensor_versioned" in repr(array.__dlpack__(max_version=(1, 1)))
            assert "versioned" not in repr(array.__dlpack__(max_version=(0, 8)))
            for wrong in ({"copy": True}, {"dl_device": (1, 0)}):
                refused(BufferError, lambda: array.__dlpack__(**wrong))
            nothing = cuvmm.empty((0, 4), "int64")
            assert nothing.nbytes == 0 and cuvmm.from_dlpack(nothing).nbytes == 0
            refused(TypeError, lambda: cuvmm.from_dlpack([1]), "list")
            """
        )
