"""Paged caches, over the stand-in for libcuda."""

import os
import unittest

from support import HERE, frame, needs_stand_in

#: A cache of blocks of 1 MiB in extents of 2 MiB.
MAKE = """
import ctypes, gc, json
import torch
import cuvmm, cuvmm.torch
from cuvmm.torch import FreeNumbers, LayerGroup, Part
GROUP = LayerGroup.keys_and_values(2, 16, 8, 1024, torch.float16)

def make(blocks=64, groups=GROUP, **options):
    return cuvmm.torch.paged_kv(blocks, groups, **{"extent": "2MiB", "pinned": (), **options})

def fails(kind, text, call):
    refused(kind, call, text)
"""


case = frame(MAKE, fakes=True)


@needs_stand_in
class Paged(unittest.TestCase):
    def test_a_tensor_shows_the_blocks_of_a_part_of_a_layer(self):
        case(
            """
            for layout in ("block-major", "token-major", "layer-major"):
                kv = make(layout=layout, pinned=[63, 0, 63], name=layout)
                assert (kv.block_bytes, kv.extent, kv.pinned, kv.device) == (MIB, 2 * MIB, (0, 63), 0)
                assert repr(kv) == f"<cuvmm.torch.PagedKv {layout!r} 64 blocks of 1 MiB, {layout}, on device 0>"
                kv.back([5])
                written = {}
                for layer in range(2):
                    for part in range(2):
                        tensor = kv.tensor(layer, part)
                        assert tensor.shape == (64, 16, 8, 1024) and tensor.dtype is torch.float16
                        assert str(tensor.device) == "cuda:0"
                        block, token, head, element = tensor.stride()
                        assert (head, element) == (1024, 1)
                        for number in (0, 5, 63):
                            address = tensor.data_ptr() + 2 * (number * block + 15 * token + 7 * head)
                            written[address] = bytes([layer, part, number, 1])
                            ctypes.memmove(address, written[address], 4)
                assert len(written) == 12
                assert all(ctypes.string_at(address, 4) == it for address, it in written.items())
                whole = kv.whole()
                assert whole.shape == (64, 2, 2, 16, 8, 1024)
                for layer in range(2):
                    for part in range(2):
                        steps = zip((5, layer, part, 15, 7, 0), whole.stride(), strict=True)
                        at = whole.data_ptr() + 2 * sum(place * step for place, step in steps)
                        assert ctypes.string_at(at, 4) == bytes([layer, part, 5, 1])
            """
        )

    def test_shapes_of_other_models(self):
        case(
            """
            latent = make(8, LayerGroup(3, 64, [Part(1, 576, "bfloat16")]), name="latent")
            assert latent.tensor(2).shape == (8, 64, 1, 576)
            assert latent.whole().shape == (8, 3, 1, 64, 1, 576)
            eight = torch.float8_e4m3fn
            scaled = make(8, LayerGroup(2, 16, [Part(8, 128, eight), Part(8, 128, eight), Part(2, 8, "float32")]), name="scaled")
            assert scaled.tensor(1, 1).dtype is eight
            assert scaled.tensor(1, 2).shape == (8, 16, 2, 8)
            fails(ValueError, "differ", scaled.whole)
            # Groups share the numbers.
            window = LayerGroup.keys_and_values(1, 32, 8, 1024, torch.float16)
            two = make(8, [GROUP, window], name="two")
            assert two.tensor(0, 1, group=1).shape == (8, 32, 8, 1024)
            assert two.whole(1).shape == (8, 1, 2, 32, 8, 1024)
            small = LayerGroup.keys_and_values(1, 16, 8, 1024, torch.float16)
            fails(cuvmm.Error, "equal bytes", lambda: make(8, [GROUP, small], name="other"))
            """
        )

    def test_blocks_are_named_by_lists_arrays_and_tensors(self):
        case(
            """
            import array
            from cuvmm.torch import _numbers
            import doctest
            assert doctest.testmod(_numbers) == (0, 5), doctest.testmod(_numbers)
            kv = make()
            tensor = torch.empty((3,), dtype=torch.int64).fill((1).to_bytes(8, "little") + (8).to_bytes(8, "little") * 2)
            short = torch.empty((2,), dtype=torch.int32).fill((7).to_bytes(4, "little") + (6).to_bytes(4, "little"))
            for numbers in ([0, 2], range(2, 4), array.array("i", [4]), array.array("q", [5]), memoryview(array.array("I", [9, 0, 10]))[::2], tensor, short, (), {11}):
                kv.back(numbers)
            assert kv.stats().in_use == 12
            kv.release([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
            kv.release(array.array("l", [11]))
            assert kv.stats().in_use == 0
            strings = torch.empty((1,), dtype=torch.float32)
            there = torch.empty((1,), dtype=torch.int32, device="cuda:0")
            for numbers in (3, "ab", b"ab", [1.0], [None], array.array("d", [1]), array.array("h", [1]), strings, there):
                fails(TypeError, "", lambda: kv.back(numbers))
            for numbers in ([-1], [64], [1, 1 << 31], [1 << 63]):
                fails(cuvmm.Error, "block", lambda: kv.back(numbers))
            fails(cuvmm.Error, "not in use", lambda: kv.release([3]))
            assert kv.stats().in_use == 0
            """
        )

    def test_the_memory_lives_as_long_as_tensors_do(self):
        case(
            """
            kv = make(64, name="chat")
            kv.back(range(8))
            keys = kv.tensor(1)
            kv.close()
            kv.close()
            assert repr(kv).endswith("closed>")
            for call in (lambda: kv.back([1]), lambda: kv.release([1]), lambda: kv.tensor(0), kv.stats,
                         lambda: kv.record_use(0), kv.purge, lambda: kv.step().__enter__()):
                fails(cuvmm.Error, "closed", call)
            del kv
            gc.collect()
            cuvmm.empty_cache()
            assert cuvmm.stats().held == 8 * MIB
            ctypes.memmove(keys.data_ptr(), b"there", 5)
            del keys
            cuvmm.empty_cache()
            assert cuvmm.stats().held == 0
            """
        )

    def test_one_limit_has_all_memory(self):
        case(
            """
            cuvmm.configure(limit="64MiB")
            kv = make(1000, pinned=[999])
            array = cuvmm.empty(40 * MIB)
            kv.back(range(22))
            stats = cuvmm.stats()
            assert (stats.held, stats.live, stats.free) == (64 * MIB, 40 * MIB, 0), stats
            assert stats.all["paged"][0]["name"] == "paged" and stats.all["paged"][0]["in_use"] == 22
            figures = kv.stats()
            assert (figures.blocks, figures.in_use, figures.pinned, figures.committed) == (1000, 22, 1, 24 * MIB)
            assert not kv.can_allocate(1) and kv.can_allocate(0)
            fails(cuvmm.OutOfMemoryError, "cannot back", lambda: kv.back([22]))
            fails(cuvmm.OutOfMemoryError, "", lambda: kv.reserve(2))
            # What another cycle of references has is found once it is collected.
            array.itself = [array]
            del array
            kv.back([22, 23])
            kv.reserve(10)
            assert kv.stats().reserved == 10
            kv.reserve(0)
            fails(cuvmm.Error, "blocks to be reserved", lambda: kv.reserve(10000))
            with kv.step():
                kv.release(range(24))
                assert kv.stats().leaving == 24
            assert kv.stats().leaving == 0
            chosen = kv.emptiest("1MiB", range(1000))
            assert chosen == ([], 0)
            kv.back([2, 3, 4])
            assert kv.emptiest(1, [2, 3, 4, 500]) == ([4], 2 * MIB)
            assert kv.emptiest("3MiB", [2, 3, 4]).bytes == 4 * MIB
            kv.release([2, 3, 4])
            assert kv.purge() > 0
            for call in (lambda: kv.reserve(-1), lambda: kv.can_allocate(1 << 32), lambda: kv.tensor(-1)):
                fails(ValueError, "4294967295", call)
            """
        )

    def test_memory_is_mapped_ahead(self):
        case(
            """
            import time
            kv = make(precommit=10)
            kv.back([0])
            until = time.monotonic() + 100
            while kv.stats().precommitted < 10 * MIB and time.monotonic() < until:
                time.sleep(0.001)
            stats = kv.stats()
            assert (stats.in_use, stats.precommitted, stats.held) == (1, 10 * MIB, 12 * MIB), stats
            kv.back([1, 2])
            assert kv.stats().in_use == 3
            """
        )

    def test_what_cannot_be_is_refused(self):
        case(
            """
            for kind, text, options in [
                (cuvmm.Error, "", {"blocks": 0}), (ValueError, "", {"blocks": 1 << 32}), (ValueError, "", {"blocks": -1}),
                (TypeError, "", {"blocks": 1.5}), (ValueError, "layout is 'block-major'", {"layout": "rows"}),
                (cuvmm.Error, "extent", {"extent": 3 << 20}), (cuvmm.Error, "block 64", {"pinned": [64]}),
                (ValueError, "name", {"name": ""}), (TypeError, "name", {"name": 5}), (ValueError, "timeout", {"timeout": -1}),
                (cuvmm.Error, "", {"device": 7}), (cuvmm.Error, "groups", {"groups": []}),
                (cuvmm.Error, "heads", {"groups": LayerGroup(1, 1, [Part(0, 1, "int8")])}),
                (ValueError, "heads", {"groups": LayerGroup(1, 1, [Part(-1, 1, "int8")])}),
                (ValueError, "int99", {"groups": LayerGroup(1, 1, [Part(1, 1, "int99")])}),
                (ValueError, "None", {"groups": LayerGroup(1, 1, [Part(1, 1, None)])}),
                (TypeError, "LayerGroup", {"groups": "x"}),
                (cuvmm.Error, "torch", {"name": "torch"}),
            ]:
                fails(kind, text, lambda: make(**{"blocks": 64, "groups": GROUP, **options}))
            kv = make()
            for place in ((2, 0, 0), (0, 2, 0), (0, 0, 1)):
                fails(cuvmm.Error, "no part", lambda: kv.tensor(*place))
            fails(TypeError, "stream", lambda: kv.record_use("0"))
            fails(cuvmm.Error, "", lambda: kv.record_use(2))
            kv.record_use(0)
            fails(TypeError, "on_pressure", lambda: make(on_pressure=3))
            fails(ValueError, "precommit", lambda: make(precommit=-1))
            fails(TypeError, "copied", lambda: __import__("pickle").dumps(cuvmm.torch._paged._View(1, kv._cache)))
            """
        )

    def test_hooks_give_blocks_up(self):
        case(
            """
            import threading
            cuvmm.configure(limit="16MiB")
            asked = []
            def evict(kv, missing):
                asked.append((kv.name, missing))
                chosen = kv.emptiest(missing, prefixes)
                kv.release(chosen.numbers)
                prefixes.difference_update(chosen.numbers)
            chat = make(name="chat", on_pressure=evict)
            code = make(name="code")
            prefixes = set(range(16))
            chat.back(prefixes)
            code.back([0, 1])
            assert asked == [("chat", 2 * MIB)] and len(prefixes) == 14
            # An allocation, of a thread too, and the cache's own request.
            array = cuvmm.empty(2 * MIB)
            thread = threading.Thread(target=lambda: code.back([2, 3]))
            thread.start()
            thread.join()
            assert asked[1:] == [("chat", 2 * MIB)] * 2 and len(prefixes) == 10
            chat.back([20, 21])
            assert len(asked) == 4 and len(prefixes) == 8
            # Not for memory of a pool: PyTorch has a lock then.
            try:
                with cuvmm.torch.pool("weights"):
                    torch.empty(2 * MIB)
            except torch.cuda.OutOfMemoryError:
                pass
            assert len(asked) == 4
            # After its end there is no hook, and what it raises is not lost.
            chat.close()
            def fail(kv, missing):
                raise KeyError("on purpose")
            other = make(name="other", on_pressure=fail, pinned=[1])
            import sys
            raised = []
            sys.unraisablehook = lambda it: raised.append(it.exc_value)
            fails(cuvmm.OutOfMemoryError, "", lambda: code.back(range(4, 60)))
            code.back(range(4, 12))
            fails(cuvmm.OutOfMemoryError, "", lambda: code.back([12]))
            assert raised and all(isinstance(it, KeyError) for it in raised), raised
            del other, array
            code.back([12])
            """
        )

    def test_ctrl_c_within_a_hook_is_raised_when_the_call_returns(self):
        case(
            """
            import signal, threading
            cuvmm.configure(limit="16MiB")
            # A program in the background of a shell begins with the signal ignored.
            asked, usual = [], signal.default_int_handler
            signal.signal(signal.SIGINT, usual)
            def evict(kv, missing):
                asked.append(missing)
                signal.raise_signal(signal.SIGINT)
                kv.release(list(range(2 * len(asked) - 2, 2 * len(asked))))
            other = make(name="code", on_pressure=evict)
            other.back(range(16))
            kv = make(name="chat")
            fails(KeyboardInterrupt, "", lambda: kv.back([0, 1]))
            fails(KeyboardInterrupt, "", lambda: kv.reserve(2))
            assert len(asked) == 2 and (kv.stats().in_use, kv.stats().reserved) == (2, 2)
            assert signal.getsignal(signal.SIGINT) is usual
            # A handler of the program's own is called at once.
            noted = []
            signal.signal(signal.SIGINT, lambda *it: noted.append(len(asked)))
            kv.back(range(6))
            assert noted == [3] and kv.stats().in_use == 6
            # One that the hook sets stays.
            signal.signal(signal.SIGINT, usual)
            def ignore(_kv, _missing):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            other._on_pressure = ignore
            fails(cuvmm.OutOfMemoryError, "", lambda: kv.back(range(8)))
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            """
        )

    def test_an_attempt_without_waiting_calls_no_hook_and_collects_no_garbage(self):
        case(
            """
            cuvmm.configure(limit="16MiB")
            gc.disable()
            asked, collected = [], []
            gc.callbacks.append(lambda phase, info: collected.append(phase))
            other = make(name="code", on_pressure=lambda kv, missing: asked.append(missing))
            other.back(range(16))
            kv = make(name="chat")
            assert kv.try_back([]) and not kv.try_back([0, 1]) and kv.stats().in_use == 0
            assert not asked and not collected and not kv.can_allocate(1)
            fails(cuvmm.OutOfMemoryError, "cannot back 2 blocks", lambda: kv.back([0, 1]))
            assert asked and collected == ["start", "stop"], (asked, collected)
            other.release([14, 15])
            assert kv.can_allocate(2) and kv.try_back([0, 1]) and kv.stats().in_use == 2
            fails(cuvmm.Error, "block 64", lambda: kv.try_back([64]))
            cuvmm.sleep("chat")
            fails(cuvmm.Error, "sleeps", lambda: kv.try_back([0]))
            kv.close()
            fails(cuvmm.Error, "closed", lambda: kv.try_back([0]))
            """
        )

    def test_a_request_stays_in_line_while_its_caller_goes_on(self):
        case(
            """
            import signal, threading, time, weakref
            cuvmm.configure(limit="16MiB")
            asked = []
            other = make(name="code")
            other.back(range(16))
            kv = make(name="chat")
            request = kv.back_async([0, 1])
            assert not request.done() and repr(request).startswith("<cuvmm.torch.BackRequest ")
            fails(TimeoutError, "still waits", lambda: request.result(0))
            fails(ValueError, "negative", lambda: request.result(-1.0))
            fails(TypeError, "seconds", lambda: request.result("a"))
            # The interpreter runs meanwhile.
            threading.Timer(0.05, lambda: other.release([0, 1])).start()
            request.result(100)
            assert request.done() and kv.stats().in_use == 2 and repr(request).endswith(" done>")
            request.result()
            request.cancel()
            assert kv.stats().in_use == 2

            # Memory that was granted is the request's until it is taken, cancelled or gone.
            def granted(numbers):
                request = kv.back_async(numbers)
                other.release([2, 3])
                while not request.done():
                    time.sleep(1e-3)
                assert kv.stats().in_use == 2 and not other.try_back([2])
                assert kv.stats().granted == 2 * MIB
                return request
            granted([2, 3]).cancel()
            assert kv.stats().granted == 0
            other.back([2, 3])
            request = granted([2, 3])
            del request
            gc.collect()
            other.back([2, 3])
            request = granted([0, 2, 3])
            fails(cuvmm.Error, "in use", lambda: cuvmm.sleep("chat", timeout=0))
            request.result(0)
            assert kv.stats().in_use == 4
            other.release([4, 5, 6, 7])
            cancelled = kv.back_async([8, 9])
            assert cancelled.done() and kv.stats().in_use == 4
            cancelled.cancel()
            assert cancelled.done()
            fails(cuvmm.Error, "was cancelled", cancelled.result)
            request = kv.back_async([8, 9])
            assert request.done()
            del request
            gc.collect()
            assert kv.stats().in_use == 4 and kv.stats().committed == 4 * MIB
            # Several threads wait for one request, and one of them cancels it too late.
            outcomes = []
            def taken(request):
                request.result(100)
                outcomes.append(request)
            for _ in range(20):
                other.back(range(4, 8))
                request = kv.back_async([8, 9, 10, 11])
                threads = [threading.Thread(target=taken, args=(request,)) for _ in range(4)]
                for thread in threads:
                    thread.start()
                other.release(range(4, 8))
                for thread in threads:
                    thread.join()
                request.cancel()
                request.result()
                kv.release([8, 9, 10, 11])
            assert len(outcomes) == 80
            # A signal that comes with the grant leaves the blocks to the request.
            class Stops:
                def __getattr__(self, name):
                    return getattr(library, name)
                def paged_request_wait(self, *arguments):
                    assert library.paged_request_wait(*arguments) == 1
                    raise KeyboardInterrupt
            from cuvmm import _library
            library, request = _library.get(), kv.back_async([8, 9])
            get, _library.get = _library.get, Stops
            fails(KeyboardInterrupt, "", request.result)
            _library.get = get
            assert kv.stats().in_use == 4
            request.cancel()
            fails(cuvmm.Error, "was cancelled", request.result)
            assert kv.stats().in_use == 4 and kv.stats().committed == 4 * MIB
            # A thread that asks while another one cancels has the same outcome.
            class Ends(Stops):
                def paged_request_wait(self, *arguments):
                    return library.paged_request_wait(*arguments)
                def paged_request_end(self, token):
                    ended = library.paged_request_end(token)
                    fails(cuvmm.Error, "was cancelled", request.result)
                    return ended
            request, _library.get = kv.back_async([8, 9]), Ends
            request.cancel()
            _library.get = get
            fails(cuvmm.Error, "was cancelled", request.result)
            other.back(range(4, 8))

            # Refused at once, later, and by the end of the cache.
            denied = kv.back_async([64])
            assert denied.done()
            for _ in range(2):
                fails(cuvmm.Error, "block 64", denied.result)
            fails(cuvmm.OutOfMemoryError, "cannot back 40 blocks", kv.back_async(range(8, 48)).result)
            waiting = kv.back_async([8, 9])
            cuvmm.sleep("chat")
            fails(cuvmm.Error, "sleeps", waiting.result)
            cuvmm.wake("chat")
            waiting = kv.back_async([8, 9])
            kept = kv.tensor(0)
            kv.close()
            assert waiting.done()
            fails(cuvmm.Error, "is closed", waiting.result)
            del kept
            fails(cuvmm.Error, "closed", lambda: kv.back_async([0]))

            # Hooks run on a thread of the library.
            threads = []
            def evict(kv, missing):
                threads.append(threading.current_thread())
                if len(threads) == 1:
                    fails(cuvmm.Error, "cannot wait", stands.result)
                    kv.release([4, 5])
            stands = other.back_async(range(42, 56))
            hooked = make(name="hooked", on_pressure=evict)
            hooked.back([0, 4, 5])
            request = other.back_async([40, 41])
            request.result(100)
            fails(TimeoutError, "still waits", lambda: stands.result(0))
            stands.cancel()
            assert threads and threads[0] is not threading.main_thread(), threads

            # A signal is handled while a result is waited for.
            def stop(*_):
                raise KeyboardInterrupt
            signal.signal(signal.SIGALRM, stop)
            request = other.back_async([50, 51])
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            fails(KeyboardInterrupt, "", request.result)
            assert not request.done()
            """
        )

    def test_requests_are_polled_by_tasks_and_given_up_by_threads(self):
        case(
            """
            import asyncio, random, threading
            cuvmm.configure(limit="32MiB")
            other, kv = make(name="code"), make(name="chat")
            other.back(range(32))

            async def polled(numbers):
                request = kv.back_async(numbers)
                try:
                    while not request.done():
                        await asyncio.sleep(0)
                    request.result(0)
                finally:
                    # The traceback of a task that is cancelled has the request.
                    request.cancel()

            async def main():
                tasks = [asyncio.create_task(polled([2 * n, 2 * n + 1])) for n in range(3)]
                threaded = asyncio.to_thread(lambda: kv.back_async([6, 7]).result())
                await asyncio.sleep(0)
                tasks[0].cancel()
                other.release(range(6))
                await asyncio.gather(threaded, *tasks[1:])

            asyncio.run(main())
            gc.collect()
            assert kv.stats().in_use == 6 and kv.stats().granted == 0
            kv.release(range(2, 8))
            other.release(range(6, 32))

            def engine(kv, first):
                draws, held = random.Random(first), set()
                for turn in range(100):
                    numbers = draws.sample(range(first, first + 16), 3)
                    if held.isdisjoint(numbers):
                        request = kv.back_async(numbers)
                        if draws.random() < 0.7 and request.done():
                            request.result(0)
                            held.update(numbers)
                        elif draws.random() < 0.5:
                            request.cancel()
                        del request
                    ended = {number for number in held if draws.random() < 0.4}
                    kv.release(sorted(ended))
                    held -= ended
                kv.release(sorted(held))

            threads = [threading.Thread(target=engine, args=(it, 16 * n)) for it in (kv, other) for n in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for stats in (kv.stats(), other.stats()):
                assert stats.in_use == stats.granted == stats.committed == 0
            """
        )

    def test_a_child_or_the_end_of_the_program_leaves_requests_alone(self):
        case(
            """
            import os, threading, warnings
            warnings.simplefilter("ignore")
            cuvmm.configure(limit="16MiB")
            other = make(name="code", on_pressure=lambda kv, missing: None)
            kv = make(name="chat")
            other.back(range(14))
            granted, waiting = kv.back_async([0, 1]), kv.back_async([2])
            child = os.fork()
            if child == 0:
                for call in (waiting.done, waiting.result, lambda: granted.result(0), lambda: kv.back_async([3])):
                    fails(cuvmm.Error, "fork", call)
                waiting.cancel()
                del granted, waiting, kv, other
                gc.collect()
                raise SystemExit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert not waiting.done()
            granted.result(0)
            assert kv.stats().in_use == 2
            # Both are in line at the end, and a thread waits for one.
            threading.Thread(target=waiting.result, daemon=True).start()
            more = kv.back_async([4])
            """
        )

    def test_a_hint_counts_what_other_processes_have_idle(self):
        case(
            """
            import subprocess, sys, tempfile, time
            with tempfile.TemporaryDirectory() as folder:
                cuvmm.configure(ledger=folder, ledger_limit="64MiB", tenant="first")
                kv = make(name="chat", timeout=100.0)
                other = '''
            import sys, cuvmm, torch, cuvmm.torch
            cuvmm.configure(ledger=sys.argv[1], tenant="second")
            group = cuvmm.torch.LayerGroup.keys_and_values(2, 16, 8, 1024, "float16")
            kv = cuvmm.torch.paged_kv(64, group, extent="2MiB", pinned=(), name="code")
            kv.back(range(64))
            print("has all", flush=True)
            sys.stdin.readline()
            kv.release(range(32))
            torch.cuda.synchronize()
            print("has half", flush=True)
            sys.stdin.readline()
            '''
                child = subprocess.Popen([sys.executable, "-c", dedent(other), folder],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                assert child.stdout.readline() == "has all\\n"
                assert not kv.can_allocate(1) and not kv.try_back([0])
                child.stdin.write("\\n")
                child.stdin.flush()
                assert child.stdout.readline() == "has half\\n"
                # The other process finds it idle about once a second.
                until = time.monotonic() + 100
                while not kv.can_allocate(32):
                    assert time.monotonic() < until
                    time.sleep(0.05)
                assert not kv.can_allocate(33) and not kv.try_back([0])
                kv.back(range(32))
                child.communicate("\\n")
                assert child.returncode == 0
            """
        )

    def test_two_servers_share_memory_under_a_ledger(self):
        out = case(
            """
            import os, re, signal, subprocess, sys, tempfile
            def start(name):
                options = ["--ledger", folder, "--limit", "192MiB", "--guarantee", "48MiB", "--extent", "2MiB",
                           "--blocks", "256", "--pause", "0"]
                command = [sys.executable, os.environ["SERVER"], name, *options]
                return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            with tempfile.TemporaryDirectory() as folder:
                servers = [start("chat"), start("code")]
                for server in servers:
                    while not int(re.search(r"(\\d+) ended", server.stdout.readline())[1]):
                        pass
                if command := os.environ.get("CUVMM_COMMAND"):
                    top = subprocess.run([command, "top", "--json", "--ledger", folder], capture_output=True, check=True)
                    (ledger,) = json.loads(top.stdout)["ledgers"]
                    names = {it["name"]: {tenant["name"] for tenant in it["report"]["pools"][0]["tenants"]}
                             for it in ledger["processes"]}
                    assert names == {"chat": {"chat", "kv"}, "code": {"code", "kv"}}, names
                for server in servers:
                    server.send_signal(signal.SIGINT)
                for server in servers:
                    last = server.communicate()[0].splitlines()[-1]
                    assert server.returncode == 0 and " 0 blocks in use, 0 of them prefixes" in last, last
            """,
            SERVER=os.path.join(os.path.dirname(HERE), "examples", "paged_server.py"),
        )
        self.assertEqual(out, "")

    def test_a_hook_gives_blocks_up_for_another_process(self):
        case(
            """
            import subprocess, sys, tempfile
            with tempfile.TemporaryDirectory() as folder:
                cuvmm.configure(ledger=folder, ledger_limit="64MiB", tenant="first")
                prefixes = list(range(60))
                def evict(kv, missing):
                    chosen = kv.emptiest(missing, prefixes)
                    kv.release(chosen.numbers)
                    prefixes[:] = set(prefixes) - set(chosen.numbers)
                kv = make(name="chat", on_pressure=evict)
                kv.back(prefixes)
                other = '''
            import sys, cuvmm, torch, cuvmm.torch
            cuvmm.configure(ledger=sys.argv[1], tenant="second")
            group = cuvmm.torch.LayerGroup.keys_and_values(2, 16, 8, 1024, "float16")
            kv = cuvmm.torch.paged_kv(64, group, extent="2MiB", pinned=(), name="code", timeout=100.0)
            kv.back(range(20))
            assert kv.stats().in_use == 20
            '''
                ended = subprocess.run([sys.executable, "-c", dedent(other), folder])
                assert ended.returncode == 0
                assert 20 <= len(prefixes) <= 44, prefixes
            """
        )

    def test_caches_sleep_with_the_pool_of_their_name(self):
        case(
            """
            with cuvmm.torch.pool("chat"):
                weights = torch.empty(4 * MIB)
            kv, other = make(name="chat", pinned=[63]), make(name="code")
            kv.back([0, 1, 9])
            other.back([0])
            keys = kv.tensor(1)
            at = keys.data_ptr() + 9 * MIB
            pools = {it["name"]: (it["bytes"], it["paged"]) for it in cuvmm.stats().all["pools"]}
            assert pools == {"chat": (10 * MIB, 6 * MIB), "code": (2 * MIB, 2 * MIB)}, pools
            for keep in (True, False):
                ctypes.memmove(at, b"there", 5)
                cuvmm.prepare("chat")
                slept = cuvmm.sleep("chat", keep=keep)
                assert (slept.given, slept.held) == ({"chat": 10 * MIB}, {"code": 2 * MIB}), slept
                assert cuvmm.asleep() == {"chat"}
                stats, figures = cuvmm.stats(), kv.stats()
                assert (stats.held, stats.sleeping) == (2 * MIB, 10 * MIB), stats
                assert (figures.committed, figures.asleep, figures.in_use, figures.pinned) == (0, 6 * MIB, 3, 1)
                assert {it["asleep"] for it in stats.all["paged"] if it["name"] == "chat"} == {6 * MIB}
                for call in (lambda: kv.back([2]), lambda: kv.release([0]), lambda: kv.reserve(1)):
                    fails(cuvmm.Error, "call cuvmm.wake(\\"chat\\") first", call)
                fails(cuvmm.Error, "asleep", lambda: make(name="chat"))
                fails(cuvmm.Error, "asleep", lambda: cuvmm.torch.pool("chat").__enter__())
                assert not kv.can_allocate(1) and kv.purge() == 0 and kv.tensor(1).data_ptr() == keys.data_ptr()
                cuvmm.wake("chat")
                assert ctypes.string_at(at, 5) == (b"there" if keep else bytes(5))
                assert cuvmm.release_host("chat") > 0
            with kv.step():
                kv.release([9])
                fails(cuvmm.Error, "chat", lambda: cuvmm.sleep("chat", timeout=0))
            kv.back([9])
            # All at once, and the last cache ends asleep.
            ctypes.memmove(at, b"again", 5)
            cuvmm.sleep()
            cuvmm.wake("code")
            slept = cuvmm.exchange(sleep="code", wake="chat")
            assert slept.given == {"code": 2 * MIB} and ctypes.string_at(at, 5) == b"again"
            other.close()
            cuvmm.wake()
            assert cuvmm.stats().sleeping == 0
            """
        )

    def test_a_paused_tag_of_the_memory_saver_pauses_its_caches(self):
        case(
            """
            from cuvmm.torch.memory_saver import torch_memory_saver
            kv = make(name="cache+backup")
            kv.back([0])
            at = kv.tensor(0).data_ptr()
            ctypes.memmove(at, b"there", 5)
            with torch_memory_saver.region(tag="cache", enable_cpu_backup=True):
                tensor = torch.empty(4 * MIB)
            torch_memory_saver.pause("cache")
            assert (kv.stats().asleep, kv.stats().committed, cuvmm.stats().sleeping) == (2 * MIB, 0, 6 * MIB)
            torch_memory_saver.resume("cache")
            assert ctypes.string_at(at, 5) == b"there"
            """
        )

    def test_a_pool_and_a_cache_of_one_name_share_it(self):
        case(
            """
            cuvmm.configure(limit="16MiB")
            asked = []
            def evict(kv, missing):
                asked.append(missing)
                kv.release(kv.emptiest(missing, range(8)).numbers)
            kv = make(name="chat")
            with cuvmm.torch.pool("chat"):
                first = torch.empty(3 * MIB)
            second = make(name="chat", on_pressure=evict)
            second.back(range(8))
            other = make(name="code")
            other.back(range(6))
            assert asked == [2 * MIB] and second.stats().in_use == 6, (asked, second.stats())
            kv.close()
            second.close()
            fails(cuvmm.OutOfMemoryError, "", lambda: other.back(range(16)))
            assert len(asked) == 1
            with cuvmm.torch.pool("chat"):
                torch.empty(1)
            fails(cuvmm.Error, "configure(tenant", lambda: make(name="torch"))
            with cuvmm.torch.pool("sent", shareable=True):
                pass
            fails(cuvmm.Error, "shareable", lambda: make(name="sent"))
            fails(cuvmm.Error, "not shareable", lambda: cuvmm.torch.pool("code", shareable=True).__enter__())
            """
        )

    def test_a_cache_has_no_name_of_the_process(self):
        text = "configure(tenant=...)): use another name"
        for before in ("", "with cuvmm.torch.pool('chat'): tensor = torch.empty(MIB)"):
            case(
                f"""
                cuvmm.configure(tenant="chat")
                {before}
                fails(cuvmm.Error, {text!r}, lambda: make(name="chat"))
                with cuvmm.torch.pool("chat"):
                    other = torch.empty(MIB)
                fails(cuvmm.Error, {text!r}, lambda: make(name="chat"))
                kv = make(name="torch")
                kv.back([0])
                with cuvmm.torch.pool("torch"):
                    third = torch.empty(MIB)
                # The device's memory has its terms by now.
                fails(cuvmm.Error, "", lambda: cuvmm.configure(tenant="torch"))
                assert kv.try_back([1, 2]) and kv.name == "torch"
                cuvmm.sleep("torch")
                assert (kv.stats().asleep, cuvmm.stats().sleeping) == (4 * MIB, 5 * MIB), cuvmm.stats()
                cuvmm.wake("torch")
                assert kv.stats().in_use == 3 and cuvmm.stats().sleeping == 0
                """
            )

    def test_a_forked_child_changes_nothing(self):
        case(
            """
            import os
            kv = make()
            kv.back([1])
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for call in (lambda: kv.back([2]), lambda: kv.release([1]), kv.stats, lambda: kv.tensor(0)):
                        fails(cuvmm.Error, "fork", call)
                    del kv
                    gc.collect()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert kv.stats().in_use == 1
            """
        )

    def test_free_numbers(self):
        case(
            """
            import random
            free = FreeNumbers(500, without=[0, 499])
            known, taken = set(range(1, 499)), []
            assert len(free) == 498 and 0 not in free and 3 in free and -1 not in free and list(free) == sorted(known)
            assert repr(free) == "<cuvmm.torch.FreeNumbers 498 of 500>"
            chance = random.Random(5)
            for _ in range(3000):
                if chance.random() < 0.6 and known:
                    count = chance.randrange(1, min(9, len(known) + 1))
                    numbers = free.popleft_n(count) if count > 1 else [free.popleft()]
                    assert numbers == sorted(known)[:count]
                    known.difference_update(numbers)
                    taken += numbers
                elif taken:
                    chance.shuffle(taken)
                    back, taken = taken[:3], taken[3:]
                    free.append_n(back) if len(back) > 1 else free.append(back[0])
                    known.update(back)
                elif known:
                    number = chance.choice(sorted(known))
                    free.remove(number)
                    known.discard(number)
                    taken.append(number)
                assert len(free) == len(known) and list(free) == sorted(known)
            free.append_n(taken)
            rest = free.popleft_n(len(free))
            assert rest == list(range(1, 499)) and not free
            fails(IndexError, "free", free.popleft)
            fails(IndexError, "free", lambda: free.popleft_n(1))
            free.extend(rest)
            for numbers in ([1, 1], [500], [-1], [rest[0]]):
                fails(ValueError, "block", lambda: free.append_n(numbers))
            fails(ValueError, "not free", lambda: free.remove(0))
            for blocks in (0, -1, 1 << 31):
                fails(ValueError, "blocks", lambda: FreeNumbers(blocks))
            fails(ValueError, "not free", lambda: FreeNumbers(3, without=[1, 1]))
            assert make(8, pinned=[0, 7]).free_numbers().popleft_n(6) == [1, 2, 3, 4, 5, 6]
            assert cuvmm.torch.paged_kv(8, GROUP, name="plain").pinned == (0,)
            """
        )
