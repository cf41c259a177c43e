"""Groups of processes whose pools sleep and wake together, over the stand-in for libcuda."""

import unittest

from support import needs_stand_in, run


@needs_stand_in
class Groups(unittest.TestCase):
    def test_pools_of_two_processes_sleep_and_wake_in_both_or_in_none(self):
        said = run(
            """
            import subprocess, sys, tempfile
            import torch
            import cuvmm, cuvmm.torch
            other = '''
            import sys
            import torch
            import cuvmm, cuvmm.torch
            group = cuvmm.group("tp0", 2, rank=1, directory=sys.argv[1])
            with cuvmm.torch.pool("weights"):
                tensor = torch.empty(20 << 20)
            group.sleep("weights", timeout=600)
            group.wake(timeout=600)
            cuvmm.sleep("weights")
            try:
                group.sleep("weights", timeout=600)
            except cuvmm.Error as error:
                sys.stdout.write(f"second: {error}\\\\n")
                sys.stdout.flush()
            cuvmm.wake("weights")
            group.leave()
            '''
            with tempfile.TemporaryDirectory() as folder:
                group = cuvmm.group("tp0", 2, rank=0, directory=folder)
                assert (group.name, group.rank, group.ranks) == ("tp0", 0, 2)
                assert group.path == folder + "/tp0.cuvmm-group"
                assert repr(group) == f"<cuvmm.Group 'tp0' rank 0 of 2, at {group.path}>"
                with cuvmm.torch.pool("weights"):
                    tensor = torch.empty(20 << 20)
                second = subprocess.Popen([sys.executable, "-c", other, folder])
                slept = group.sleep("weights", timeout=600)
                assert slept.given == {"weights": 20 << 20}, slept
                assert cuvmm.asleep() == {"weights"}
                group.wake(timeout=600)
                assert not cuvmm.asleep()
                try:
                    group.sleep("weights", timeout=600)
                except cuvmm.Error as error:
                    sys.stdout.write(f"first: {error}\\n")
                assert not cuvmm.asleep()
                assert second.wait() == 0
                try:
                    group.sleep("weights", timeout=0)
                except cuvmm.Error as error:
                    assert str(error).endswith("rank 1 had not joined in time"), error
                assert not cuvmm.asleep()
            """,
            fakes=True,
        )
        lines = sorted(said.splitlines())
        self.assertRegex(
            lines[0], r'first: group "tp0" has undone "sleep .*weights.* keep": rank 1 \(process \d+\) failed: .*asleep'
        )
        self.assertRegex(lines[1], r'second: the tag "weights" is asleep')
        self.assertEqual(len(lines), 2)

    def test_what_cannot_be_is_refused(self):
        run(
            """
            import tempfile
            import cuvmm
            with tempfile.TemporaryDirectory() as folder:
                group = cuvmm.group("a", 1, directory=folder)
                for kind, call in [
                    (TypeError, lambda: cuvmm.group(1, 1)),
                    (TypeError, lambda: cuvmm.group("a", "1")),
                    (ValueError, lambda: cuvmm.group("a", -1)),
                    (ValueError, lambda: cuvmm.group("a", 2, rank=1 << 32)),
                    (cuvmm.Error, lambda: cuvmm.group("a/b", 1, directory=folder)),
                    (cuvmm.Error, lambda: cuvmm.group("a", 0, directory=folder)),
                    (cuvmm.Error, lambda: cuvmm.group("a", 2, directory=folder)),
                    (cuvmm.Error, lambda: cuvmm.group("a", 1, directory=folder)),
                    (TypeError, lambda: group.sleep(3)),
                    (TypeError, lambda: group.sleep(timeout="1")),
                    (ValueError, lambda: group.wake(timeout=-1)),
                    (ValueError, lambda: group.wake(timeout=float("nan"))),
                    (ValueError, lambda: group.sleep(host="none")),
                    (cuvmm.Error, lambda: group.sleep("unknown")),
                ]:
                    refused(kind, call)
                assert group.sleep().given == {}
                group.wake(timeout=float("inf"))
                group.leave()
                group.leave()
                try:
                    group.wake()
                except cuvmm.Error as error:
                    assert "in no group" in str(error)
                assert cuvmm.group("a", 2, directory=folder).rank == 0
            """
        )
