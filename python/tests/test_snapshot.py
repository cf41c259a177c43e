"""Snapshots have the structure that PyTorch's memory viewer reads."""

import pickle
import unittest

from support import run


def made(*devices, pool=None):
    """Makes a snapshot in a process that has the stand-in for PyTorch."""
    code = f"""
        import pickle, sys
        from cuvmm.torch import _snapshot
        found = _snapshot.make({list(devices)!r}, {pool!r})
        print(pickle.dumps(found).hex())
    """
    return pickle.loads(bytes.fromhex(run(code, fakes=True)))


def live(address, size, requested, stream=0, pool=None):
    return {
        "address": address,
        "size": size,
        "requested": requested,
        "stream": stream,
        "pool": pool,
    }


class Snapshots(unittest.TestCase):
    def check(self, snapshot):
        """Checks what the viewer relies on."""
        ends = []
        for segment in snapshot["segments"]:
            at = segment["address"]
            for block in segment["blocks"]:
                self.assertEqual(block["address"], at)
                self.assertIn(block["state"], ("active_allocated", "inactive"))
                self.assertLessEqual(block["requested_size"], block["size"])
                self.assertEqual(block["frames"], [])
                at += block["size"]
            self.assertEqual(at, segment["address"] + segment["total_size"])
            self.assertIsInstance(segment["segment_pool_id"], tuple)
            ends.append((segment["device"], segment["address"], at))
        ends.sort()
        for (device, _, end), (next_device, begin, _) in zip(ends, ends[1:]):
            self.assertTrue(device != next_device or end <= begin, ends)
        self.assertEqual(snapshot["allocator_settings"]["allocator"], "cuvmm")

    def test_nothing(self):
        found = made({}, {})
        self.check(found)
        self.assertEqual(found["segments"], [])
        self.assertEqual(found["device_traces"], [[], []])

    def test_side_by_side(self):
        blocks = [live(0x400000, 512, 100), live(0x400200, 1024, 1024), live(0x600000, 512, 512)]
        found = made({"allocations": blocks, "held": 4 << 20})
        self.check(found)
        first, second, free = found["segments"]
        self.assertEqual((first["total_size"], len(first["blocks"])), (1536, 2))
        self.assertEqual(first["requested_size"], 1124)
        self.assertEqual((second["total_size"], second["segment_type"]), (512, "small"))
        self.assertEqual(free["blocks"][0]["state"], "inactive")
        total = sum(segment["total_size"] for segment in found["segments"])
        self.assertEqual(total, 4 << 20)

    def test_streams_pools_and_sizes_divide(self):
        mib = 1 << 20
        blocks = [
            live(0, 512, 512),
            live(512, 512, 512, stream=7),
            live(1024, 512, 512, stream=7, pool=[0, 3]),
            live(1536, 2 * mib, 2 * mib, stream=7, pool=[0, 3]),
        ]
        found = made({}, {"allocations": blocks, "held": 2 * mib + 1536})
        self.check(found)
        self.assertEqual(len(found["segments"]), 4)
        self.assertEqual({segment["device"] for segment in found["segments"]}, {1})
        self.assertEqual(found["segments"][-1]["segment_type"], "large")
        one = made({"allocations": blocks, "held": 1 << 30}, pool=(0, 3))
        self.check(one)
        self.assertEqual([it["segment_pool_id"] for it in one["segments"]], [(0, 3), (0, 3)])
