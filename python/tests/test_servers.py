"""The comparison of two servers: what arrives, what a server does, and the figures. It needs no GPU."""

import os
import sys
import tempfile
import textwrap
import unittest

from support import HERE, needs_stand_in, run

BENCH = os.path.join(os.path.dirname(HERE), "bench")
sys.path.insert(0, BENCH)

import paged_caches
import paged_engine
import paged_servers
from paged_caches import Whole
from paged_engine import Costs, Request, Server


def request(number: int, at: float, context: int, generated: int) -> Request:
    return Request(number, at, context, generated, prompt=context)


class Checked(Costs):
    """Costs that check which requests and blocks a step has."""

    def __init__(self, cache: Whole) -> None:
        super().__init__()
        self.cache, self.steps, self.tokens = cache, 0, 0

    def run(self, decodes, chunks):
        rows = [(one, 1) for one in decodes] + chunks
        numbers = [number for one, _ in rows for number in one.numbers]
        assert len(set(numbers)) == len(numbers) and not set(numbers) & set(self.cache.free)
        assert len({one.slot for one, _ in rows}) == len(rows)
        assert all(one.length + count <= len(one.numbers) * paged_caches.BLOCK for one, count in rows)
        assert all(one.length >= one.prompt for one in decodes)
        assert sum(count for _, count in chunks) <= paged_engine.CHUNK
        self.steps += 1
        self.tokens += sum(count for _, count in rows)
        super().run(decodes, chunks)


def played(requests: list[Request], blocks: int, until: float = float("inf")) -> tuple[Server, Checked]:
    cache = Whole(blocks)
    model = Checked(cache)
    server = Server(requests, cache, model, model)
    server.play(until)
    return server, model


class Arrivals(unittest.TestCase):
    def read(self, rows: list[str], scale: float, seconds: float) -> list[Request]:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.csv")
            with open(path, "w", newline="") as file:
                file.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "\r\n".join(rows))
            return paged_engine.requests_of(path, scale, seconds)

    def test_a_trace_begins_at_its_second_180_and_is_scaled(self):
        rows = [
            "2023-11-16 18:00:00.0000000,1,1",
            "2023-11-16 18:03:00.5000000,100,7",
            "2023-11-16 18:03:02.0000000,0,0",
            "2023-11-16 18:03:03.0000000,8192,1",
            "2023-11-16 18:03:04.0000000,3,3",
        ]
        found = self.read(rows, 2.0, 2.0)
        self.assertEqual([(one.at, one.context, one.generated) for one in found], [(0.25, 100, 7), (1.0, 1, 1)])
        self.assertEqual([(one.number, one.prompt) for one in found], [(0, 100), (1, 1)])
        self.assertEqual([one.at for one in self.read(rows, 1.0, 5.0)], [0.5, 2.0, 4.0])


class Serving(unittest.TestCase):
    def test_all_tokens_are_handed_out_and_all_blocks_come_back(self):
        requests = [request(number, number * 0.01, 30 + number * 97 % 900, 1 + number % 40) for number in range(60)]
        server, model = played(requests, 4096)
        figures = server.figures(1.0)
        self.assertEqual((figures["requests"], figures["ended"], figures["preempted"]), (60, 60, 0))
        self.assertEqual(sum(tokens for _, tokens in server.handed), sum(one.generated for one in requests))
        # The last token of a request is not computed with.
        self.assertEqual(model.tokens, sum(one.context + one.generated - 1 for one in requests))
        self.assertEqual((len(server.cache.free), len(server.slots)), (4095, paged_engine.RUNNING))
        self.assertEqual(len(figures["ttft_s"]), 60)
        self.assertEqual(len(figures["spent_s"]), model.steps)

    def test_the_youngest_is_preempted_and_computed_again(self):
        # Each has 10 blocks at the end, and all of them have 23.
        requests = [request(number, 0.0, 100, 60) for number in range(4)]
        server, model = played(requests, 24)
        self.assertEqual(server.ended, 4)
        self.assertGreater(server.preempted, 0)
        self.assertGreater(model.tokens, 4 * 159)
        self.assertEqual(sum(tokens for _, tokens in server.handed), 240)
        self.assertEqual(sorted(server.cache.free), list(range(1, 24)))
        # One first token for each, whose order is that of arrival.
        self.assertEqual(len(server.first), 4)
        self.assertEqual([one.first for one in requests], sorted(one.first for one in requests))

    def test_prompts_go_in_parts_and_in_order(self):
        requests = [request(0, 0.0, 6000, 2), request(1, 0.0, 3000, 2), request(2, 0.0, 10, 2)]
        server, _ = played(requests, 2048)
        first = [one.first for one in requests]
        self.assertEqual(first, sorted(first))
        step = Costs.step + 4096 * Costs.prompt_token
        self.assertAlmostEqual(requests[0].first, step + Costs.step + 4096 * Costs.prompt_token)

    def test_a_request_without_a_token_counts_with_its_wait(self):
        # The second never fits beside the first, which takes longer than is played.
        requests = [request(0, 0.0, 160, 2000), request(1, 0.5, 160, 1), request(2, 50.0, 1, 1)]
        server, _ = played(requests, 12, until=2.0)
        figures = server.figures(1.0)
        self.assertEqual((figures["requests"], figures["ended"], figures["unserved"]), (3, 0, 1))
        self.assertEqual(len(figures["ttft_s"]), 2)
        self.assertAlmostEqual(figures["ttft_s"][1], figures["played_s"] - 0.5)
        server.abandon()
        self.assertEqual((len(server.cache.free), len(server.slots)), (11, paged_engine.RUNNING))

    def test_memory_that_the_other_server_has_is_waited_for(self):
        class Other(Whole):
            """Has no memory before a time."""

            def take(self, count):
                return super().take(count) if model.now() >= 1.0 else None

        cache = Other(64)
        model = Checked(cache)
        server = Server([request(0, 0.0, 100, 2)], cache, model, model)
        server.play(5.0)
        self.assertEqual((server.ended, server.preempted), (1, 0))
        self.assertGreaterEqual(server.first[0], 1.0)


class Figures(unittest.TestCase):
    def one(self, **changed):
        figures = {
            "requests": 2,
            "ended": 1,
            "ttft_s": [0.1, 3.0],
            "unserved": 1,
            "tokens_per_s": 10.0,
            "spent_s": [1e-6, 3e-6],
            "samples": [(10, 20, 30), (30, 60, 90)],
            "preempted": 1,
            "wrong": 0,
            "played_s": 1.0,
        }
        return {**figures, **changed}

    def test_both_servers_are_summed_up(self):
        row = paged_servers.summary("both", [self.one(), self.one(ttft_s=[0.2], wrong=2, samples=[(60, 20, 80)])])
        self.assertEqual((row["requests"], row["ended"], row["unserved"], row["wrong"]), (4, 2, 2, 2))
        self.assertEqual((row["ttft_p50_ms"], row["ttft_p99_ms"], row["tokens_per_s"]), (200.0, 3000.0, 20.0))
        self.assertAlmostEqual(row["memory_us_per_step"], 2.0)
        self.assertAlmostEqual(row["memory_share"], 4e-6)
        self.assertEqual((row["held_over_live"], row["mapped_over_live"]), (1.0, 2.0))
        line = "| both | 4 | 2 | 2 | 200 | 3000 | 20 | 2.0 | 3 | 0.00 | 1.00 | 2.00 | 2 | 2 |"
        self.assertIn(line, paged_servers.table([row]))

    def test_nothing_played_is_a_row_of_zeros(self):
        row = paged_servers.summary("conv", [])
        self.assertEqual((row["ttft_p99_ms"], row["held_over_live"], row["memory_us_per_step"]), (0.0, 0.0, 0.0))

    def test_options_that_do_not_fit_are_refused(self):
        for arguments in (
            ["halves", "--conv", "a"],
            ["cuvmm", "--dry", "--conv", "a", "--code", "b"],
            ["find", "--service", "code", "--conv", "a"],
            ["halves", "--conv", "a", "--code", "b", "--memory", "1"],
            ["halves", "--conv", "a", "--code", "b", "--scale", "0"],
        ):
            with self.assertRaises(SystemExit), open(os.devnull, "w") as quiet:
                kept, sys.stderr = sys.stderr, quiet
                try:
                    paged_servers.options_of(arguments)
                finally:
                    sys.stderr = kept
        self.assertEqual(paged_servers.options_of(["find", "--conv", "a"]).seconds, 5.0)


def fails(order, pipe):
    """A server whose process ends before it is ready."""
    os._exit(3)


def answers(order, pipe):
    """A server that says nothing but its name."""
    pipe.send(5)
    pipe.recv()
    pipe.send({"name": order.name})
    pipe.send(None)


class Processes(unittest.TestCase):
    def test_a_server_that_ends_is_named_and_the_other_one_is_heard(self):
        orders = [paged_servers.Order(name, "halves", "", 1.0, 0.0, 16, None) for name in ("conv", "code")]
        results = paged_servers.play(orders, False, [fails, answers])
        self.assertEqual([(order.name, found, error) for order, found, error in results], [
            ("conv", [], "it ended with exit code 3"),
            ("code", [{"name": "code"}], ""),
        ])


@needs_stand_in
class OverThePackage(unittest.TestCase):
    def test_a_server_plays_over_a_paged_cache_and_requests_memory_where_it_is_short(self):
        self.play("request")

    def test_a_server_plays_over_a_paged_cache_and_waits_where_memory_is_short(self):
        self.play("back")

    def play(self, calls):
        run(
            textwrap.dedent(
                """
                import sys, time
                sys.path.insert(0, BENCH)
                import cuvmm, paged_caches
                from paged_caches import Paged
                from paged_engine import Costs, Request, Server

                # 1 MiB a block.
                paged_caches.LAYERS, paged_caches.SIZE, paged_caches.BLOCK_BYTES = 16, 64, 1 << 20
                cache = Paged(64, "conv", None, "2MiB", calls=CALLS)
                assert len(cache.parts()) == 16 and cache.parts()[0][0].shape == (64, 16, 16, 64)
                costs = Costs()
                requests = [Request(at, 0.0, 100, 20, prompt=100) for at in range(20)]
                server = Server(requests, cache, costs, costs)
                server.play(float("inf"))
                assert server.ended == 20 and cache.figures()[0] == 0 and len(cache.free) == 63
                assert cache.kv.pinned == (0,)
                live, held, mapped = map(max, zip(*server.samples))
                assert 40 << 20 <= live <= held <= mapped <= 64 << 20, (live, held, mapped)

                # Memory that others have: the numbers come back.
                left = cuvmm._library.get().headroom(0)[0]
                other = cuvmm.empty(left - (8 << 20))
                assert cache.take(40) is None and cache.figures()[0] == 0
                if CALLS == "back":
                    assert len(cache.free) == 63
                else:
                    # The numbers of the request that stands in line. There is one.
                    assert len(cache.free) == 23 and not cache.is_granted()
                    assert cache.take(20) is None and len(cache.free) == 23
                    few = cache.take(4)
                    del other
                    while not cache.is_granted():
                        time.sleep(1e-3)
                    some = cache.take(10)
                    assert set(some).isdisjoint(few) and len(cache.granted) == 30 and cache.standing is None
                    cache.give(few + some)
                    cache.suffices()
                    assert cache.figures()[0] == 0 and len(cache.free) == 63
                    # One that no request needs any more is withdrawn.
                    other = cuvmm.empty(cuvmm._library.get().headroom(0)[0] - (8 << 20))
                    assert cache.take(40) is None
                    cache.suffices()
                    assert len(cache.free) == 63 and cache.standing is None
                    assert cache.take(20) is None
                other = None
                while (found := cache.take(20)) is None:
                    time.sleep(1e-3)
                assert len(found) == 20 and cache.standing is None
                cache.give(found)
                cache.suffices()
                assert len(cache.free) == 63 and cache.figures()[0] == 0
                """
            )
            .replace("BENCH", repr(BENCH))
            .replace("CALLS", repr(calls)),
            fakes=True,
        )
