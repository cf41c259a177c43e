"""The drop-in names: `cuvmm.torch.memory_saver` and `cuvmm.torch.vllm`, over stand-ins for PyTorch, vLLM and libcuda."""

import os
import tempfile
import textwrap
import unittest

from support import HERE, frame, needs_stand_in, run

BEGIN = """
import torch
import cuvmm
import cuvmm.torch
from device import fill, libcuda, shows as has

def filled(byte, size=4 * MIB):
    tensor = torch.empty(size)
    fill(tensor, byte)
    return tensor

def view(tensor, kind=torch.uint8, strides=None):
    shape = (tensor.size // kind.itemsize,)
    return torch.Tensor(tensor.address, shape, kind, torch.device("cuda", 0), tensor, strides)

def pools():
    return {it["name"]: it["bytes"] for it in cuvmm.stats().all["pools"]}

"""
SAVER = BEGIN + "from cuvmm.torch.memory_saver import torch_memory_saver as saver\n"


case = frame(SAVER, fakes=True)


def in_both(code: str, **variables: str) -> None:
    case(code, **variables)
    case(code, first="cuvmm.torch.install()", **variables)


@needs_stand_in
class MemorySaver(unittest.TestCase):
    def test_contents_are_kept_or_lost_as_the_region_says(self):
        in_both(
            """
            with saver.region(tag="weights", enable_cpu_backup=True):
                weights = filled(1)
                with saver.region("cache"):
                    cache = filled(2)
                more = filled(3)
            assert pools() == {"weights+backup": 8 * MIB, "cache": 4 * MIB}, pools()
            addresses = weights.address, cache.address
            for _ in range(2):
                saver.pause()
                assert cuvmm.asleep() == {"weights+backup", "cache"}
                assert not has(weights, 1) and not has(cache, 2)
                saver.resume()
                assert not cuvmm.asleep()
                assert has(weights, 1) and has(more, 3) and not has(cache, 2)
                fill(cache, 2)
            assert addresses == (weights.address, cache.address)
            """
        )

    def test_a_tag_of_which_a_part_is_kept(self):
        in_both(
            """
            with saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
                kept = filled(1)
            with saver.region():
                lost = filled(2)
            with saver.region(tag="other"):
                other = filled(3)
            saver.pause("default")
            assert cuvmm.asleep() == {"default+backup", "default"}
            assert has(other, 3)
            assert saver.get_cpu_backup(view(other)) is None
            backup = saver.get_cpu_backup(view(kept, torch.int32))
            assert backup.device.type == "cpu" and backup.dtype is torch.int32
            assert backup.bytes() == bytes([1]) * (4 * MIB)
            part = torch.Tensor(kept.address + MIB, (5,), torch.uint8, torch.device("cuda", 0), kept)
            assert saver.get_cpu_backup(part, zero_copy=True).bytes() == bytes([1]) * 5
            refused(cuvmm.Error, lambda: saver.get_cpu_backup(view(lost)), '"default"', "discarded")
            saver.resume(tag="default")
            assert has(kept, 1) and not has(lost, 2)
            assert saver.get_cpu_backup(view(kept)) is None
            strided = view(kept, strides=(2,))
            refused(ValueError, lambda: saver.get_cpu_backup(strided), "contiguous")
            refused(ValueError, lambda: saver.get_cpu_backup(torch.empty((4,), torch.uint8)), "cpu")
            """
        )

    def test_wrong_orders_are_errors_and_change_nothing(self):
        in_both(
            """
            saver.pause()
            saver.resume()
            saver.pause("unknown")
            saver.resume("unknown")
            with saver.region("a"):
                pass
            saver.pause("a")
            with saver.region("a"):
                a = filled(1)
            with saver.region("b"):
                b = filled(2)
            refused(cuvmm.Error, lambda: saver.resume("a"), "'a' is not paused", "pause('a')")
            refused(cuvmm.Error, saver.resume, "all tags are not paused")
            saver.pause("a")
            refused(cuvmm.Error, lambda: saver.pause("a"), "'a' is paused", "resume('a')")
            refused(cuvmm.Error, lambda: saver.region("a").__enter__(), "asleep")
            saver.pause()
            assert cuvmm.asleep() == {"a", "b"}
            refused(cuvmm.Error, saver.pause, "all tags are paused: call resume() first")
            saver.resume("b")
            saver.resume()
            assert not cuvmm.asleep()
            """
        )

    def test_all_tags_pause_or_none(self):
        in_both(
            """
            with saver.region("cache"):
                cache = filled(1)
            with saver.region("weights", enable_cpu_backup=True):
                weights = filled(2)
            cuvmm.limit_host(2 * MIB)
            refused(cuvmm.OutOfMemoryError, saver.pause, "cannot keep")
            assert not cuvmm.asleep() and has(cache, 1) and has(weights, 2)
            """
        )

    def test_other_pools_are_left_alone(self):
        in_both(
            """
            with cuvmm.torch.pool("mine"):
                mine = filled(1)
            with saver.region("theirs"):
                theirs = filled(2)
            saver.pause()
            assert has(mine, 1) and cuvmm.asleep() == {"theirs"}
            cuvmm.sleep("mine")
            saver.resume()
            assert cuvmm.asleep() == {"mine"}
            """
        )

    def test_disable_is_outside_of_every_region(self):
        in_both(
            """
            with saver.region("a", enable_cpu_backup=True):
                first = filled(1)
                with saver.disable():
                    outside = filled(2)
                    with saver.region("b"):
                        inner = filled(3)
                last = filled(4)
                assert pools() == {"a+backup": 8 * MIB, "b": 4 * MIB}, pools()
            saver.pause()
            assert has(outside, 2) and not has(first, 1)
            saver.resume()
            assert has(first, 1) and has(last, 4)
            refused(NotImplementedError, lambda: saver.disable(False).__enter__())
            with saver.disable():
                pass
            assert not torch.cuda.memory.entered
            """
        )

    def test_what_is_not_provided_says_so(self):
        case(
            """
            import cuvmm.torch.memory_saver as module
            refused(NotImplementedError, lambda: saver.set_disk_backup_dir("/tmp"), "enable_cpu_backup")
            disk = lambda: saver.region(enable_disk_backup=True).__enter__()
            refused(NotImplementedError, disk, "enable_cpu_backup=True")
            refused(ValueError, lambda: saver.region(cpu_backup_backend="mmap").__enter__(), "enable_cpu_backup")
            other = lambda: saver.region(enable_cpu_backup=True, cpu_backup_backend="disk").__enter__()
            refused(ValueError, other, "'disk'")
            for mode in ("torch", "preload"):
                saver.hook_mode = mode
                assert saver.hook_mode == mode
            refused(ValueError, lambda: setattr(saver, "hook_mode", "x"), "'x'")
            refused(TypeError, lambda: saver.region(5).__enter__(), "5")
            refused(ValueError, lambda: saver.region("").__enter__())
            saver._pool("a", True)
            refused(ValueError, lambda: saver.region("a+backup").__enter__(), "'a+backup'", "'a'")
            refused(ValueError, lambda: setattr(saver, "memory_margin_bytes", -1), "-1")
            assert saver.enabled and saver._impl is None and saver.retain_cpu_backup is False
            import os
            before = dict(os.environ)
            with module.configure_subprocess():
                assert dict(os.environ) == before
            names = {}
            exec("from cuvmm.torch.memory_saver import *", names)
            assert {"torch_memory_saver", "TorchMemorySaver", "configure_subprocess"} <= names.keys()
            assert names["pause"].__self__ is saver
            """
        )

    def test_host_memory_is_retained_or_not(self):
        in_both(
            """
            with saver.region(enable_cpu_backup=True):
                kept = filled(1)
            saver.pause()
            saver.resume()
            assert cuvmm.stats().all["host"] == 0
            saver.retain_cpu_backup = True
            saver.pause()
            assert cuvmm.stats().all["host"] == 4 * MIB
            saver.resume()
            assert cuvmm.stats().all["host"] == 4 * MIB and has(kept, 1)
            saver.pause()
            saver.retain_cpu_backup = False
            saver.resume()
            assert cuvmm.stats().all["host"] == 0 and has(kept, 1)
            """
        )
        case("assert saver.retain_cpu_backup is True", TMS_RETAIN_CPU_BACKUP="1")

    def test_what_is_made_outside_of_regions(self):
        in_both(
            """
            import threading
            saver.hook_mode = "preload"
            weights = filled(1)
            with saver.region("grads", enable_cpu_backup=False):
                grads = filled(2)
            later = filled(3)
            assert pools() == {"default+backup": 8 * MIB, "grads": 4 * MIB}, pools()
            saver.pause("grads")
            saver.pause("default")
            # Nothing is made in a pool that sleeps.
            meanwhile = filled(4)
            with saver.disable():
                outside = filled(5)
            assert has(meanwhile, 4) and has(outside, 5)
            thread = threading.Thread(target=saver.resume)
            thread.start()
            thread.join()
            assert has(weights, 1) and has(later, 3) and not cuvmm.asleep()
            """,
            TMS_INIT_ENABLE="1",
            TMS_INIT_ENABLE_CPU_BACKUP="1",
        )
        in_both(
            """
            cuvmm.limit_host(2 * MIB)
            saver._ensure_initialized()
            weights = filled(1)
            refused(cuvmm.OutOfMemoryError, saver.pause)
            after = filled(2)
            assert pools() == {"default+backup": 8 * MIB}, pools()
            """,
            TMS_INIT_ENABLE="true",
            TMS_INIT_ENABLE_CPU_BACKUP="true",
        )

    def test_a_margin_is_a_limit(self):
        in_both(
            """
            saver.memory_margin_bytes = 128 * MIB
            _, limit = cuvmm._library.get().headroom(0)
            assert abs(limit - 128 * MIB) <= 2 * MIB, limit
            assert saver.memory_margin_bytes == 128 * MIB
            saver.memory_margin_bytes = 0
            _, limit = cuvmm._library.get().headroom(0)
            assert limit > 128 * MIB, limit
            refused(ValueError, lambda: setattr(saver, "memory_margin_bytes", 1 << 40), "device 0")
            assert saver.memory_margin_bytes == 0
            """
        )

    def test_graphs_have_a_tag(self):
        case(
            """
            import contextlib, sys, types
            seen, numbers = [], iter(range(9))
            @contextlib.contextmanager
            def graphs(name, *, keep):
                with cuvmm.torch.pool(name):
                    yield name, next(numbers)
                seen.append(keep)
            class Graph:
                pass
            g, h, i, j = (Graph() for _ in range(4))
            sys.modules["cuvmm.torch._graphs"] = types.SimpleNamespace(graphs=graphs)
            @contextlib.contextmanager
            def graph(it, pool, stream, capture_error_mode):
                seen.append((it, pool, stream, capture_error_mode))
                yield
            torch.cuda.graph = graph
            with saver.cuda_graph(g, pool=(0, 7), tag="graph"):
                first = filled(1)
            # The same pool is shared, another one and none are not, and neither is one whose graphs are gone.
            with saver.cuda_graph(cuda_graph=h, pool=(0, 7), stream=5, tag="graph"):
                second = filled(2)
            assert seen == [(g, ("graph", 0), None, "global"), False, (h, ("graph", 0), 5, "global"), False], seen
            with saver.cuda_graph(i, pool=(0, 8), tag="graph"):
                pass
            with saver.cuda_graph(j, tag="graph"):
                pass
            assert [it[1][1] for it in seen[4::2]] == [2, 3], seen
            del g, h
            seen.clear()
            with saver.cuda_graph(i, pool=(0, 7), tag="graph", capture_error_mode="relaxed"):
                pass
            assert seen == [(i, ("graph", 4), None, "relaxed"), False], seen
            with saver.cuda_graph(i, tag="graph", enable_cpu_backup=True):
                third = filled(3)
            assert seen[-2][1][0] == "graph+backup" and seen[-1] is True, seen
            # A capture that fails shares nothing.
            def fails():
                with saver.cuda_graph(i, pool=(0, 9), tag="graph"):
                    raise KeyError("x")
            refused(KeyError, fails)
            with saver.cuda_graph(i, pool=(0, 9), tag="graph"):
                pass
            assert seen[-2][1][1] == 7, seen
            saver.pause("graph")
            assert cuvmm.asleep() == {"graph", "graph+backup"}
            saver.resume("graph")
            assert has(third, 3) and not has(first, 1)
            """
        )

    def test_devices_pause_together(self):
        in_both(
            """
            with torch.cuda.device(0), saver.region("t", enable_cpu_backup=True):
                here = filled(1)
            with torch.cuda.device(1), saver.region("t", enable_cpu_backup=True):
                there = torch.empty(4 * MIB)
            saver.pause("t")
            sleeping = [cuvmm.stats(device).all["pools"][0]["asleep"] for device in (0, 1)]
            assert sleeping == [True, True], sleeping
            saver.resume("t")
            assert has(here, 1)
            """
        )


EXAMPLES = {
    "torch_memory_saver/testing_utils.py": """
        from torch_memory_saver import torch_memory_saver
        def check(condition):
            assert condition
        """,
    "test/examples/__init__.py": "",
    "test/examples/simple.py": """
        import torch
        from torch_memory_saver import torch_memory_saver
        from torch_memory_saver.testing_utils import check
        def run(hook_mode):
            torch_memory_saver.hook_mode = hook_mode
            state = torch_memory_saver._impl._binary_wrapper.cdll
            with torch_memory_saver.region("a", enable_cpu_backup=True):
                tensor = torch.empty(4 << 20)
                check(state.tms_get_current_tag() == b"a" and state.tms_get_enable_cpu_backup())
            check(state.tms_get_current_tag() == b"default")
            torch_memory_saver.pause()
            torch_memory_saver.resume()
        """,
    "test/test_examples.py": """
        import multiprocessing
        import pytest
        import torch_memory_saver
        from examples import simple
        @pytest.mark.parametrize("hook_mode", ["preload", "torch"])
        def test_simple(hook_mode):
            with torch_memory_saver.configure_subprocess():
                process = multiprocessing.get_context("spawn").Process(target=simple.run, args=(hook_mode,))
                process.start()
                process.join()
            assert process.exitcode == 0
        @pytest.mark.skipif(True, reason="not here")
        def test_skipped():
            assert False
        def test_disk_backup():
            pass
        @pytest.mark.parametrize("hook_mode", ["torch"])
        def test_cpu_backup(hook_mode):
            assert False
        """,
}


@needs_stand_in
class Examples(unittest.TestCase):
    """The program that runs torch_memory_saver's own tests, with others in their place."""

    def run_examples(self, *options, **more):
        script = os.path.join(HERE, "tms_examples.py")
        with tempfile.TemporaryDirectory() as folder:
            for name, text in {**EXAMPLES, **more}.items():
                path = os.path.join(folder, "checkout", name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "w") as file:
                    file.write(textwrap.dedent(text))
            code = f"""
                import subprocess, sys
                command = [sys.executable, {script!r}, "checkout", *{options!r}]
                ended = subprocess.run(command, cwd={folder!r}, capture_output=True, text=True)
                print(ended.stdout, ended.stderr, "status", ended.returncode)
                """
            return run(code, fakes=True)

    def test_they_run_unchanged(self):
        for options in ([], ["--install"]):
            said = self.run_examples(*options)
            self.assertIn("passed   test_simple[preload]\npassed   test_simple[torch]\n", said)
            self.assertIn("skipped  test_skipped: not here", said)
            self.assertIn("known    test_cpu_backup[torch]: ", said)
            self.assertIn("3 passed, 0 failed, 2 skipped (1 fail as they are known to)", said)
            self.assertIn("status 0", said)

    def test_a_failure_fails_the_run(self):
        wrong = EXAMPLES["test/examples/simple.py"].replace('b"default"', 'b"other"')
        said = self.run_examples("simple[torch]", **{"test/examples/simple.py": wrong})
        self.assertIn("FAILED   test_simple[torch]", said)
        self.assertIn("AssertionError", said)
        self.assertIn("0 passed, 1 failed, 0 skipped", said)
        self.assertIn("status 1", said)


VLLM = (
    BEGIN
    + """
import types
import cuvmm.torch.vllm as integration

def worker(backend="cuvmm", sleeps=True):
    model = types.SimpleNamespace(sleep_mode_backend=backend, enable_sleep_mode=sleeps)
    return integration.Worker(types.SimpleNamespace(model_config=model))
"""
)
with_vllm = frame(VLLM, fakes=True)


@needs_stand_in
class Vllm(unittest.TestCase):
    def test_levels_and_tags(self):
        for begin in ("", "cuvmm.torch.install()"):
            with_vllm(
                """
                it = worker()
                with it._maybe_get_memory_pool_context(tag="weights"):
                    weights = filled(1)
                with it._maybe_get_memory_pool_context(tag="kv_cache"):
                    cache = filled(2)
                with it._maybe_get_memory_pool_context(tag="other"):
                    other = filled(5)
                if not cuvmm.torch.is_installed():
                    torch._C.native_reserve(8 * MIB)
                it.sleep()
                assert not torch._C.native_cache
                assert it.backend().state() == "SUSPENDED"
                assert cuvmm.asleep() == {"weights", "kv_cache", "other"}
                it.sleep()
                it.wake_up(["weights", "scheduling"])
                assert it.backend().state() == "SUSPENDED" and cuvmm.asleep() == {"kv_cache"}
                it.wake_up(["kv_cache"])
                assert it.backend().state() == "RUNNING"
                assert has(weights, 1) and not has(cache, 2)
                it.sleep(2)
                it.wake_up()
                assert it.backend().state() == "RUNNING" and not has(weights, 1)
                it.wake_up()
                fill(weights, 3)
                it.backend().discard(("kv_cache",))
                assert cuvmm.asleep() == {"kv_cache"} and has(weights, 3)
                it.backend().discard(("kv_cache",))
                it.sleep(1)
                it.wake_up(None)
                assert has(weights, 3)
                refused(ValueError, lambda: it.sleep(3), "3")
                """,
                first=begin,
            )

    def test_a_failure_changes_nothing(self):
        with_vllm(
            """
            it = worker()
            with it._maybe_get_memory_pool_context(tag="weights"):
                weights = filled(1)
            with it._maybe_get_memory_pool_context(tag="kv_cache"):
                cache = filled(2)
            cuvmm.limit_host(2 * MIB)
            refused(cuvmm.OutOfMemoryError, it.sleep)
            assert it.backend().state() == "RUNNING" and not cuvmm.asleep()
            assert has(weights, 1) and has(cache, 2)
            """
        )

    def test_it_says_what_is_missing(self):
        with_vllm(
            """
            from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
            integration.register()
            assert list(SleepModeBackendFactory._registry) == ["cuvmm"]
            for other in (worker("cumem"), worker(sleeps=False)):
                with other._maybe_get_memory_pool_context(tag="weights") as own:
                    assert own == "vLLM's own"
            refused(cuvmm.Error, worker().sleep, "--worker-cls cuvmm.torch.vllm.Worker")
            backend = integration.SleepBackend
            flags = [backend.is_supported(), backend.preserves_communicators(),
                backend.preserves_compiled_artifacts(), backend.preserves_graphs_with_communicators(),
                backend.supports_durable_storage()]
            assert flags == [torch.version.cuda is not None, True, True, False, False], flags
            assert (integration.Worker.__module__, integration.Worker.__qualname__) == ("cuvmm.torch.vllm", "Worker")
            refused(AttributeError, lambda: integration.Workers, "Workers")
            """
        )

    def test_another_vllm_is_refused(self):
        frame(BEGIN, fakes=True)(
            """
            import sys
            sys.modules["vllm.device_allocator.sleep_mode_backend"] = None
            def load():
                import cuvmm.torch.vllm
            refused(ImportError, load, "pluggable sleep-mode backends")
            """
        )
