"""`cuvmm.cupy` with a stand-in for CuPy, over the stand-in for libcuda."""

import unittest

from support import frame, needs_stand_in

case = frame("\nimport cupy, cuvmm, cuvmm.cupy", fakes=True)


@needs_stand_in
class CuPy(unittest.TestCase):
    def test_arrays_are_of_the_heap(self):
        case(
            """
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
            refused(RuntimeError, cuvmm.cupy.install, "already")
            """
        )

    def test_settings_that_were_made_before_stay(self):
        case(
            """
            cuvmm.configure(limit="64MiB")
            cuvmm.cupy.install(tenant="arrays")
            assert cupy.empty(1).ptr and cuvmm.stats().limit == 64 << 20, cuvmm.stats().limit
            """
        )

    def test_no_settings_beside_a_heap_that_is_used(self):
        case(
            """
            array = cuvmm.empty(1)
            cuvmm.cupy.install()
            other = cupy.empty(1)
            assert other.ptr and cuvmm.stats().allocations == 2
            """
        )

    def test_streams_stay_alive(self):
        case(
            """
            import gc, weakref
            cuvmm.cupy.install(limit="64MiB")
            made, freed, unused = (cupy.cuda.Stream() for _ in range(3))
            kept = [weakref.ref(one) for one in (made, freed, unused)]
            cupy.cuda.stream = made
            array = cupy.empty(5 << 20)
            cupy.cuda.stream = freed
            del array
            cupy.cuda.stream = unused
            cupy.cuda.stream = cupy.cuda.Stream(0)
            del made, freed, unused
            gc.collect()
            assert [one() is not None for one in kept] == [True, True, False]
            """
        )

    def test_streams_that_come_and_go(self):
        case(
            """
            import gc, weakref
            cuvmm.cupy.install(limit="200MiB")
            cupy.cuda.stream = cupy.cuda.Stream()
            first = cupy.empty(4 << 20)
            seen, most = [weakref.ref(cupy.cuda.stream)], 0
            for _ in range(1000):
                cupy.cuda.stream = cupy.cuda.Stream()
                seen.append(weakref.ref(cupy.cuda.stream))
                array = cupy.empty(4 << 20)
                del array
                most = max(most, cuvmm.stats().held)
            alive = sum(one() is not None for one in seen)
            assert alive <= 66, alive
            assert seen[0]() is not None, "an array that lives was made on it"
            assert most <= 140 << 20, most
            del first
            """
        )

    def test_an_array_of_another_device_than_the_current_one(self):
        case(
            """
            cuvmm.cupy.install(limit="64MiB")
            for device in (0, 1):
                cupy.cuda.current_device = device
                stream = cupy.cuda.Stream()
                if device == 0:
                    cupy.cuda.stream = stream
                else:
                    cupy.cuda.streams[device] = stream
            array = cupy.empty(40 << 20)
            cupy.cuda.current_device = 0
            del array
            assert cuvmm.stats(1).live == 0
            cupy.cuda.current_device = 1
            assert cupy.empty(60 << 20).ptr
            """
        )

    def test_an_array_that_is_freed_while_the_thread_s_default_stream_is_current(self):
        """No other thread could wait for that stream later, so it is waited for at once."""
        case(
            """
            cuvmm.cupy.install(limit="64MiB")
            array = cupy.empty(40 << 20)
            cupy.cuda.stream = cupy.cuda.Stream(2)
            del array
            assert cuvmm.stats().live == 0
            cupy.cuda.stream = cupy.cuda.Stream(0)
            assert cupy.empty(60 << 20).ptr
            """
        )

    def test_an_array_that_is_freed_while_the_thread_s_default_stream_captures(self):
        """The capture goes on, and the array is freed once that stream can be waited for."""
        case(
            """
            import ctypes, gc, threading
            cuvmm.cupy.install(limit="64MiB")
            libcuda, graph = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
            per_thread = ctypes.c_void_p(2)

            def captured(array, ends):
                cupy.cuda._enter(0)
                cupy.cuda.stream = cupy.cuda.Stream(2)
                assert libcuda.cuStreamBeginCapture_v2(per_thread, 2) == 0
                del array[0]
                gc.collect()
                assert cuvmm.stats().live == 40 << 20
                if ends:
                    assert libcuda.cuStreamEndCapture(per_thread, ctypes.byref(graph)) == 0

            captured([cupy.empty(40 << 20)], True)
            cupy.cuda.stream = cupy.cuda.Stream(0)
            # It makes room for the next one.
            array = cupy.empty(60 << 20)
            assert array.ptr and cuvmm.stats().live == 60 << 20
            del array
            # An ending thread frees its own.
            thread = threading.Thread(target=captured, args=([cupy.empty(40 << 20)], True))
            thread.start()
            thread.join()
            assert cuvmm.stats().live == 0, cuvmm.stats().live
            """
        )

    def test_a_stream_that_ends(self):
        case(
            """
            cuvmm.cupy.install(limit="64MiB")
            own = cupy.cuda.Stream()
            cupy.cuda.stream = cupy.cuda.Stream(own.ptr)
            array, freed = cupy.empty(20 << 20), cupy.empty(8 << 20)
            del freed
            cupy.cuda.stream = cupy.cuda.Stream(0)
            cuvmm.end_stream(own)
            # Another stream with its handle is kept anew.
            assert own.ptr not in cuvmm._streams.kept
            del own
            for _ in range(5000):
                other = cupy.empty(40 << 20)
                assert other.ptr
                del other
            del array
            assert cupy.empty(60 << 20).ptr
            """
        )
