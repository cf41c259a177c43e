"""Tensors of shareable pools in other processes, in place, through queues of `torch.multiprocessing`."""

import gc
import time
import unittest

from modes import MIB, MODE, GpuTest, only_cuvmm, torch

if MODE != "native":
    import cuvmm
    import cuvmm.torch

NAME = "tests in place"


def work(tensors, answers):
    """Adds 1 to each tensor that comes, and says what it looked like. Ends at None."""
    while (tensor := tensors.get()) is not None:
        answers.put((str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), tensor.double().sum().item()))
        tensor += 1
        torch.cuda.synchronize()
        answers.put("added")
        del tensor
        gc.collect()


def hold(tensors, answers):
    tensor = tensors.get()
    answers.put(float(tensor[0]))
    time.sleep(600)


@only_cuvmm
class InPlace(GpuTest):
    enters = False

    def start(self, target):
        context = torch.multiprocessing.get_context("spawn")
        tensors, answers = context.Queue(), context.Queue()
        process = context.Process(target=target, args=(tensors, answers), daemon=True)
        process.start()
        self.addCleanup(process.kill)
        return process, tensors, answers

    def until(self, count):
        late = time.monotonic() + 60
        while cuvmm.torch.sent() != count:
            self.assertLess(time.monotonic(), late)
            time.sleep(0.001)

    def test_a_worker_changes_the_tensors_themselves(self):
        process, tensors, answers = self.start(work)
        for kind in (torch.float32, torch.bfloat16, torch.int64):
            with cuvmm.torch.pool(NAME, shareable=True):
                whole = torch.zeros(64, 1024, device="cuda", dtype=kind)
            turned = whole.t()[3:7]
            for tensor in (whole, turned):
                before = tensor.double().sum().item()
                tensors.put(tensor)
                told = answers.get(timeout=120)
                self.assertEqual(told, (str(kind), tuple(tensor.shape), tuple(tensor.stride()), before))
                self.assertEqual(answers.get(timeout=120), "added")
                self.assertEqual(tensor.double().sum().item(), before + tensor.numel())
        self.until(0)
        tensors.put(None)
        process.join(60)
        self.assertEqual(process.exitcode, 0)

    def test_a_worker_that_is_killed_lets_go(self):
        process, tensors, answers = self.start(hold)
        with cuvmm.torch.pool(NAME, shareable=True):
            tensor = torch.full((8 * MIB,), 3.0, device="cuda")
        tensors.put(tensor)
        self.assertEqual(answers.get(timeout=120), 3.0)
        self.assertEqual(cuvmm.torch.sent(), 1)
        process.kill()
        process.join(60)
        self.until(0)
        self.assertEqual(float(tensor.sum()), 3.0 * 8 * MIB)

    def test_other_pools_are_refused(self):
        with cuvmm.torch.pool("not shared in place"):
            tensor = torch.ones(1024, device="cuda")
        from multiprocessing.reduction import ForkingPickler

        with cuvmm.torch.pool(NAME, shareable=True):
            torch.ones(1, device="cuda")
        with self.assertRaisesRegex(cuvmm.Error, "shareable=True"):
            ForkingPickler.dumps(tensor)


if __name__ == "__main__":
    unittest.main()
