"""Out of memory is PyTorch's exception, and the program goes on after it."""

import gc
import subprocess
import sys
import threading
import unittest

from modes import GIB, LIMIT, MIB, MODE, GpuTest, memory, not_installed, only_installed, torch


def fill(most: int) -> list:
    """Allocates until there is no memory, at most `most` bytes."""
    found = []
    while sum(tensor.numel() for tensor in found) < most:
        found.append(torch.empty(512 * MIB, dtype=torch.uint8, device="cuda"))
    return found


class OutOfMemory(GpuTest):
    def setUp(self):
        super().setUp()
        if MODE != "install":
            # `install` has a limit of that size. The fraction does not bind pools of other memory.
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(LIMIT / total)
            self.addCleanup(torch.cuda.set_per_process_memory_fraction, 1.0)

    def test_too_large(self):
        with self.assertRaises(torch.cuda.OutOfMemoryError) as caught:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        self.assertIn("out of memory", str(caught.exception))
        self.assertEqual(int(torch.ones(1000, device="cuda").sum()), 1000)

    def test_recovery(self):
        for _ in range(3):
            with self.assertRaises(torch.cuda.OutOfMemoryError):
                fill(1 << 50)
            gc.collect()
            # PyTorch's pools do not join the segments that the failed attempt left.
            size = 512 * MIB if MODE == "pool" else GIB
            made = torch.full((size,), 3, dtype=torch.uint8, device="cuda")
            self.assertEqual(int(made.max()), 3)
            del made

    def test_a_smaller_batch_after_it(self):
        layer = torch.nn.Linear(1024, 1024, device="cuda")
        batch, done = 1 << 24, None
        while done is None:
            try:
                done = layer(torch.empty(batch, 1024, device="cuda")).sum()
                done.backward()
            except torch.cuda.OutOfMemoryError:
                layer.zero_grad(set_to_none=True)
                batch //= 2
                done = None
        self.assertLess(batch, 1 << 24)
        self.assertTrue(all(parameter.grad is not None for parameter in layer.parameters()))

    def test_in_a_backward_pass(self):
        """The exception comes out of autograd's thread."""
        held = fill_but(768 * MIB)
        first = torch.zeros(64 * MIB // 4, device="cuda", requires_grad=True)

        class Greedy(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x * 1

            @staticmethod
            def backward(context, gradient):
                with memory():
                    torch.empty(LIMIT, dtype=torch.uint8, device="cuda")
                return gradient

        with self.assertRaises(torch.cuda.OutOfMemoryError):
            Greedy.apply(first).sum().backward()
        del held
        (first * 2).sum().backward()
        self.assertEqual(float(first.grad[0]), 2.0)

    def test_in_threads(self):
        found = []

        def run():
            with memory():
                try:
                    fill(1 << 50)
                except torch.cuda.OutOfMemoryError as error:
                    found.append(str(error))

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertGreaterEqual(len(found), 1)
        gc.collect()
        self.assertEqual(int(torch.ones(1000, device="cuda").sum()), 1000)

    @only_installed
    def test_the_text_has_figures(self):
        held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        before = torch.cuda.memory_stats()["num_ooms"]
        with self.assertRaises(torch.cuda.OutOfMemoryError) as caught:
            torch.empty(16 * GIB, dtype=torch.uint8, device="cuda")
        text = str(caught.exception)
        for part in ("Tried to allocate 16", "held", "limit"):
            self.assertIn(part, text)
        self.assertEqual(torch.cuda.memory_stats()["num_ooms"], before + 1)
        del held

    @only_installed
    def test_memory_fraction(self):
        before = torch.cuda.get_per_process_memory_fraction()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(2 * GIB / total)
        self.addCleanup(torch.cuda.set_per_process_memory_fraction, before)
        self.assertAlmostEqual(torch.cuda.get_per_process_memory_fraction(), 2 * GIB / total, 3)
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            fill(1 << 50)
        self.assertLessEqual(torch.cuda.memory_reserved(), 2 * GIB)

    @not_installed
    def test_memory_fraction_of_the_native_allocator(self):
        self.assertGreater(torch.cuda.get_per_process_memory_fraction(), 0)


def fill_but(rest: int) -> list:
    """Allocates all of the limit but about `rest` bytes.

    PyTorch's pools keep what other tests have used, so that counts too.
    """
    return fill(LIMIT - torch.cuda.memory_reserved() - rest - 512 * MIB)


#: A tensor in a reference cycle fills most of the limit, and an allocation that needs its memory is made by
#: the main thread and by autograd's thread.
GARBAGE = """
import gc
import torch
import cuvmm.torch

cuvmm.torch.install(limit=2 << 30, collect=True)
gc.disable()

class Cycle:
    def __init__(self):
        self.itself = self
        self.tensor = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")

class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 1

    @staticmethod
    def backward(context, gradient):
        Cycle()
        big = torch.full((3 << 29,), 7, dtype=torch.uint8, device="cuda")
        assert int(big[-1]) == 7
        return gradient

Cycle()
big = torch.full((3 << 29,), 5, dtype=torch.uint8, device="cuda")
assert int(big[-1]) == 5
del big
first = torch.zeros(1000, device="cuda", requires_grad=True)
Greedy.apply(first).sum().backward()
assert float(first.grad[0]) == 1.0
try:
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError:
    print("collected")
"""


class Uncaught(unittest.TestCase):
    @only_installed
    def test_garbage_at_the_limit_is_collected(self):
        ended = subprocess.run(
            [sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=120
        )
        self.assertEqual((ended.returncode, ended.stdout), (0, "collected\n"), ended.stderr)

    def test_the_process_ends_with_a_traceback(self):
        """An exception that no code catches ends the process as one does, without an abort."""
        code = "import modes; modes.torch.empty(1 << 50, dtype=modes.torch.uint8, device='cuda')"
        ended = subprocess.run(
            [sys.executable, "-c", code],
            cwd=__file__.rpartition("/")[0],
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.assertEqual(ended.returncode, 1, ended.stderr)
        self.assertIn("OutOfMemoryError", ended.stderr)


if __name__ == "__main__":
    unittest.main()
