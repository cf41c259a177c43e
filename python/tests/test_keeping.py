"""What pools keep and give back, with a stand-in for PyTorch, over the stand-in for libcuda."""

import unittest

import test_torch
from support import frame, needs_stand_in

BEGIN = """
import threading
from device import fill, libcuda, shows

def made(name, *sizes, **how):
    with cuvmm.torch.pool(name, **how):
        found = [torch.empty(size) for size in sizes]
    return found if len(found) > 1 else found[0]

def held(name):
    return sum(it["bytes"] for it in cuvmm.stats().all["pools"] if it["name"] == name)
"""


check = frame(test_torch.BEGIN + BEGIN, fakes=True)


@needs_stand_in
class Trim(unittest.TestCase):
    def test_free_segments_go_back_and_live_tensors_keep_theirs(self):
        check(
            """
            live, large = made("a", 20 * MIB, 150 * MIB)
            fill(live, 7)
            large.free()
            assert held("a") == 170 * MIB, "PyTorch keeps it"
            refused(torch.cuda.OutOfMemoryError, lambda: made("a", 200 * MIB), "Tried to allocate",
                "cuvmm.trim('a')", "cuvmm.torch.pool('a', trim=True)")
            assert cuvmm.trim("a") == 150 * MIB
            assert (held("a"), cuvmm.stats().held) == (20 * MIB, 20 * MIB)
            larger = made("a", 200 * MIB)
            assert shows(live, 7)
            assert torch.cuda.MemPool.made == 2
            assert cuvmm.trim("a") == 0
            """
        )

    def test_a_block_that_trims_serves_requests_that_grow(self):
        check(
            """
            live = made("a", 20 * MIB)
            fill(live, 9)
            for number in range(60):
                with cuvmm.torch.pool("a", trim=True):
                    request = torch.empty((120 + number) * MIB)
                    assert held("a") == (140 + number) * MIB
                    fill(request, number)
                request.free()
            assert shows(live, 9)
            refused(torch.cuda.OutOfMemoryError, lambda: made("a", 181 * MIB), "trim")
            """
        )

    def test_a_segment_goes_back_after_its_last_tensor(self):
        for again in ('cuvmm.trim("a")', 'made("a", trim=True)', "torch.cuda.empty_cache()"):
            check(
                f"""
                torch.cuda.init()
                live, other = made("a", 20 * MIB, 30 * MIB)
                other.free()
                assert cuvmm.trim("a") == 30 * MIB
                torch._C.native_reserve(8 * MIB)
                live.free()
                assert held("a") == 20 * MIB, "the pool that was dropped has it"
                {again.replace('made("a", trim=True)', 'cuvmm.torch.pool("a", trim=True).__enter__()')}
                assert held("a") == 0
                # A block that is entered leaves memory outside of pools where it is.
                assert len(torch._C.native_cache) == ("trim=True" in {again!r})
                from cuvmm.torch import _pools
                cuvmm.trim("a") if not torch.cuda.memory.entered else None
                assert torch.cuda.memory.entered or not _pools._left["a", 0]
                """
            )

    def test_inside_of_blocks(self):
        check(
            """
            free = made("a", 30 * MIB)
            free.free()
            with cuvmm.torch.pool("a"):
                with cuvmm.torch.pool("b"):
                    assert cuvmm.trim("a") == 0, "the outer block uses it"
                    (entered,) = torch.cuda.memory.entered
                    kept = torch.empty(4 * MIB)
                    with cuvmm.torch.pool("c", trim=True):
                        pass
                    assert torch.cuda.memory.entered == [entered]
            assert (held("a"), held("b")) == (30 * MIB, 4 * MIB)
            assert cuvmm.trim("a") == 30 * MIB
            """
        )

    def test_another_thread_inside_of_a_pool(self):
        check(
            """
            free = made("a", 30 * MIB)
            free.free()
            inside, end = threading.Event(), threading.Event()

            def other():
                with cuvmm.torch.pool("b"):
                    inside.set()
                    end.wait()

            thread = threading.Thread(target=other)
            thread.start()
            inside.wait()
            refused(cuvmm.Error, lambda: cuvmm.trim("a"), "'a'", "another thread", "device 0")
            with cuvmm.torch.pool("a", trim=True):
                pass
            assert held("a") == 30 * MIB
            end.set()
            thread.join()
            assert cuvmm.trim("a") == 30 * MIB
            """
        )

    def test_many_threads_enter_leave_and_trim(self):
        check(
            """
            import sys
            sys.setswitchinterval(1e-6)
            failed = []

            def run(name):
                try:
                    for _ in range(60):
                        with cuvmm.torch.pool(name, trim=True), cuvmm.torch.pool("common"):
                            pass
                        try:
                            cuvmm.trim(name)
                        except cuvmm.Error as error:
                            assert "another thread" in str(error), error
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=run, args=(name,)) for name in "abcd"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failed, failed
            assert not torch.cuda.memory.entered
            """
        )

    def test_a_block_that_the_garbage_collector_ends_while_pools_are_dropped(self):
        check(
            """
            import gc

            class Abandoned:
                def __init__(self):
                    self.block, self.cycle = cuvmm.torch.pool("inner"), self
                    self.block.__enter__()

            original = torch.cuda.MemPool.__del__

            def collecting(self):
                gc.collect()
                original(self)

            gc.disable()
            free = made("a", 30 * MIB)
            free.free()
            with cuvmm.torch.pool("outer"):
                Abandoned()
                torch.cuda.MemPool.__del__ = collecting
                # The end of the inner block would enter the outer one again.
                assert cuvmm.trim("a") == 30 * MIB
                torch.cuda.MemPool.__del__ = original
                (entered,) = torch.cuda.memory.entered
                tensor = torch.empty(4 * MIB)
            assert not torch.cuda.memory.entered
            assert held("outer") == 4 * MIB
            """
        )

    def test_ordinary_memory_inside_of_a_pool(self):
        check(
            """
            from cuvmm.torch import _pools
            with cuvmm.torch.pool("a"):
                for _ in range(2):
                    with _pools.ordinary(0):
                        kept, free = torch.empty(4 * MIB), torch.empty(2 * MIB)
                    free.free()
                    assert [it for it in torch.cuda.memory.entered if it.device == 0]
                    kept.free()
                tensor = torch.empty(6 * MIB)
            assert held("a") == 6 * MIB
            # Pools of PyTorch's own memory are dropped as they are left, and what was left goes back.
            with _pools.ordinary(0):
                pass
            assert len(torch.cuda.memory.privates) == 1, torch.cuda.memory.privates
            """
        )

    def test_refused(self):
        check(
            """
            refused(cuvmm.Error, lambda: cuvmm.trim("a"), "no memory was allocated", "'a'")
            refused(TypeError, lambda: cuvmm.trim(3), "name of a pool")
            refused(ValueError, lambda: cuvmm.trim(""), "name of a pool")
            free = made("a", 30 * MIB)
            free.free()
            torch.cuda.capturing = True
            refused(cuvmm.Error, lambda: cuvmm.trim("a"), "captured")
            torch.cuda.capturing = False
            torch._C._MemPoolContext = object
            refused(cuvmm.Error, lambda: cuvmm.trim("a"), "PyTorch 2.8")
            assert held("a") == 30 * MIB
            del torch._C._MemPoolContext
            cuvmm.sleep("a", keep=False)
            assert cuvmm.trim("a") == 0, "asleep, it has given its memory up"
            assert held("a") == 0 and cuvmm.stats().sleeping == 0
            cuvmm.wake("a")
            with cuvmm.torch.pool("entered only"):
                pass
            assert cuvmm.trim("entered only") == 0
            """
        )

    def test_under_install(self):
        check(
            """
            cuvmm.torch.install()
            tensor, other = made("a", 30 * MIB, 20 * MIB)
            tensor.free()
            with cuvmm.torch.pool("a", trim=True):
                pass
            assert cuvmm.trim("a") == 30 * MIB
            assert held("a") == 20 * MIB
            """
        )


@needs_stand_in
class Keep(unittest.TestCase):
    def test_marked_tensors_are_kept(self):
        for begin in ("", "cuvmm.torch.install()"):
            check(
                f"""
                {begin}
                first, second, small, other = made("a", 4 * MIB, 5 * MIB, 600, 700)
                for number, tensor in enumerate((first, second, small, other), 1):
                    fill(tensor, number)
                assert cuvmm.keep(second) is second and cuvmm.keep(small) is small
                assert cuvmm.stats().kept == 5 * MIB + 600, cuvmm.stats().kept
                (pool,) = cuvmm.stats().all["pools"]
                assert pool["kept"] == 5 * MIB + 600
                for _ in range(2):
                    assert cuvmm.sleep("a", keep=False).given
                    assert cuvmm.stats().kept == 5 * MIB + 600, "asleep too"
                    taken = cuvmm.empty(220 * MIB)
                    fill_all = libcuda.cuMemsetD8_v2(taken.address, 0xEE, 220 * MIB)
                    assert fill_all == 0
                    del taken
                    cuvmm.wake("a")
                    assert shows(second, 2) and shows(small, 3)
                    assert not shows(first, 1) and not shows(other, 4)
                # Marked again, a tensor has one mark. A mark ends once.
                cuvmm.keep(second)
                cuvmm.keep(second, kept=False)
                cuvmm.keep(second, kept=False)
                assert cuvmm.stats().kept == 600
                fill(second, 5)
                cuvmm.sleep("a")
                cuvmm.wake("a")
                assert shows(second, 5) and shows(small, 3), "kept with and without marks"
                """
            )

    def test_a_mark_ends_with_the_memory(self):
        for begin in ("", "cuvmm.torch.install()"):
            check(
                f"""
                {begin}
                tensor, other = made("a", 4 * MIB, 600)
                cuvmm.keep(tensor), cuvmm.keep(other)
                tensor.free()
                assert cuvmm.stats().kept == 600
                other.free()
                assert cuvmm.stats().kept == 0
                # PyTorch gives the memory to the next tensor, which is another one.
                again = made("a", 4 * MIB)
                assert not cuvmm._keeping.is_kept(again) and cuvmm.stats().kept == 0
                cuvmm.keep(again)
                assert cuvmm.stats().kept == 4 * MIB
                """
            )

    def test_a_storage_that_ends_late_ends_its_own_mark_only(self):
        check(
            """
            tensor = made("a", 4 * MIB)
            cuvmm.keep(tensor)
            late = tensor.storage
            tensor.free()
            again = made("a", 4 * MIB)
            assert again.address == tensor.address and not cuvmm._keeping.is_kept(again)
            cuvmm.keep(again)
            del late
            assert cuvmm._keeping.is_kept(again) and cuvmm.stats().kept == 4 * MIB
            fill(again, 6)
            cuvmm.sleep("a", keep=False)
            cuvmm.wake("a")
            assert shows(again, 6)
            """
        )

    def test_a_view_marks_its_storage(self):
        check(
            """
            memory = made("a", 4 * MIB)
            view = torch.Tensor(memory.address + 64, (4,), torch.float32, torch.device("cuda", 0), memory)
            assert cuvmm.keep(view) is view
            assert cuvmm.stats().kept == 4 * MIB and cuvmm._keeping.is_kept(memory)
            """
        )

    def test_refused(self):
        check(
            """
            outside = tensor_of(cuvmm.empty(4 * MIB))
            refused(cuvmm.Error, lambda: cuvmm.keep(outside), "no pool has the memory")
            host = torch.empty((4,), torch.float32)
            refused(cuvmm.Error, lambda: cuvmm.keep(host), "no pool has the memory")
            refused(TypeError, lambda: cuvmm.keep(3), "int")
            empty = torch.empty((0,), torch.float32)
            assert cuvmm.keep(empty) is empty and not cuvmm._keeping.is_kept(empty)
            tensor = made("a", 4 * MIB)
            cuvmm.sleep("a", keep=False)
            refused(cuvmm.Error, lambda: cuvmm.keep(tensor), "asleep")
            cuvmm.wake("a")
            cuvmm.keep(tensor)
            cuvmm.limit_host("2MiB")
            refused(cuvmm.OutOfMemoryError, lambda: cuvmm.sleep("a", keep=False), "cannot keep 4 MiB")
            assert not cuvmm.asleep()
            cuvmm.keep(tensor, kept=False)
            cuvmm.sleep("a", keep=False)
            """
        )

    def test_lost_buffers(self):
        check(
            """
            class Module:
                def __init__(self, buffers, lost=(), **parts):
                    self._buffers, self._non_persistent_buffers_set = buffers, set(lost)
                    self.parts = parts
                def named_modules(self, prefix=""):
                    yield prefix, self
                    for name, part in self.parts.items():
                        yield from part.named_modules(f"{prefix}.{name}" if prefix else name)

            place = lambda memory: torch.Tensor(
                memory.address, (4,), torch.float32, torch.device("cuda", 0), memory)
            tensors = [place(it) for it in made("a", 4 * MIB, 600, 700, 800)]
            elsewhere = place(made("b", 900))
            inner = Module({"frequencies": tensors[1], "mask": elsewhere, "none": None, "host":
                torch.empty((4,), torch.float32), "saved": tensors[3]}, ["frequencies", "mask", "none", "host"])
            module = Module({"own": tensors[2], "saved": tensors[0]}, ["own"], rotary=inner)
            lost = cuvmm.torch.lost_buffers
            assert lost(module, "a") == ["own", "rotary.frequencies"], lost(module, "a")
            assert lost(module, "b") == ["rotary.mask"]
            cuvmm.keep(tensors[1])
            assert lost(module, "a") == ["own"]
            cuvmm.keep(tensors[2])
            cuvmm.sleep("a", keep=False)
            assert lost(module, "a") == []
            refused(cuvmm.Error, lambda: lost(module, "c"), "no memory was allocated", "'c'")
            refused(TypeError, lambda: lost(3, "a"), "int")
            """
        )


@needs_stand_in
class Workers(unittest.TestCase):
    def test_a_worker_runs_its_backward_passes_itself(self):
        for begin in ("", "cuvmm.torch.install()"):
            check(
                f"""
                {begin}
                enabled = torch._C._is_multithreading_enabled
                seen = []

                def work(name):
                    with cuvmm.torch.worker(name):
                        assert not enabled()
                        with cuvmm.torch.worker(name), cuvmm.torch.pool("other"):
                            assert not enabled()
                        assert not enabled()
                        seen.append(torch.empty(4 * MIB))
                    assert enabled()

                for name in "ab":
                    thread = threading.Thread(target=work, args=(name,))
                    thread.start()
                    thread.join()
                assert enabled() and held("a") == held("b") == 4 * MIB
                torch._C._set_multithreading_enabled(False)
                work_inside = cuvmm.torch.worker("a", trim=True)
                with work_inside:
                    pass
                assert not enabled(), "as it was"
                """
            )

    def test_a_worker_that_another_thread_ends(self):
        check(
            """
            abandoned, steps = [], [threading.Event(), threading.Event()]
            enabled = torch._C._is_multithreading_enabled

            def enter():
                abandoned.append(cuvmm.torch.worker("a"))
                abandoned[0].__enter__()
                steps[0].set()
                steps[1].wait()
                with cuvmm.torch.worker("a"):
                    assert not enabled()
                abandoned.append(enabled())

            thread = threading.Thread(target=enter)
            thread.start()
            steps[0].wait()
            abandoned.clear()
            assert enabled(), "this thread's own"
            steps[1].set()
            thread.join()
            assert abandoned == [True], "the next block sets it back"
            """
        )


@needs_stand_in
class Timeouts(unittest.TestCase):
    def test_wrong_ones(self):
        check(
            """
            tensor = made("a", 4 * MIB)
            for wrong, kind in [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError),
                    (None, TypeError), (True, TypeError)]:
                refused(kind, lambda: cuvmm.sleep("a", timeout=wrong), "timeout")
                refused(kind, lambda: cuvmm.wake("a", timeout=wrong), "timeout")
            assert not cuvmm.asleep()
            library = cuvmm._library.get()
            for wrong in (-1.0, float("nan")):
                assert library.sleep_within(b"null", 1, wrong) == -1
                assert "timeout" in library.reason()
                assert library.wake_within(b"null", wrong) == -1
            cuvmm.sleep("a", timeout=float("inf"))
            cuvmm.wake("a", timeout=1e300)
            """
        )

    def test_without_a_wait(self):
        check(
            """
            cuvmm.configure(limit="64MiB")
            tensor = made("a", 40 * MIB)
            cuvmm.sleep("a", timeout=0)
            other = cuvmm.empty(40 * MIB)
            refused(cuvmm.OutOfMemoryError, lambda: cuvmm.wake("a", timeout=0), "cannot wake 40 MiB")
            assert cuvmm.asleep() == {"a"}
            del other
            cuvmm.wake("a", timeout=0)
            """
        )
