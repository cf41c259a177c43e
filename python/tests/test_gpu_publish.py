"""Tensors of shareable memory, published in place and read by another process."""

import subprocess
import sys
import time
import unittest

from modes import MIB, MODE, GpuTest, only_cuvmm, torch

if MODE != "native":
    import cuvmm
    import cuvmm.torch

#: Both modes may run at a time.
NAME = f"tests published in place, {MODE}"


def tensors_of(scale):
    """Makes tensors of several types and layouts in a shareable pool."""
    with cuvmm.torch.pool(NAME, shareable=True):
        whole = torch.arange(24 * MIB, device="cuda", dtype=torch.float32).remainder_(1000).mul_(scale)
        half = torch.full((1000, 333), 2.0 * scale, device="cuda", dtype=torch.bfloat16)
        whole_numbers = torch.arange(4099, device="cuda", dtype=torch.int64).mul_(scale)
    turned = whole.view(1024, -1).t()[3:7]
    return {"whole": whole, "turned": turned, "half": half, "numbers": whole_numbers, "tied": half}


def seen(tensors):
    """Returns what each tensor looks like, with its sum."""
    look = lambda it: (str(it.dtype), tuple(it.shape), tuple(it.stride()), it.double().sum().item())
    return {name: look(tensor) for name, tensor in tensors.items()}


def read(asked, answers):
    """Attaches, and says what it sees each time that it is asked, or an error; takes up the newer version if told to."""
    try:
        weights = cuvmm.attach(NAME, timeout=120)
        while (word := asked.get()) is not None:
            if word == "newer":
                weights = weights.newer(timeout=60)
            answers.put((weights.version, weights.in_place, seen(weights)))
        del weights
    except Exception as error:
        answers.put(repr(error))
        raise


def free():
    return torch.cuda.cudart().cudaMemGetInfo(0)[0]


def create(shareable):
    """Returns the milliseconds in which 1 GiB is allocated by the driver, in a pool of that kind."""
    name = f"created {shareable}"
    torch.cuda.synchronize()
    begun = time.perf_counter()
    with cuvmm.torch.pool(name, shareable=shareable):
        pieces = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    took = (time.perf_counter() - begun) * 1e3
    del pieces
    torch.cuda.synchronize()
    cuvmm.trim(name)
    return took


@only_cuvmm
class InPlace(GpuTest):
    enters = False

    def test_a_reader_sees_the_tensors_themselves_and_takes_up_the_next_ones(self):
        context = torch.multiprocessing.get_context("spawn")
        asked, answers = context.Queue(), context.Queue()
        reader = context.Process(target=read, args=(asked, answers), daemon=True)
        reader.start()
        self.addCleanup(reader.kill)
        tensors = tensors_of(1)
        torch.cuda.synchronize()
        before = free()
        publication = cuvmm.publish(tensors, NAME, copy=False)
        self.assertLess(before - free(), 8 * MIB, "memory for a copy was taken")
        asked.put("look")
        self.assertEqual(answers.get(timeout=120), (1, True, seen(tensors)))
        # What is written in place is seen by the attachment that the reader has.
        tensors["whole"].add_(1)
        tensors["half"].mul_(2)
        torch.cuda.synchronize()
        asked.put("look")
        self.assertEqual(answers.get(timeout=60), (1, True, seen(tensors)))
        # The tensors are deleted, and stay while they are published.
        expected = seen(tensors)
        del tensors
        more = tensors_of(3)
        asked.put("look")
        self.assertEqual(answers.get(timeout=60), (1, True, expected))
        publication = cuvmm.publish(more, NAME, copy=False)
        asked.put("newer")
        self.assertEqual(answers.get(timeout=60), (2, True, seen(more)))
        publication.withdraw()
        asked.put(None)
        reader.join(60)
        self.assertEqual(reader.exitcode, 0)

    def test_memory_outside_of_shareable_pools_is_refused(self):
        with cuvmm.torch.pool("not published in place"):
            tensor = torch.ones(1024, device="cuda")
        for refused in (tensor, torch.ones(1024, device="cuda")):
            with self.assertRaisesRegex(cuvmm.Error, "shareable=True"):
                cuvmm.publish({"t": refused}, "refused in place", copy=False)

    def test_tensors_of_a_shareable_heap(self):
        code = """
import torch, cuvmm, cuvmm.torch
cuvmm.torch.install(limit="4GiB", shareable=True)
pieces = [torch.ones(10 << 20, device="cuda") for _ in range(20)]
del pieces[::2]
large = torch.arange(150 << 20, device="cuda", dtype=torch.float32)
small = torch.full((77,), 5.0, device="cuda")
print(len(cuvmm.extents(large)), "pieces")
cuvmm.publish({"large": large, "small": small}, "heap in place", copy=False)
weights = cuvmm.attach("heap in place")
assert torch.equal(weights["large"], large) and torch.equal(weights["small"], small)
large.add_(1)
torch.cuda.synchronize()
assert torch.equal(weights["large"], large)
del weights
print("ok")
"""
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
        self.assertEqual(ended.stdout.split()[-1:], ["ok"], ended.stdout + ended.stderr)

    def test_what_creating_shareable_memory_costs_is_printed(self):
        create(False), create(True)
        times = {kind: [create(kind) for _ in range(5)] for kind in (False, True)}
        plain, shareable = (sorted(times[kind])[2] for kind in (False, True))
        print(f"1 GiB in 16 tensors ({MODE}): {plain:.2f} ms, shareable {shareable:.2f} ms", flush=True)


if __name__ == "__main__":
    unittest.main()
