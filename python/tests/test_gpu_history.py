"""PyTorch's recorder, viewer, observers and profiler over the heap."""

import os
import pickle
import tempfile
import unittest

from modes import LIMIT, MIB, GpuTest, only_installed, torch
from viewer import walk


def layer(size: int):
    return torch.empty(size, dtype=torch.uint8, device="cuda")


class History(GpuTest):
    @only_installed
    def test_a_dump_opens_in_the_viewer(self):
        early = layer(3 * MIB)
        torch.cuda.memory._record_memory_history(max_entries=1000)
        self.addCleanup(torch.cuda.memory._record_memory_history, enabled=None)
        kept, gone = layer(5 * MIB), layer(7 * MIB)
        del gone, early
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "dump.pickle")
            torch.cuda.memory._dump_snapshot(file)
            with open(file, "rb") as opened:
                snapshot = pickle.load(opened)
        sums = walk(snapshot, 0)
        held = sum(it["total_size"] for it in snapshot["segments"] if it["device"] == 0)
        self.assertEqual(sums[-1][1], held)
        made = [it for it in snapshot["device_traces"][0] if it["action"] == "alloc"]
        self.assertEqual([it["size"] for it in made], [5 * MIB, 7 * MIB])
        names = [frame["name"] for frame in made[0]["frames"]]
        self.assertEqual(names[:2], ["layer", "test_a_dump_opens_in_the_viewer"])
        from torch.cuda import _memory_viz

        self.assertTrue(_memory_viz.trace_plot(snapshot))
        del kept

    @only_installed
    def test_an_observer_hears_of_a_shortage(self):
        seen = []
        torch._C._cuda_attach_out_of_memory_observer(lambda *it: seen.append(it))
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            layer(1 << 50)
        self.assertEqual(seen[0][:3], (0, 1 << 50, LIMIT))

    def test_the_profiler_sees_memory(self):
        layer(MIB)
        profiler = torch.profiler
        activities = [profiler.ProfilerActivity.CPU]
        with profiler.profile(activities=activities, profile_memory=True) as profile:
            kept = layer(6 * MIB)
        sizes = [getattr(it, "self_device_memory_usage", 0) for it in profile.key_averages()]
        self.assertIn(6 * MIB, sizes)
        del kept


if __name__ == "__main__":
    unittest.main()
