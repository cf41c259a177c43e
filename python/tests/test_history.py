"""PyTorch's recorder of allocations and its observers, over the stand-in for libcuda."""

import json
import unittest

from support import MIB, needs_stand_in, run
from viewer import walk

BEGIN = """
import json, pickle, sys, threading
import torch
import cuvmm
import cuvmm.torch

record = lambda *arguments, **named: torch._C._cuda_record_memory_history(*arguments, **named)
snapshot = lambda *arguments: torch._C._cuda_memorySnapshot(*arguments or (None,))

def dump():
    print(json.dumps(pickle.loads(pickle.dumps(snapshot()))))
"""


def case(code: str) -> list:
    """Runs code, and returns the snapshots that it dumped, each with the sums at its events."""
    import textwrap

    lines = run(BEGIN + textwrap.dedent(code), fakes=True).splitlines()
    found = [json.loads(line) for line in lines]
    return [(it, [walk(it, device) for device in range(2)]) for it in found]


def actions(snapshot, device=0):
    return [it["action"] for it in snapshot["device_traces"][device]]


def names(entry):
    return [it["name"] for it in entry["frames"]]


@needs_stand_in
class History(unittest.TestCase):
    def test_allocations_with_their_stacks(self):
        [(found, sums)] = case(
            f"""
            cuvmm.torch.install(limit="64MiB")
            early = torch.empty({2 * MIB})
            record("all", "all", "python", 1000)

            def layer():
                return torch.empty({5 * MIB})

            def forward():
                return layer()

            first, second = forward(), torch.empty({3 * MIB})
            early.free()
            def drop():
                first.free()
            drop()
            torch.cuda.empty_cache()
            dump()
            """
        )
        ends = [it for it in found["device_traces"][0] if it["action"] in ("alloc", "free_completed")]
        self.assertEqual([it["size"] for it in ends], [5 * MIB, 3 * MIB, 2 * MIB, 5 * MIB])
        self.assertEqual(names(ends[0])[-3:], ["layer", "forward", "<module>"])
        self.assertEqual(names(ends[3])[-2:], ["drop", "<module>"])
        frame = ends[0]["frames"][-1]
        self.assertEqual((frame["filename"], type(frame["line"])), ("<string>", int))
        times = [it["time_us"] for it in found["device_traces"][0]]
        self.assertEqual(times, sorted(times))
        # Live and held bytes at the events, the last ones of the snapshot itself.
        live = [allocated for allocated, _ in sums[0]]
        self.assertEqual(live[0], 2 * MIB)
        self.assertEqual(max(live), 10 * MIB)
        held = sum(it["total_size"] for it in found["segments"])
        self.assertEqual(sums[0][-1], (3 * MIB, held))
        self.assertGreaterEqual(max(reserved for _, reserved in sums[0]), 10 * MIB)
        [block] = [it for segment in found["segments"] for it in segment["blocks"] if it["frames"]]
        self.assertEqual(block["size"], 3 * MIB)

    def test_names_that_would_begin_lines(self):
        [(found, _)] = case(
            """
            cuvmm.torch.install()
            record()
            odd = "a\\u2028b\\x85c\\td\\ne"
            code = compile("def odd(): return torch.empty(512)", odd, "exec")
            exec(code)
            kept = odd()
            dump()
            """
        )
        [made] = [it for it in found["device_traces"][0] if it["action"] == "alloc"]
        [frame] = [it for it in made["frames"] if it["name"] == "odd"]
        self.assertEqual((frame["filename"], frame["line"]), ("a\u2028b c d e", 1))

    def test_contexts_and_limits(self):
        snapshots = case(
            """
            cuvmm.torch.install()
            for settings in [("all", None, "all", 3), ("all", "alloc", "python", 100), ("state",)]:
                record(*settings, clear_history=True)
                kept = [torch.empty(512), torch.empty(1024)]
                kept.pop().free()
                dump()
            record(None)
            torch.empty(512).free()
            dump()
            torch._C._cuda_record_memory_history_legacy(True, True, 2, True)
            torch.empty(512).free()
            dump()
            print(json.dumps(snapshot((0, 0, False))))
            """
        )
        plain, with_stacks, state, none, few, without = (it for it, _ in snapshots)
        size_of = lambda it: [entry["size"] for entry in it["device_traces"][0] if "alloc" in entry["action"]]
        self.assertEqual(size_of(plain), [512, 1024])
        self.assertEqual([it["frames"] for it in plain["device_traces"][0]], [[]] * len(actions(plain)))
        stacks = {it["action"]: bool(it["frames"]) for it in with_stacks["device_traces"][0]}
        self.assertEqual((stacks["alloc"], stacks["free_completed"]), (True, False))
        self.assertEqual(actions(state), [])
        blocks = lambda it: [block for segment in it["segments"] for block in segment["blocks"]]
        self.assertTrue(any(block["frames"] for block in blocks(state)))
        self.assertEqual((actions(none), actions(without)), ([], []))
        self.assertFalse(any(block["frames"] for block in blocks(none)))
        acts = [it for it in actions(few) if not it.startswith("segment")]
        self.assertEqual(acts, ["alloc", "free_requested", "free_completed"])

    def test_sleep_and_shortage(self):
        [(found, sums)] = case(
            f"""
            cuvmm.torch.install(limit="64MiB")
            record()
            with cuvmm.torch.pool("weights"):
                weights = torch.empty({20 * MIB})
            other = torch.empty({4 * MIB})
            cuvmm.sleep("weights")
            try:
                torch.empty({80 * MIB})
            except Exception:
                pass
            dump()
            """
        )
        self.assertEqual(actions(found).count("oom"), 1)
        [short] = [it for it in found["device_traces"][0] if it["action"] == "oom"]
        self.assertEqual(short["size"], 80 * MIB)
        self.assertTrue(0 < short["device_free"] <= 256 * MIB)
        self.assertEqual(names(short)[-1], "<module>")
        live = [allocated for allocated, _ in sums[0]]
        self.assertEqual(max(live) - live[-1], 20 * MIB)
        self.assertEqual(live[-1] // MIB, 4)

    def test_many_threads_and_no_interpreter_lock(self):
        [(found, sums)] = case(
            """
            cuvmm.torch.install()
            torch.empty(1 << 20).free()
            record(max_entries=300)

            def work():
                for size in range(1, 60):
                    torch.empty(size * 512).free()

            threads = [threading.Thread(target=work) for _ in range(4)]
            for it in threads:
                it.start()
            for _ in range(20):
                walked = snapshot()
            for it in threads:
                it.join()
            dump()
            """
        )
        stacks = [names(it) for it in found["device_traces"][0] if it["action"] == "alloc"]
        self.assertTrue(stacks and all("work" in it for it in stacks))
        self.assertEqual(sums[0][-1][0], 0)

    def test_observers(self):
        case(
            """
            cuvmm.torch.install(limit="64MiB")
            seen = []
            attach = torch._C._cuda_attach_out_of_memory_observer
            attach(lambda *it: seen.append(it))
            attach(lambda *it: seen.append(len(torch._C._cuda_memorySnapshot(None)["segments"])))
            kept = torch.empty(4 << 20)
            try:
                torch.empty(100 << 20)
            except Exception:
                pass
            (device, size, limit, free), segments = seen
            assert (device, size, limit) == (0, 100 << 20, 64 << 20) and 0 < free <= 256 << 20, seen
            assert segments > 0
            refused(TypeError, lambda: attach("nothing"), "observer")
            for wrong in [("some",), ("all", "much"), ("all", "all", "c++")]:
                refused(RuntimeError, lambda: record(*wrong), "must be one of")
            assert snapshot()["device_traces"] == [[], []]
            # What is recorded and observed at the end is harmless.
            record()
            """
        )
