"""Cases that public bug reports of other allocators describe, in Python over the stand-in for libcuda."""

import unittest

from support import needs_stand_in, run


@needs_stand_in
class Reports(unittest.TestCase):
    def test_a_request_larger_than_any_free_range(self):
        run(
            """
            import cuvmm
            cuvmm.configure(limit="128MiB")
            arrays = [cuvmm.empty(16 * MIB) for _ in range(8)]
            del arrays[::2]
            assert cuvmm.empty(64 * MIB).nbytes == 64 * MIB
            """
        )

    def test_stranded_memory_is_in_the_error(self):
        run(
            """
            import cuvmm
            cuvmm.configure(limit="128MiB")
            arrays = [cuvmm.empty(4 * MIB) for _ in range(32)]
            del arrays[::2]
            try:
                cuvmm.empty(64 * MIB)
            except cuvmm.OutOfMemoryError as error:
                assert "stranded" in str(error) and "mapped as a whole" in str(error), error
            """
        )

    def test_faults_in_every_call_of_allocations(self):
        run(
            """
            import ctypes, cuvmm
            fail = ctypes.CDLL("libcuda.so.1").fakecuda_fail
            cuvmm.configure(limit="64MiB")
            cuvmm.empty(1)
            for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"):
                for nth in (1, 2, 3):
                    assert fail(f"{call}:{nth}:UNKNOWN".encode()) == 0
                    for _ in range(4):
                        try:
                            arrays = [cuvmm.empty(size * MIB) for size in (3, 9, 5)]
                        except cuvmm.Error:
                            pass
                        arrays = None
                        cuvmm.empty_cache()
                    assert fail(None) == 0
            cuvmm.empty_cache()
            stats = cuvmm.stats()
            assert (stats.live, stats.held, stats.quarantined) == (0, 0, 0), stats
            """
        )

    def test_queries_while_threads_free(self):
        run(
            """
            import threading, cuvmm
            ended = threading.Event()

            def work(number):
                for step in range(200):
                    cuvmm.empty(1 + (number + step) % 7 * (1 << 20))

            def ask():
                while not ended.is_set():
                    stats = cuvmm.stats()
                    assert stats.live <= stats.held, stats
                    str(stats)

            asks = threading.Thread(target=ask)
            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            asks.start()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            ended.set()
            asks.join()
            assert cuvmm.stats().live == 0
            """
        )
