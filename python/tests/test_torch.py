"""`cuvmm.torch` with a stand-in for PyTorch, over the stand-in for libcuda."""

import textwrap
import unittest

from support import frame, needs_stand_in

BEGIN = """
import os
import warnings
import torch
import cuvmm
import cuvmm.torch

def tensor_of(memory):
    return torch.Tensor(
        memory.address, (4,), torch.float32, torch.device("cuda", 0), memory)
"""


case = frame(BEGIN, fakes=True)


@needs_stand_in
class Install(unittest.TestCase):
    def test_figures_and_hooks(self):
        case(
            """
            assert not cuvmm.torch.is_installed()
            cuvmm.torch.install(limit="128MiB", tenant="mine")
            assert cuvmm.torch.is_installed()
            assert len(torch._C.current.hooks) == 7, torch._C.current.hooks
            stats = torch.cuda.memory_stats()
            assert stats["allocated_bytes.all.peak"] == 0 and stats["max_split_size"] == -1
            tensor = torch.empty(5 << 20)
            assert torch.cuda.memory_stats()["requested_bytes.all.current"] == 5 << 20
            assert torch.cuda.memory_reserved() == cuvmm.stats().held
            free, total = torch.cuda.mem_get_info()
            assert total == 128 << 20 and 0 < free < total, (free, total)
            segments = torch.cuda.memory_snapshot()
            assert sum(it["total_size"] for it in segments) == cuvmm.stats().held
            tensor.free()
            torch.cuda.reset_peak_memory_stats()
            assert torch.cuda.max_memory_allocated() == 0
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == 0
            torch._C._cuda_setMemoryFraction(0.25, 0)
            assert cuvmm.stats().limit == 64 << 20
            assert torch._C._cuda_getMemoryFraction(0) == 0.25
            """
        )

    def test_figures_of_the_accelerator(self):
        case(
            """
            cuvmm.torch.install(limit="128MiB")
            assert torch.accelerator.memory_stats() == {}
            tensor = torch.empty(5 << 20)
            assert torch.accelerator.memory_allocated() == 5 << 20
            assert torch.accelerator.memory_reserved() == cuvmm.stats().held
            assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
            tensor.free()
            assert torch.accelerator.max_memory_allocated() == 5 << 20
            torch.accelerator.reset_peak_memory_stats()
            assert torch.accelerator.max_memory_allocated() == 0
            torch.accelerator.empty_cache()
            assert torch.accelerator.memory_reserved() == 0
            """
        )

    def test_what_is_put_into_pytorch_is_like_what_was_there(self):
        """`torch._dynamo` keeps PyTorch's functions as keys, by which it finds one rule for each."""
        case(
            """
            import copy, inspect, pickle, types
            owners = [torch._C, torch.cuda, torch.cuda.memory, torch.UntypedStorage,
                torch._C.StorageBase, torch.cuda.MemPool, torch.accelerator]
            functions = lambda: {(owner, name): getattr(owner, name) for owner in owners
                for name in dir(owner) if callable(getattr(owner, name))
                if name == "__init__" or not name.startswith("__")}
            before = functions()
            cuvmm.torch.install()
            after = functions()
            assert before.keys() == after.keys()
            new = {key: it for key, it in after.items() if it is not before[key]}
            names = {name for _, name in new}
            assert {"_cuda_memoryStats", "_cuda_resetPeakMemoryStats", "_cuda_getMemoryFraction",
                "_accelerator_resetPeakStats", "_cuda_record_memory_history", "mem_get_info",
                "_share_cuda_", "_new_shared_cuda", "_set_cudnn_benchmark"} <= names, names
            places = {}
            for (owner, name), function in new.items():
                assert isinstance(function, types.FunctionType), name
                places.setdefault(function, set()).add(name)
                assert function.__name__ == name, (function, name)
                assert copy.deepcopy(function) is function
                inspect.signature(function)
                assert pickle.loads(pickle.dumps(function)) is function, name
            assert all(len(found) == 1 for found in places.values()), places
            parameters = inspect.signature(torch.cuda.mem_get_info).parameters
            assert list(parameters) == ["device"], parameters
            assert "headroom" in torch.cuda.mem_get_info.__doc__
            """
        )

    def test_warnings_name_the_program(self):
        case(
            """
            torch._C._set_cudnn_benchmark(True)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                cuvmm.torch.install()
                torch.backends.cudnn.benchmark = True
                torch._C._set_cudnn_benchmark(True)
            assert [it.filename for it in found] == ["<string>"] * 3, [str(it) for it in found]
            """
        )

    def test_refused_when_it_is_too_late(self):
        case(
            """
            refused(ValueError, lambda: cuvmm.torch.install(limit="much"), "much")
            assert not cuvmm.torch.is_installed() and torch._C.current is None
            torch.cuda.init()
            refused(RuntimeError, cuvmm.torch.install, "cuvmm", "has started CUDA")
            """
        )
        case(
            """
            other = torch.cuda.memory.CUDAPluggableAllocator(
                cuvmm.library_path(), "cuvmm_malloc", "cuvmm_free")
            torch.cuda.memory.change_current_allocator(other)
            refused(RuntimeError, cuvmm.torch.install, "another allocator")
            """
        )
        case(
            """
            cuvmm.torch.install()
            refused(RuntimeError, cuvmm.torch.install, "already")
            """
        )
        case(
            """
            torch.version.cuda = None
            refused(RuntimeError, cuvmm.torch.install, "built without CUDA")
            """
        )

    def test_wrong_settings_change_nothing(self):
        case(
            """
            for kind, text, wrong in [
                (ValueError, "-5", {"limit": -5}),
                (ValueError, "at least one byte", {"limit": 0}),
                (ValueError, "not a size", {"limit": "-1GiB"}),
                (ValueError, "no memory has", {"limit": 1 << 70}),
                (ValueError, "no memory has", {"limit": "99999999999999.5TiB"}),
                (TypeError, "1.5", {"limit": 1.5}),
                (ValueError, "'tight' or 'fast'", {"preset": "slow"}),
                (ValueError, "tenant", {"tenant": ""}),
                (ValueError, "tenant", {"tenant": "a\\nb"}),
                (ValueError, "tenant", {"tenant": "a\\0b"}),
                (TypeError, "tenant", {"tenant": 3}),
                (ValueError, "ledger", {"ledger": ""}),
                (TypeError, "int", {"ledger": 3}),
                (cuvmm.Error, "must be given with `ledger`", {"ledger_limit": "1GiB"}),
                (cuvmm.Error, "must be given with `ledger`", {"guarantee": "1GiB"}),
                (cuvmm.Error, "must be given with `ledger`", {"priority": 1}),
                (TypeError, "whole number", {"ledger": "/nowhere", "priority": 1.5}),
                (ValueError, "32 bits", {"ledger": "/nowhere", "priority": 1 << 31}),
                (ValueError, "not a size", {"ledger": "/nowhere", "ledger_limit": "all"}),
                (ValueError, "twice", {"peers": [1, 0, 1]}),
                (TypeError, "aliases", {"aliases": "off"}),
                (TypeError, "stream_waits", {"stream_waits": 0}),
                (ValueError, "rdma is 'auto', True or False, not 1", {"rdma": 1.0}),
                (ValueError, "rdma is 'auto', True or False, not 'on'", {"rdma": "on"}),
                (ValueError, "rdma is 'auto', True or False, not []", {"rdma": []}),
            ]:
                refused(kind, lambda: cuvmm.torch.install(**wrong), text)
                refused(kind, lambda: cuvmm.configure(**wrong), text)
            assert not cuvmm.torch.is_installed() and torch._C.current is None
            # None of these settings was taken over.
            assert cuvmm.empty(1) and cuvmm.stats().limit > 128 << 20
            """
        )

    def test_settings_that_were_made_before_stay(self):
        case(
            """
            import tempfile
            with tempfile.TemporaryDirectory() as folder:
                cuvmm.configure(limit="64MiB", ledger=folder, preset="fast")
                cuvmm.configure(ledger_limit="96MiB", tenant="first")
                cuvmm.torch.install(tenant="mine")
                tensor = torch.empty(4 << 20)
                assert cuvmm.stats().limit == 64 << 20, cuvmm.stats().limit
                refused(cuvmm.OutOfMemoryError, lambda: cuvmm.empty(128 << 20), "mine")
                assert os.listdir(folder), "the ledger is not there"
                tensor.free()
            """
        )

    def test_a_limit_above_the_device_s_memory(self):
        case(
            """
            cuvmm.torch.install(limit="1TiB", tenant="Größe ✓ 模型")
            for _ in range(2):
                refused(cuvmm.Error, lambda: cuvmm.empty(1), "limit is 1 TiB", "to 256 MiB")
            """
        )

    def test_what_cannot_work_says_so(self):
        case(
            """
            cuvmm.torch.install()
            storage = torch.UntypedStorage()
            for call, text in [
                (storage._share_cuda_, "other processes"),
                (lambda: torch.UntypedStorage._new_shared_cuda(1), "other processes"),
                (lambda: torch._C._cuda_getCheckpointState(0, (0, 1)), "reduce-overhead"),
                (lambda: torch.cuda.MemPool(), "cuvmm.torch.pool"),
            ]:
                refused(RuntimeError, call, "cuvmm", text)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                torch.backends.cudnn.benchmark = True
                torch._C._set_cudnn_benchmark(True)
                torch.backends.cudnn.benchmark = False
            assert len(found) == 2 and "cuvmm" in str(found[0].message), found
            assert torch.backends.cudnn.benchmark is False
            """
        )


@needs_stand_in
class Pools(unittest.TestCase):
    def test_without_install(self):
        case(
            """
            with cuvmm.torch.pool("weights"):
                tensor = torch.empty(4 << 20)
                with cuvmm.torch.pool("cache"):
                    other = torch.empty(2 << 20)
            with cuvmm.torch.pool("weights"):
                pass
            assert torch.cuda.MemPool.made == 2
            held = cuvmm.stats().all
            cuvmm.sleep("weights")
            assert cuvmm.asleep() == {"weights"}
            refused(cuvmm.Error, lambda: cuvmm.sleep("weights"), "weights")
            refused(cuvmm.Error, lambda: cuvmm.sleep("unknown"), "unknown")
            refused(cuvmm.Error, lambda: cuvmm.wake("cache"), "cache")
            refused(cuvmm.Error, lambda: cuvmm.torch.pool("weights").__enter__(), "asleep")
            cuvmm.wake("weights")
            cuvmm.sleep(keep=False)
            assert cuvmm.asleep() == {"weights", "cache"}
            cuvmm.wake()
            assert not cuvmm.asleep()
            tensor.free()
            other.free()
            """
        )

    def test_pools_change_places(self):
        case(
            """
            with cuvmm.torch.pool("chat"):
                chat = torch.empty(4 << 20)
            cuvmm.sleep("chat")
            with cuvmm.torch.pool("code"):
                code = torch.empty(4 << 20)
            slept = cuvmm.exchange("code", "chat")
            assert slept.given == {"code": 4 << 20} and "code" not in slept.held, slept
            assert cuvmm.asleep() == {"code"}
            cuvmm.exchange(sleep=["chat"], wake=["code"], host="release")
            assert cuvmm.asleep() == {"chat"}
            refused(cuvmm.Error, lambda: cuvmm.exchange("chat", "code"), "asleep")
            refused(cuvmm.Error, lambda: cuvmm.exchange("code", "unknown"), "unknown")
            refused(ValueError, lambda: cuvmm.exchange("code", []), "at least one tag")
            refused(ValueError, lambda: cuvmm.exchange("code", "chat", host="drop"), "'keep' or 'release'")
            refused(TypeError, lambda: cuvmm.exchange(3, "chat"))
            assert cuvmm.asleep() == {"chat"}
            cuvmm.wake()
            chat.free()
            code.free()
            """
        )

    def test_host_memory_of_pools(self):
        case(
            """
            with cuvmm.torch.pool("weights"):
                weights = torch.empty(5 << 20)
            host = lambda: cuvmm.stats().host // MIB
            assert host() == 0
            cuvmm.prepare("weights")
            assert host() == 6, host()
            cuvmm.sleep("weights")
            assert cuvmm.release_host() == 0 and host() == 6, "it has contents"
            cuvmm.wake("weights")
            assert host() == 6, "kept for the next time"
            assert cuvmm.release_host("weights") == 6 * MIB and host() == 0
            cuvmm.limit_host("4MiB")
            refused(cuvmm.OutOfMemoryError, lambda: cuvmm.sleep("weights"), "cannot keep 5 MiB: 4 MiB of")
            refused(cuvmm.Error, lambda: cuvmm.prepare("weights"), "cannot keep")
            assert not cuvmm.asleep()
            cuvmm.limit_host(None)
            cuvmm.sleep("weights", host="release")
            assert host() == 6
            cuvmm.wake("weights")
            while host() > 0:
                pass
            refused(ValueError, lambda: cuvmm.sleep("weights", host="drop"), "'keep' or 'release'")
            refused(ValueError, lambda: cuvmm.limit_host(0))
            refused(TypeError, lambda: cuvmm.limit_host(1.5))
            refused(cuvmm.Error, lambda: cuvmm.prepare("unknown"), "unknown")
            refused(cuvmm.Error, lambda: cuvmm.release_host("unknown"), "unknown")
            refused(TypeError, lambda: cuvmm.release_host(3))
            cuvmm.sleep("weights", keep=False, host="release")
            cuvmm.wake("weights")
            weights.free()
            """
        )

    def test_which_tags_are_asleep_is_asked_of_the_library(self):
        case(
            """
            from cuvmm import _library
            made = []
            for name in ("a", "b"):
                with cuvmm.torch.pool(name):
                    made.append(torch.empty(4 << 20))
            assert not cuvmm.asleep()
            assert _library.get().sleep(b'["a"]', 1) == 0
            assert cuvmm.asleep() == {"a"}
            refused(cuvmm.Error, lambda: cuvmm.sleep(["a", "b"]), "asleep")
            assert cuvmm.asleep() == {"a"}, cuvmm.asleep()
            cuvmm.sleep("b")
            assert _library.get().wake(b'["a"]') == 0
            refused(cuvmm.Error, lambda: cuvmm.wake(["a", "b"]), "awake")
            assert cuvmm.asleep() == {"b"}, cuvmm.asleep()
            with cuvmm.torch.pool("a"):
                pass
            cuvmm.wake("b")
            refused(cuvmm.Error, lambda: cuvmm.wake("unknown"), "unknown")
            assert not cuvmm.asleep()
            for tensor in made:
                tensor.free()
            """
        )

    def test_names(self):
        case(
            """
            enter = lambda name: cuvmm.torch.pool(name).__enter__()
            refused(TypeError, lambda: enter(3), "name of a pool", "3")
            for name in ("", "a\\0b"):
                refused(ValueError, lambda: enter(name), "name of a pool")
            refused(ValueError, lambda: cuvmm.sleep([]), "at least one tag")
            for wrong in ([3], b"a", 3):
                refused(TypeError, lambda: cuvmm.sleep(wrong))
                refused(TypeError, lambda: cuvmm.wake(wrong))
            with cuvmm.torch.pool("Gewichte für Größeres"):
                tensor = torch.empty(4 << 20)
            cuvmm.sleep("Gewichte für Größeres")
            cuvmm.wake()
            tensor.free()
            """
        )

    def test_peers(self):
        case(
            """
            for peers in ([1, 1], [64], [-1], "01", [1.5], 1):
                refused((TypeError, ValueError), lambda: cuvmm.torch.install(peers=peers))
            assert not cuvmm.torch.is_installed() and torch._C.current is None
            cuvmm.torch.install(peers=range(2))
            kept = torch.empty(1 << 20)
            cuvmm.torch.check_access(tensor_of(kept), "cuda:1")
            assert cuvmm.stats().live == 1 << 20
            kept.free()
            """
        )

    def test_peers_use_the_memory_of_pools(self):
        """Device 1 writes to memory of device 0, before and after it has slept."""
        code = """
            import ctypes
            from device import libcuda, shows

            def enter(device):
                context = ctypes.c_void_p()
                assert libcuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
                assert libcuda.cuCtxSetCurrent(context) == 0

            def write(byte):
                enter(1)
                code = libcuda.cuMemsetD8_v2(tensor.address, byte, 4 << 20)
                enter(0)
                return code

            BEGIN
            with cuvmm.torch.pool("weights"):
                tensor, small = torch.empty(4 << 20), torch.empty(512)
            for it in (tensor, small):
                cuvmm.torch.check_access(tensor_of(it), 1)
            for keep in (True, False):
                assert write(7) == 0
                cuvmm.sleep("weights", keep=keep)
                assert write(8) != 0
                cuvmm.wake("weights")
                for it in (tensor, small):
                    cuvmm.torch.check_access(tensor_of(it), 1)
                assert not keep or shows(tensor, 7)
            assert write(9) == 0
            """
        for begin in ("install", "configure"):
            module = "cuvmm.torch" if begin == "install" else "cuvmm"
            case(code.replace("BEGIN", f"{module}.{begin}(peers=[0, 1])"))

    def test_a_device_that_is_no_peer_has_no_access(self):
        case(
            """
            cuvmm.torch.install(peers=[0])
            with cuvmm.torch.pool("weights"):
                tensor = torch.empty(4 << 20)
            refused(cuvmm.Error, lambda: cuvmm.torch.check_access(tensor_of(tensor), 1),
                "device 1 has no access to this tensor of device 0", "peers=[0, 1]")
            for device, kind in [(2, ValueError), (64, ValueError), (-1, ValueError),
                    ("cpu", ValueError), (None, TypeError)]:
                refused(kind, lambda: cuvmm.torch.check_access(tensor_of(tensor), device), "device")
            """
        )

    def test_access(self):
        case(
            """
            array = cuvmm.empty((4,), "float32")
            place = torch.device("cuda", 0)
            tensor = tensor_of(array)
            check = cuvmm.torch.check_access
            check(tensor, 0)
            refused(cuvmm.Error, lambda: check(tensor, torch.device("cuda", 1)),
                "device 1 has no access to this tensor of device 0", "peers=[0, 1]", "cuda:1")
            with cuvmm.torch.pool("a"):
                pooled = torch.empty(4 << 20)
            refused(cuvmm.Error, lambda: check(tensor_of(pooled), 1), "cuvmm.torch.pool")
            # Memory of which the driver says nothing is PyTorch's own.
            check(torch.Tensor(1 << 40, (4,), torch.float32, place, None), 1)
            check(torch.empty((0,), dtype=torch.float32, device="cuda:0"), 1)
            refused(ValueError, lambda: check(torch.empty((1,), torch.float32), 1), "on cpu")
            """
        )

    def test_nested_and_in_threads(self):
        case(
            """
            import threading
            entered = torch.cuda.memory.entered

            def inner(outer):
                with cuvmm.torch.pool("a"):
                    assert len(entered) == outer + 1
                    with cuvmm.torch.pool("b"), cuvmm.torch.pool("a"):
                        assert len(entered) == outer + 1
                        try:
                            with cuvmm.torch.pool("c"):
                                raise KeyError
                        except KeyError:
                            pass
                        assert len(entered) == outer + 1
                    assert len(entered) == outer + 1
                assert len(entered) == outer

            inner(0)
            made = torch.cuda.MemPool.made
            inner(0)
            assert torch.cuda.MemPool.made == made, "pools are used again"
            with cuvmm.torch.pool("a"):
                thread = threading.Thread(target=inner, args=(1,))
                thread.start()
                thread.join()
                assert len(entered) == 1
            assert torch.cuda.MemPool.made == made + 1
            """
        )

    def test_a_block_that_another_thread_ends(self):
        case(
            """
            import threading
            cuvmm.torch.install()
            abandoned = []

            def enter():
                abandoned.append(cuvmm.torch.pool("a"))
                abandoned[0].__enter__()

            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            with cuvmm.torch.pool("b"):
                abandoned.clear()
                tensor = torch.empty(4 << 20)
            assert torch.empty(4 << 20).address
            cuvmm.sleep("b")
            assert cuvmm.asleep() == {"b"}
            """
        )

    def test_blocks_end_in_any_order(self):
        """Generators and tasks of one thread interleave their blocks."""
        code = """
            BEGIN
            def enter(name):
                with cuvmm.torch.pool(name):
                    yield

            def made(tag):
                tensor = torch.empty(4 << 20)
                kept.append(tensor)
                owners = {it["name"]: it["bytes"] for it in cuvmm.stats().all["pools"]}
                before = counted.get(tag, 0)
                counted[tag] = owners.get(tag, 0)
                assert counted[tag] == before + (4 << 20), (tag, owners)

            kept, counted = [], {}
            first, second, third = enter("a"), enter("b"), enter("c")
            next(first), made("a")
            next(second), made("b")
            next(third), made("c")
            second.close()
            made("c")
            third.close()
            made("a")
            next(enter_again := enter("b"))
            first.close()
            made("b")
            enter_again.close()
            assert not torch.cuda.memory.entered
            AFTER
            cuvmm.sleep("a", keep=False)
            assert cuvmm.asleep() == {"a"}
            cuvmm.wake("a")
            """
        after = "tensor = torch.empty(4 << 20); assert cuvmm.stats().live == (28 << 20) + 512"
        case(code.replace("BEGIN", "cuvmm.torch.install()").replace("AFTER", after))
        case(code.replace("BEGIN", "").replace("AFTER", ""))

    def test_a_block_that_the_garbage_collector_ends(self):
        """It may do so in each function that makes an object, in the thread that is in it."""
        case(
            """
            import gc
            from cuvmm import _library

            class Abandoned:
                def __init__(self, name):
                    self.block, self.cycle = cuvmm.torch.pool(name), self
                    self.block.__enter__()

            original = torch.cuda.MemPool.__init__

            def collecting(self, *arguments):
                gc.collect()
                original(self, *arguments)

            gc.disable()
            Abandoned("a")
            torch.cuda.MemPool.__init__ = collecting
            with cuvmm.torch.pool("b"):
                (entered,) = torch.cuda.memory.entered
                tensor = torch.empty(4 << 20)
            assert not torch.cuda.memory.entered
            cuvmm.sleep("b")
            with cuvmm.torch.pool("a"):
                assert torch.cuda.MemPool.made == 2, "the pool of the block is used again"
            """
        )

    def test_a_block_that_the_garbage_collector_ends_while_another_begins_or_ends(self):
        """PyTorch's functions make objects too, so each of their calls may end a block first, or last."""
        case(
            """
            import gc
            entered, original = torch.cuda.memory.entered, torch.cuda.use_mem_pool

            class Abandoned:
                def __init__(self, name):
                    self.block, self.cycle = cuvmm.torch.pool(name), self
                    self.block.__enter__()

            class Collecting:
                def __init__(self, *arguments):
                    self.context = self.then(lambda: original(*arguments))
                def __enter__(self):
                    self.then(self.context.__enter__)
                def __exit__(self, *raised):
                    self.then(lambda: self.context.__exit__(*raised))
                def then(self, act):
                    collect()
                    result = act()
                    collect()
                    return result

            def collect():
                moments.append(None)
                if len(moments) == when:
                    gc.collect()

            moments, when = [], 0
            torch.cuda.use_mem_pool = Collecting
            gc.disable()
            for moment in range(1, 25):
                with cuvmm.torch.pool("outer"):
                    before = list(entered)
                    Abandoned("a")
                    kept = cuvmm.torch.pool("kept")
                    kept.__enter__()
                    Abandoned("b")
                    moments, when = [], moment
                    with cuvmm.torch.pool("inner"):
                        assert len(entered) == 1 and entered != before, (moment, entered)
                    kept.__exit__(None, None, None)
                    moments, when = [], 0
                    gc.collect()
                    assert entered == before, (moment, entered)
                assert not entered, moment
            """
        )

    def test_a_block_that_another_thread_ends_without_install(self):
        case(
            """
            import threading
            steps = [threading.Event() for _ in range(4)]

            def enter():
                with cuvmm.torch.pool("a"):
                    block = cuvmm.torch.pool("b")
                    block.__enter__()
                    abandoned.append(block)
                    del block
                    steps[0].set()
                    steps[1].wait()
                    with cuvmm.torch.pool("c"):
                        assert len(torch.cuda.memory.entered) == 1
                    kept.append(torch.empty(4 << 20))
                assert not torch.cuda.memory.entered

            abandoned, kept = [], []
            thread = threading.Thread(target=enter)
            thread.start()
            steps[0].wait()
            abandoned.clear()
            assert not torch.cuda.memory.entered
            steps[1].set()
            thread.join()
            owners = {it["name"]: it["bytes"] for it in cuvmm.stats().all["pools"]}
            assert owners == {"a": 4 << 20}, owners
            """
        )

    def test_sleep_says_what_it_gave_up_and_what_is_held(self):
        case(
            """
            import threading
            torch.cuda.init()
            torch._C.native_pools = lambda device: sum(
                it["bytes"] for it in cuvmm.stats(device).all["pools"])
            with cuvmm.torch.pool("weights"):
                kept = [torch.empty(8 << 20)]
                # What another thread makes is not in the pool.
                torch._C.native_reserve(32 << 20)
            with cuvmm.torch.pool("cache"):
                kept.append(torch.empty(4 << 20))
            with cuvmm.torch.pool("other"):
                kept.append(torch.empty(6 << 20))
            slept = cuvmm.sleep("other")
            assert slept.given == {"other": 6 << 20}, slept
            array = cuvmm.empty(2 << 20)
            slept = cuvmm.sleep("weights")
            assert slept.given == {"weights": 8 << 20}, slept
            held = slept.held
            assert held == {"cache": 4 << 20, "PyTorch": 32 << 20, "torch": held["torch"]}, held
            assert held["torch"] >= 2 << 20
            """
        )
        case(
            """
            cuvmm.torch.install(tenant="mine")
            with cuvmm.torch.pool("weights"):
                kept = [torch.empty(8 << 20)]
            kept.append(torch.empty(32 << 20))
            slept = cuvmm.sleep(keep=False)
            assert slept.given == {"weights": 8 << 20}, slept
            assert list(slept.held) == ["mine"] and slept.held["mine"] >= 32 << 20, slept
            """
        )

    def test_sleep_says_what_the_driver_does_not_take_back(self):
        case(
            """
            import ctypes
            fail = ctypes.CDLL("libcuda.so.1").fakecuda_fail
            cuvmm.torch.install()
            with cuvmm.torch.pool("weights"):
                kept = [torch.empty(8 << 20)]
            assert fail(b"cuMemRelease:1-:UNKNOWN") == 0
            slept = cuvmm.sleep("weights")
            assert slept.given == {"weights": 8 << 20} and slept.quarantined == 8 << 20, slept
            stats = cuvmm.stats()
            assert stats.quarantined == 8 << 20 and stats.held == 10 << 20, stats
            assert fail(None) == 0
            cuvmm.empty_cache()
            assert (cuvmm.stats().quarantined, cuvmm.stats().held) == (0, 2 << 20), cuvmm.stats()
            cuvmm.wake("weights")
            assert cuvmm.sleep("weights").quarantined == 0
            """
        )

    def test_sleep_says_what_it_gave_up_on_another_device(self):
        """A block that was entered before makes tensors there while the pool sleeps here."""
        case(
            """
            cuvmm.torch.install(limit="64MiB")
            with cuvmm.torch.pool("a"):
                first = torch.empty(8 << 20)
                assert cuvmm.sleep("a").given == {"a": 8 << 20}
                with torch.cuda.device(1):
                    other = torch.empty(4 << 20)
                assert cuvmm.sleep().given == {"a": 4 << 20}
            """
        )

    def test_wake_gives_back_the_free_memory_of_pytorch_s_own_allocator(self):
        case(
            """
            cuvmm.configure(limit="250MiB")
            with cuvmm.torch.pool("weights"):
                tensor = torch.empty(160 << 20)
            cuvmm.sleep("weights", keep=False)
            torch._C.native_reserve(8 << 20)
            cuvmm.wake("weights")
            assert torch._C.native_cache, "enough was free"
            cuvmm.sleep("weights", keep=False)
            torch._C.native_reserve(120 << 20)
            torch.cuda.capturing = True
            refused(cuvmm.OutOfMemoryError, lambda: cuvmm.wake("weights"), "memory")
            assert len(torch._C.native_cache) == 2, "a graph is captured"
            torch.cuda.capturing = False
            cuvmm.wake("weights")
            assert not torch._C.native_cache
            assert not cuvmm.asleep()
            """
        )

    def test_a_pool_that_is_entered_in_a_capture_serves_captures_only(self):
        code = """
            BEGIN
            torch.cuda.init()
            def inside(size):
                with cuvmm.torch.pool("a"):
                    return torch.empty(size)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            torch.cuda.capturing = True
            first = inside(4 << 20)
            if cuvmm.torch.is_installed():
                # PyTorch's own pools give nothing back as long as they are there.
                first.free()
            torch.cuda.capturing = False
            graph.capture_end()
            assert not torch.cuda.workspaces, "nothing is made in the graph's memory beside"
            outside = inside(4 << 20)
            assert outside.address != first.address, (outside.address, first.address)
            assert cuvmm.sleep("a").given["a"] >= 4 << 20
            refused(cuvmm.Error, lambda: inside(4 << 20), "asleep")
            cuvmm.wake("a")
            """
        for begin in ("", "cuvmm.torch.install()"):
            case(code.replace("BEGIN", begin))

    def test_the_workspace_of_cublas_is_in_no_pool(self):
        case(
            """
            import ctypes
            from device import libcuda
            cuvmm.torch.install()
            with cuvmm.torch.pool("a"):
                tensor = torch.empty(4 << 20)
                torch.cuda.current_blas_handle()
                with cuvmm.torch.pool("b"):
                    torch.cuda.current_blas_handle()
            cuvmm.sleep()
            (workspace,) = torch.cuda.workspaces.values()
            buffer = ctypes.create_string_buffer(512)
            assert libcuda.cuMemcpyDtoH_v2(buffer, workspace.address, 512) == 0
            """
        )
        case(
            """
            with cuvmm.torch.pool("a"):
                torch.cuda.current_blas_handle()
            assert torch.cuda.workspaces == {(0, 0): None}, "of PyTorch's own allocator"
            """
        )

    def test_contents_are_kept(self):
        case(
            """
            from device import fill, shows
            with cuvmm.torch.pool("weights"):
                tensor = torch.empty(4 << 20)
            fill(tensor, 7)
            cuvmm.sleep("weights")
            assert not shows(tensor, 7)
            cuvmm.wake("weights")
            assert shows(tensor, 7)
            """
        )

    def test_under_install(self):
        case(
            """
            cuvmm.torch.install(limit="128MiB")
            with cuvmm.torch.pool("weights"):
                tensor = torch.empty(4 << 20)
            outside = torch.empty(4 << 20)
            before = torch.cuda.mem_get_info()[0]
            cuvmm.sleep("weights")
            assert torch.cuda.mem_get_info()[0] >= before + (4 << 20)
            cuvmm.wake("weights")
            tensor.free()
            outside.free()
            """
        )


@needs_stand_in
class Graphs(unittest.TestCase):
    CAPTURE = """
        import ctypes
        from device import fill, libcuda, shows
        buffer = ctypes.create_string_buffer(4 << 20)

        def capture(pool=None):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(*[pool] * (pool is not None), capture_error_mode="thread_local")
            tensor = torch.empty(4 << 20)
            graph.capture_end()
            fill(tensor, 7)
            return graph, tensor

        def is_kept(tensor):
            return shows(tensor, 7)
        """

    def both(self, code):
        for begin in ("", "cuvmm.torch.install()"):
            case(code, first=begin + textwrap.dedent(self.CAPTURE))

    def test_memory_of_graphs_sleeps_with_the_name(self):
        self.both(
            """
            with cuvmm.torch.pool("decode"):
                weights = torch.empty(4 << 20)
            with cuvmm.torch.graphs("decode") as pool:
                graph, tensor = capture()
                again, other = capture(pool)
            assert graph.pool == again.pool == pool
            for keep in (False, True):
                given = cuvmm.sleep("decode", keep=keep).given
                assert list(given) == ["decode"] and given["decode"] >= 12 << 20, given
                assert cuvmm.asleep() == {"decode"}
                assert not shows(tensor, 7)
                cuvmm.wake("decode")
                assert is_kept(tensor) and is_kept(other)
            """
        )

    def test_contents_that_replays_write_first_take_no_host_memory(self):
        self.both(
            """
            with cuvmm.torch.graphs("decode", keep=False):
                graph, tensor = capture()
            cuvmm.sleep("decode")
            assert cuvmm.stats().all["host"] == 0
            cuvmm.wake("decode")
            fill(tensor, 7)
            assert is_kept(tensor)
            """
        )

    def test_captures_inside_get_the_pool(self):
        self.both(
            """
            assert torch.cuda.graph_pool_handle() != torch.cuda.graph_pool_handle()
            with cuvmm.torch.graphs("outer") as outer:
                # As `make_graphed_callables` asks for it, and as programs do.
                assert torch.cuda.graphs.graph_pool_handle() == torch.cuda.graph_pool_handle() == outer
                with cuvmm.torch.graphs("inner") as inner:
                    assert torch.cuda.graph_pool_handle() == inner != outer
                    graph, tensor = capture()
                    assert graph.pool == inner
                    refused(cuvmm.Error, lambda: capture(outer), "'outer'", "in that block")
                graph, tensor = capture()
                assert graph.pool == outer
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin((7, 7))
                graph.capture_end()
                assert graph.pool == (7, 7), "named by the program"
            graph.capture_begin()
            graph.capture_end()
            assert graph.pool not in (inner, outer)
            with cuvmm.torch.graphs("outer") as next:
                assert next not in (inner, outer), "each block has its own"
            """
        )

    def test_pools_of_graphs_end_where_no_pool_is_in_use(self):
        """PyTorch ends the process if a pool is dropped while another one is in use."""
        case(
            """
            with cuvmm.torch.pool("other"):
                with cuvmm.torch.graphs("decode"):
                    graph, tensor = capture()
            assert cuvmm.stats().held >= 4 << 20
            tensor.free()
            # The graph's use of the pool.
            del graph.entered
            assert cuvmm.trim("decode") >= 4 << 20
            assert cuvmm.stats().held == 0
            """,
            first=self.CAPTURE,
        )

    def test_the_workspace_of_cublas_is_not_the_graph_s(self):
        self.both(
            """
            with cuvmm.torch.graphs("decode"):
                graph, tensor = capture()
            assert list(torch.cuda.workspaces) == [(0, 0)]
            cuvmm.sleep("decode")
            workspace = torch.cuda.workspaces[0, 0]
            if workspace is not None:
                assert libcuda.cuMemcpyDtoH_v2(buffer, workspace.address, 512) == 0
            """
        )

    def test_a_thread_without_a_context_gets_one(self):
        """PyTorch warns where there is none, and uses that of device 0."""
        self.both(
            """
            import threading

            def work():
                torch.cuda.current_blas_handle() if native else None
                with cuvmm.torch.pool("t", 1):
                    context, device = ctypes.c_void_p(), ctypes.c_int()
                    assert libcuda.cuCtxGetCurrent(ctypes.byref(context)) == 0
                    assert context and libcuda.cuCtxGetDevice(ctypes.byref(device)) == 0
                    devices.append(device.value)

            torch.cuda.init()
            devices = []
            warnings.simplefilter("error")
            for native in (False, True):
                thread = threading.Thread(target=work)
                failed, threading.excepthook = [], lambda it: failed.append(str(it.exc_value))
                thread.start()
                thread.join()
                assert bool(failed) == native, failed
            assert devices == [1], devices
            """
        )

    def test_wrong_arguments(self):
        self.both(
            """
            def enter(*arguments, **named):
                cuvmm.torch.graphs(*arguments, **named).__enter__()
            refused(TypeError, lambda: enter("decode", keep=1), "keep")
            refused(TypeError, lambda: enter(7), "name")
            refused(ValueError, lambda: enter(""), "name")
            with cuvmm.torch.graphs("decode"):
                graph, tensor = capture()
            cuvmm.sleep("decode")
            refused(cuvmm.Error, lambda: enter("decode"), "asleep")
            torch.cuda.capturing = True
            refused(cuvmm.Error, lambda: enter("other"), "captured", "'other'")
            """
        )
