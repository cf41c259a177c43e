"""The comparison of an engine over two caches: its requests, turns, counters and figures. It needs no GPU."""

import contextlib
import io
import os
import sys
import unittest
from types import SimpleNamespace

from support import HERE

sys.path.insert(0, os.path.join(os.path.dirname(HERE), "bench"))

import paged_transformers
from paged_transformers import LOADS, Counts, Engine, Run


class Played:
    """An engine whose runs take given times."""

    def __init__(self, name, log, seconds, wrong_in=(), short_in=()):
        self.name, self.log, self.seconds, self.wrong_in, self.short_in = (
            name,
            log,
            seconds,
            wrong_in,
            short_in,
        )

    def run(self, requests, pair):
        self.log.append((self.name, pair))
        tokens = [[prompt[0]] * generated for prompt, generated in requests]
        if pair in self.wrong_in:
            tokens[3] = tokens[3][:-1] + [0]
        return Run(self.seconds[pair], tokens, [0.5, self.seconds[pair] - 0.5][: 2 - (pair in self.short_in)])

    def counted(self, requests, pair):
        self.log.append((self.name, "counted"))
        return Counts(2.0, {"allocate_blocks": [4, 0.5], "release": [3, 0.1]}, [(10, 15), (30, 45)])


class Requests(unittest.TestCase):
    def test_each_pair_has_the_same_lengths_and_other_tokens(self):
        for load in LOADS.values():
            first, second = (paged_transformers.requests_of(load, pair, 1000) for pair in (1, 2))
            self.assertEqual(first, paged_transformers.requests_of(load, 1, 1000))
            sizes = [[(len(prompt), generated) for prompt, generated in pair] for pair in (first, second)]
            self.assertEqual(sizes[0], sizes[1])
            self.assertFalse([a for (a, _), (b, _) in zip(first, second, strict=True) if a == b])
            self.assertEqual((len(first), len(first[0][0])), (load.requests + 1, 2 * load.batch_tokens))
            for prompt, generated in sizes[0][1:]:
                self.assertTrue(load.prompt[0] <= prompt <= load.prompt[1])
                self.assertTrue(load.generated[0] <= generated <= load.generated[1])

    def test_only_the_full_load_has_more_requests_than_room(self):
        full, churn = LOADS["full"], LOADS["churn"]
        needed = [
            sum(
                len(prompt) + generated for prompt, generated in paged_transformers.requests_of(load, 1, 1000)
            )
            for load in (full, churn)
        ]
        self.assertTrue(full.tokens < needed[0] < 2 * full.tokens)
        # A request that runs has at most one block that is not full.
        self.assertLess(churn.running * (churn.prompt[1] + churn.generated[1]), churn.tokens)


class Turns(unittest.TestCase):
    def test_pairs_alternate_and_the_first_does_not_count(self):
        log = []
        own = Played("own", log, [9.0, 2.0, 4.0, 2.0])
        paged = Played("paged", log, [1.0, 4.0, 4.0, 1.0], wrong_in=(0, 2))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            row = paged_transformers.compare((own, paged), LOADS["churn"], 3, 1000)
        self.assertIn("# churn, pair 1: 2.000 s, paged 4.000 s, 0.500", said.getvalue())
        names = [name for name, at in log if at != "counted"]
        self.assertEqual(names, ["own", "paged", "paged", "own", "own", "paged", "paged", "own"])
        self.assertEqual(log[-2:], [("own", "counted"), ("paged", "counted")])
        tokens = row["tokens"]
        self.assertEqual(row["own_tokens_per_s"], [tokens / 2, tokens / 4, tokens / 2])
        self.assertEqual(row["paged_tokens_per_s"], [tokens / 4, tokens / 4, tokens])
        self.assertEqual((row["ratio"], row["least_ratio"], row["greatest_ratio"]), (0.5, 0.5, 2.0))
        self.assertEqual(row["own"], {"low": 3 * tokens / 8, "median": tokens / 2, "high": tokens / 2})
        # Batches of 0.5 and 1.5 s over one cache, of 0.5 and 3.5 s over the other one.
        self.assertEqual((row["seconds_of_batches"], row["ratio_of_batches"]), ([2.0, 4.0], 0.5))
        self.assertEqual((row["wrong"], row["pairs"], row["requests"]), (2, 3, 385))
        self.assertEqual((row["paged_share"], row["library_share"]), (0.25, 0.05))
        self.assertEqual((row["back_calls"], row["release_calls"], row["paged_held_over_live"]), (0, 3, 1.5))
        table = paged_transformers.table([{"load": "churn", "mode": "eager", "block_size": 16, **row}])
        self.assertIn(
            " | 0.500 | 0.500 | 2.000 | 0.500 | 25.00 | 25.00 | 5.00 | 0 | 3 | 1.50 | 1.50 | 2 |", table
        )

    def test_runs_with_other_batches_have_no_figure_of_batches(self):
        engines = [
            Played(name, [], [1.0] * 3, short_in=short) for name, short in (("own", ()), ("paged", (2,)))
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            row = paged_transformers.compare(tuple(engines), LOADS["churn"], 2, 1000)
        self.assertEqual((row["seconds_of_batches"], row["ratio_of_batches"]), ([1.0, None], None))
        self.assertIn(
            " | nan | ", paged_transformers.table([{"load": "", "mode": "", "block_size": 1, **row}])
        )

    def test_options_that_do_not_fit_are_refused(self):
        for arguments in (
            ["none:eager:16"],
            ["full:fast:16"],
            ["full:eager:2"],
            ["full:eager"],
            ["--pairs", "1"],
        ):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
                paged_transformers.options_of(arguments)
        runs = paged_transformers.options_of(["full:async:16"]).runs
        self.assertEqual(runs, [(LOADS["full"], "async", 16)])
        self.assertEqual(len(paged_transformers.options_of([]).runs), 5)


class Cache:
    """The parts of a cache that are counted. A request has a block of 4 bytes."""

    def __init__(self):
        rows = SimpleNamespace(numel=lambda: 2)
        layer = type("Rows", (), {"__getitem__": lambda *_: rows, "element_size": lambda _: 1})()
        self.block_size, self.num_blocks, self.key_cache, self.value_cache = 1, 10, [layer], [layer]
        self._block_manager = SimpleNamespace(_uninit_block_ids=[0] * 5, _init_block_ids=[0] * 2)

    def get_num_free_blocks(self):
        return 7

    def allocate_blocks(self):
        return self.get_num_free_blocks()

    def free_blocks(self):
        raise KeyError

    search_prefix_match = mark_shareable_blocks_as_complete = get_num_free_blocks


class Counting(unittest.TestCase):
    def test_calls_are_counted_in_their_run_only(self):
        engine = Engine.__new__(Engine)
        engine.cache = Cache()
        updated = []
        processor = type("Processor", (), {"update_batch": lambda _: updated.append(1)})()
        engine.manager = SimpleNamespace(batch_processor=processor)

        def add_request(prompt, request_id, max_new_tokens):
            for _ in range(5):
                processor.update_batch()
            engine.cache.allocate_blocks()
            with self.assertRaises(KeyError):
                engine.cache.free_blocks()

        result = SimpleNamespace(error=None, request_id="7-0", is_finished=lambda: True, generated_tokens=[4])
        engine.manager.add_request, engine.manager.get_result = add_request, lambda timeout: result
        counts = engine.counted([([1, 2], 1)], 7)
        self.assertEqual(len(updated), 5)
        # Batches 0 and 4: requests have 3 blocks, and all of them and two for padding are held.
        self.assertEqual(counts.samples, [(12, 48)] * 2)
        self.assertEqual(
            [counts.number(name) for name in ("allocate_blocks", "free_blocks", "back")], [1, 1, 0]
        )
        # One within another counts no time.
        self.assertEqual(counts.calls["get_num_free_blocks"], [1, 0.0])
        self.assertEqual([*vars(engine.cache)], [*vars(Cache())])
        self.assertEqual(vars(processor), {})
        run = engine.run([([1, 2], 1)], 7)
        self.assertEqual((run.tokens, len(run.batches), vars(processor)), ([[4]], 5, {}))
        self.assertLessEqual(sum(run.batches), run.seconds)
