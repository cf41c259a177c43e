"""The caches of transformers' continuous batching, with stand-ins for it and for libcuda."""

import unittest

from support import frame, needs_stand_in

#: Blocks of 1 MiB in extents of 2 MiB. The last two have memory always.
SETUP = """
import ctypes
import threading
import torch
import cuvmm
import cuvmm.torch.transformers as adapter
from transformers.generation.continuous_batching import cache, continuous_api

def make(blocks=1000, **options):
    return continuous_api.make(2, blocks, torch.float16, **options)[0]
"""


case = frame(SETUP, fakes=True)


@needs_stand_in
class Caches(unittest.TestCase):
    def test_blocks_have_memory_while_requests_use_them(self):
        case(
            """
            originals = cache.PagedAttentionCache, continuous_api.ContinuousBatchProcessor, cache.PagedAttentionMemoryHandler
            try:
                make()
            except MemoryError:
                pass
            with adapter.paged(name="chat", extent="2MiB"):
                made, how = continuous_api.make(2, 1000, torch.float16)
            assert how.max_blocks_per_request == 0
            assert (continuous_api.PagedAttentionCache, continuous_api.ContinuousBatchProcessor,
                    cache.PagedAttentionMemoryHandler) == originals
            assert (made.device, len(made.key_cache), made.kv.name, made.kv.pinned) == (0, 2, "chat", (0, 1000, 1001))
            for rows in made.key_cache + made.value_cache:
                assert rows.shape == (1002 * 16, 8, 1024) and rows[16000:16016].bytes() == bytes(16 * 8 * 1024 * 2)
            assert made.allocate_blocks(3, "a", 0) == 3 and made.allocate_blocks(2, "b", 0) == 2
            assert made.tables == {"a": [0, 1, 2], "b": [3, 4]}
            # Number 0 is pinned: it is not counted as in use.
            assert made.kv.stats().in_use == 4
            address = made.value_cache[1].data_ptr() + 5 * 16 * made.value_cache[1].stride()[0] * 2 - 2
            ctypes.memmove(address - 2 * 8 * 1024 * 2, b"there", 5)
            made.free_blocks("a")
            assert made.kv.stats().in_use == 2 and made.get_num_free_blocks() == 998
            assert made.fork_request("b", ["c"]) == ([3, 4], [0, 1]) and made.kv.stats().in_use == 3
            # Complete blocks stay for their prefixes.
            made.mark_shareable_blocks_as_complete("b", 1)
            made.free_blocks("b")
            assert made.kv.stats().in_use == 2 and list(made._block_manager._init_block_ids) == [3]
            assert made.search_prefix_match("d", []) == 0
            # The prefix goes for want of numbers, and memory is short all the same: that is told, not raised.
            assert made.allocate_blocks(998, "d", 2) is None
            assert not made._block_manager._init_block_ids and made.kv.stats().in_use == 1
            """
        )

    def test_a_request_without_memory_waits_as_one_without_blocks(self):
        case(
            """
            cuvmm.configure(limit="16MiB")
            adapter.install(name="chat", extent="2MiB", timeout=0)
            made = make()
            assert made.allocate_blocks(6, "a", 0) == 6
            assert made.allocate_blocks(12, "b", 0) is None
            # As many as could have memory are known until requests end.
            assert made.get_num_free_blocks() == 8 and made.kv.stats().in_use == 5
            assert made.compute_max_num_forks("a") == 1
            assert made.allocate_blocks(8, "b", 0) == 8 and made.get_num_free_blocks() == 986
            assert made.compute_max_num_forks("a") == 0
            assert made.allocate_blocks(1, "c", 0) is None and made.get_num_free_blocks() == 0
            made.free_blocks("a")
            assert made.get_num_free_blocks() == 6 and made.allocate_blocks(6, "c", 0) == 6
            made.free_blocks("b")
            made.free_blocks("c")
            # Another tenant has all but the extent of number 0: no request of this cache gives it back.
            array = cuvmm.empty(12 * MIB)
            assert made.allocate_blocks(3, "d", 0) is None
            del array
            assert made.allocate_blocks(3, "d", 0) == 3
            """
        )

    def test_prefixes_go_to_other_models(self):
        case(
            """
            cuvmm.configure(limit="26MiB")
            with adapter.paged(name="chat", extent="2MiB", timeout=0):
                chat = make()
            with adapter.paged(name="code", extent="2MiB", timeout=0):
                code = make()
            assert chat.allocate_blocks(10, "a", 0) == 10
            chat.mark_shareable_blocks_as_complete("a", 8)
            chat.free_blocks("a")
            assert len(chat._block_manager._init_block_ids) == 8
            # Those at the end empty whole extents.
            assert code.allocate_blocks(16, "b", 0) == 16
            left = chat._block_manager._init_block_ids
            assert 0 < len(left) < 8 and 0 in left and chat.kv.stats().in_use == len(left) - 1, left
            assert set(chat._block_manager._hash_to_id.values()) == set(left)
            # While its own blocks change hands it gives none.
            with chat._block_manager.turn:
                found = []
                thread = threading.Thread(target=lambda: found.append(code.allocate_blocks(4, "c", 0)))
                thread.start()
                thread.join()
            assert found == [None]
            # Its own requests take its prefixes too.
            assert chat.allocate_blocks(4, "d", 0) == 4 and chat.kv.stats().in_use <= 4 + len(left)
            """
        )

    def test_blocks_of_a_request_and_of_its_prefixes_change_hands_by_one_call(self):
        case(
            """
            cuvmm.configure(limit="26MiB")
            with adapter.paged(name="chat", extent="2MiB", timeout=0):
                made = make(20)
            calls = []
            for name in ("try_back", "back", "release"):
                def call(numbers, name=name, made=getattr(made.kv, name)):
                    calls.append((name, list(numbers)))
                    return made(numbers)
                setattr(made.kv, name, call)
            assert made.allocate_blocks(5, "a", 0) == 5 and made.allocate_blocks(4, "b", 0) == 4
            made.free_blocks("a")
            assert calls == [("try_back", [1, 2, 3, 4]), ("try_back", [5, 6, 7, 8]), ("release", [1, 2, 3, 4])]
            # Prefixes keep their memory for the blocks that take their place.
            made.mark_shareable_blocks_as_complete("b", 4)
            made.free_blocks("b")
            calls.clear()
            assert made.get_num_free_blocks() == 20 and made.kv.stats().in_use == 4
            other = cuvmm.empty(12 * MIB)
            assert made.allocate_blocks(20, "c", 0) is None
            assert not made._block_manager._init_block_ids and made.kv.stats().in_use == 0
            assert made.get_num_free_blocks() < 20
            calls.clear()
            assert made.allocate_blocks(4, "d", 0) == 4
            made.mark_shareable_blocks_as_complete("d", 4)
            made.free_blocks("d")
            del other
            assert made.allocate_blocks(18, "e", 0) == 18
            taken = [numbers for name, numbers in calls if name != "release"]
            assert len(taken) == 2 and len(taken[0]) == 3 and len(taken[1]) == 16, calls
            assert sorted(made.tables["e"]) == sorted(set(made.tables["e"])) and len(made.tables["e"]) == 18
            made.free_blocks("e")
            assert made.get_num_free_blocks() == 20
            """
        )

    def test_requests_wait_while_their_cache_sleeps(self):
        case(
            """
            with adapter.paged(name="chat", extent="2MiB"):
                engine = continuous_api.processor(2, 100, torch.float16)
            kv = engine.cache.kv
            # An idle engine does not keep the cache awake.
            engine.cancelled.append("gone")
            assert not engine.prepare_next_batch() and not engine.cancelled
            cuvmm.sleep("chat", timeout=0)
            engine.arrived.append(("a", 4))
            assert not engine.prepare_next_batch() and engine.requests == {"a": 4} and not engine.cache.tables
            refused(cuvmm.Error, lambda: engine.warmup(lambda: None), "wake it first")
            cuvmm.wake("chat")
            # From the choice of a batch until its tokens are there, the cache stays awake.
            assert engine.prepare_next_batch() and engine.cache.tables == {"a": [0, 1, 2, 3]}
            refused(cuvmm.Error, lambda: cuvmm.sleep("chat", timeout=0), "end its steps")
            engine.update_batch()
            assert kv.stats().in_use == 0
            # An engine that is stopped gives its blocks back, which are released when the cache is awake.
            engine.arrived.append(("b", 4))
            assert engine.prepare_next_batch()
            assert engine.cache.end_step() and not engine.cache.end_step()
            cuvmm.sleep("chat", timeout=0)
            engine.fail_all_requests(None)
            assert kv.stats().in_use == 3 and engine.cache.get_num_free_blocks() == 100
            cuvmm.wake("chat")
            assert engine.cache.allocate_blocks(2, "c", 0) == 2
            assert kv.stats().in_use == 1 and engine.cache.get_num_free_blocks() == 98
            # One that fails ends its step.
            engine.requests["d"] = 10 ** 6
            refused(RuntimeError, engine.prepare_next_batch)
            cuvmm.sleep("chat", timeout=0)
            """
        )

    def test_prefixes_give_their_memory_to_requests_of_the_same_batch(self):
        case(
            """
            cuvmm.configure(limit="26MiB")
            with adapter.paged(name="chat", extent="2MiB", timeout=0):
                engine = continuous_api.processor(2, 1000, torch.float16)
            made, kv = engine.cache, engine.cache.kv
            manager = made._block_manager
            assert made.allocate_blocks(8, "a", 0) == 8 and made.allocate_blocks(10, "b", 0) == 10
            made.mark_shareable_blocks_as_complete("b", 10)
            made.free_blocks("b")
            # 24 MiB are not for padding: there are 6 more blocks, and 10 of prefixes.
            engine.requests["a"] = 8
            engine.arrived.append(("c", 9))
            assert engine.prepare_next_batch()
            # Three of them, the last ones, without having been given back: that has its effect when the step ends.
            assert len(made.tables["c"]) == 9 and list(manager._init_block_ids) == list(range(8, 15))
            assert sorted(manager._hash_to_id.values()) == list(range(8, 15)) and kv.stats().leaving == 0
            assert kv.stats().in_use == 7 + 9 + 7 and made.get_num_free_blocks() == 1000 - 17
            engine.update_batch()
            assert kv.stats().in_use == 7 and made.get_num_free_blocks() == 1000
            """
        )

    def test_a_request_that_waits_for_memory_leaves_the_step(self):
        case(
            """
            cuvmm.configure(limit="24MiB")
            with adapter.paged(name="chat", extent="2MiB", timeout=1e6):
                engine = continuous_api.processor(2, 16, torch.float16)
            kv, others, pauses = engine.cache.kv, [cuvmm.empty(14 * MIB)], []
            def pause(seconds):
                pauses.append(kv.stats().asleep)
                if len(pauses) == 1:
                    # The memory is there, and the cache is asleep.
                    others.clear()
                    cuvmm.sleep("chat", timeout=0)
                elif len(pauses) == 3:
                    cuvmm.wake("chat")
            adapter.time = type("Time", (), {"sleep": staticmethod(pause), "monotonic": adapter.time.monotonic})
            engine.arrived.append(("a", 16))
            assert engine.prepare_next_batch()
            assert len(pauses) == 3 and pauses[0] == 0 and pauses[1] == pauses[2] > 0, pauses
            assert len(engine.cache.tables["a"]) == 16
            refused(cuvmm.Error, lambda: cuvmm.sleep("chat", timeout=0))
            engine.update_batch()
            cuvmm.sleep("chat", timeout=0)
            """
        )

    def test_a_warm_up_of_all_blocks_waits_for_no_memory(self):
        case(
            """
            captured = []
            cuvmm.configure(limit="24MiB")
            with adapter.paged(name="chat", extent="2MiB", timeout=1e6):
                engine = continuous_api.processor(2, 16, torch.float16)
                engine.warmup(lambda: captured.append("some"))
                assert captured == ["some"] and engine.cache.kv.stats().in_use == 0
                engine = continuous_api.processor(2, 1000, torch.float16)
                engine.warmup(lambda: captured.append("many"))
                assert captured == ["some"] and engine.cache.get_num_free_blocks() == 1000
            """
        )

    def test_another_transformers_is_refused(self):
        case(
            """
            import importlib
            from transformers.generation.continuous_batching import cache_manager
            kept = cache_manager.BlockManager.free_blocks
            cache_manager.BlockManager.free_blocks = lambda self, blocks: None
            refused(ImportError, lambda: importlib.reload(adapter), "5.17", "BlockManager.free_blocks")
            cache_manager.BlockManager.free_blocks = kept
            importlib.reload(adapter)
            for place, name, said in ((cache_manager.BlockManager, "get_free_blocks", "BlockManager.get_free_blocks"),
                                      (continuous_api, "ContinuousBatchProcessor", "5.17.0, which is installed")):
                kept = getattr(place, name)
                delattr(place, name)
                refused(ImportError, lambda: importlib.reload(adapter), said)
                setattr(place, name, kept)
            """
        )

    def test_blocks_of_code_leave_what_was_installed(self):
        case(
            """
            cuvmm.configure(limit="24MiB")
            with adapter.paged(name="chat", extent="2MiB"):
                with adapter.paged(name="code", extent="2MiB"):
                    assert make().kv.name == "code"
                assert make().kv.name == "chat"
            assert continuous_api.PagedAttentionCache is cache.PagedAttentionCache
            adapter.install(name="all", extent="2MiB")
            for bad in (-1, None):
                try:
                    with adapter.paged(name="code", timeout=bad):
                        raise AssertionError("not refused")
                except (TypeError, ValueError):
                    pass
            refused = []
            def other():
                try:
                    with adapter.paged():
                        pass
                except cuvmm.Error as error:
                    refused.append(str(error))
            with adapter.paged(name="code", extent="2MiB"):
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            assert len(refused) == 1 and "another thread" in refused[0], refused
            other()
            assert len(refused) == 1
            assert make().kv.name == "all"
            adapter.uninstall()
            assert continuous_api.PagedAttentionCache is cache.PagedAttentionCache
            """
        )

    def test_what_cannot_be_is_refused(self):
        case(
            """
            refused(ValueError, lambda: adapter.install(timeout=-1))
            adapter.install()
            refused(cuvmm.Error, lambda: make(tp_size=2), "tensor-parallel")
            adapter.uninstall()
            adapter.uninstall()
            """
        )
