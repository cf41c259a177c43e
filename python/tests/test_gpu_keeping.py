"""What pools give back, keep, and take from other threads, with and without `install`."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import unittest

from modes import MIB, GpuTest, only_cuvmm, only_pool, torch


def run(code: str, **variables: str) -> None:
    """Runs code with PyTorch's own allocator in a process of its own, without a limit."""
    begin = """
        import gc, os, sys
        import torch
        import cuvmm, cuvmm.torch
        MIB, GIB = 1 << 20, 1 << 30
        torch.cuda.init()
        FREE = torch.cuda.mem_get_info()[0] - 2 * GIB
        def part(of_79):
            # Sizes were chosen on a device of 79 GiB.
            return FREE * of_79 // 79 // (2 * MIB) * (2 * MIB)
        def made(size, byte):
            return torch.full((size,), byte, dtype=torch.uint8, device="cuda")
        def ends(tensor, byte):
            return [int(tensor[0]), int(tensor[-1])] == [byte, byte]
        def held(name):
            return sum(it["bytes"] for it in cuvmm.stats().all["pools"] if it["name"] == name)
        """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(begin) + textwrap.dedent(code)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    if ended.returncode != 0:
        raise AssertionError(f"exit {ended.returncode}\n{ended.stdout}\n{ended.stderr}")


@only_pool
class Trim(unittest.TestCase):
    def test_the_next_block_gets_more(self):
        run(
            """
            with cuvmm.torch.pool("a"):
                live = made(part(2), 7)
                large = made(part(59), 1)
            del large
            try:
                with cuvmm.torch.pool("a"):
                    made(part(69), 2)
                raise SystemExit("PyTorch gives it back: trim is of no use any more")
            except torch.cuda.OutOfMemoryError as error:
                text = str(error)
            assert "CUDA out of memory. Tried to allocate" in text and "cuvmm.trim('a')" in text, text
            with cuvmm.torch.pool("a", trim=True):
                larger = made(part(69), 3)
            assert ends(larger, 3) and ends(live, 7)
            del larger
            before = torch.cuda.mem_get_info()[0]
            given = cuvmm.trim("a")
            assert given >= part(69), given
            assert torch.cuda.mem_get_info()[0] - before >= part(69)
            assert held("a") <= part(2) + 64 * MIB and ends(live, 7)
            """
        )

    def test_requests_that_grow(self):
        run(
            """
            size = part(69) / 1.01 ** 199
            with cuvmm.torch.pool("a"):
                live = made(2 * MIB, 7)
            for number in range(200):
                with cuvmm.torch.pool("a", trim=True):
                    request = made(int(size * 1.01**number), number)
                    assert ends(request, number)
                    del request
            assert ends(live, 7)
            """
        )

    def test_a_segment_that_is_partly_used_stays(self):
        run(
            """
            with cuvmm.torch.pool("a"):
                # Three in one segment of 2 MiB.
                first, second, third = (made(512 << 10, it) for it in (1, 2, 3))
            assert held("a") == 2 * MIB, held("a")
            del first, third
            assert cuvmm.trim("a") == 0 and held("a") == 2 * MIB
            with cuvmm.torch.pool("a"):
                other = made(512 << 10, 4)
            assert held("a") == 4 * MIB, "a new pool of PyTorch does not use what the dropped one has"
            assert ends(second, 2) and ends(other, 4)
            outside = made(64 * MIB, 5)
            del second, outside
            reserved = torch.cuda.memory_reserved()
            with cuvmm.torch.pool("a", trim=True):
                # The dropped pool's segment goes back, and PyTorch's own cache stays.
                assert held("a") == 2 * MIB, held("a")
                assert reserved - torch.cuda.memory_reserved() == 2 * MIB
            del other
            # With the segment that the block before kept here.
            given = cuvmm.trim("a")
            assert (given, held("a")) == (4 * MIB, 0), (given, held("a"))
            """
        )

    def test_inside_of_blocks_and_beside_threads(self):
        run(
            """
            import threading
            with cuvmm.torch.pool("a"):
                made(64 * MIB, 1)
            with cuvmm.torch.pool("b"):
                before = made(4 * MIB, 2)
                assert cuvmm.trim("a") == 64 * MIB
                after = made(4 * MIB, 3)
                addresses = [before.data_ptr(), after.data_ptr()]
            library = cuvmm._library.get()
            assert [library.text("tag_of", it) for it in addresses] == ["b", "b"]
            with cuvmm.torch.pool("a"):
                made(64 * MIB, 1)
            inside, end = threading.Event(), threading.Event()

            def other():
                with cuvmm.torch.pool("c"):
                    kept.append(made(4 * MIB, 4))
                    inside.set()
                    end.wait()

            kept = []
            thread = threading.Thread(target=other)
            thread.start()
            inside.wait()
            try:
                cuvmm.trim("a")
                raise SystemExit("not refused")
            except cuvmm.Error as error:
                assert "another thread" in str(error), error
            with cuvmm.torch.pool("a", trim=True):
                made(32 * MIB, 5)
            end.set()
            thread.join()
            assert cuvmm.trim("a") == 64 * MIB and ends(kept[0], 4)
            """
        )

    def test_a_pool_beside_expandable_segments(self):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            run(
                """
                outside = made(64 * MIB, 1)
                segments = torch.cuda.memory_snapshot()
                assert any(it["is_expandable"] for it in segments), segments
                with cuvmm.torch.pool("a"):
                    inside = made(64 * MIB, 2)
                    free = made(32 * MIB, 3)
                assert held("a") == 96 * MIB, held("a")
                address = inside.data_ptr()
                cuvmm.sleep("a")
                more = made(64 * MIB, 4)
                cuvmm.wake("a")
                assert inside.data_ptr() == address
                assert ends(outside, 1) and ends(inside, 2) and ends(more, 4)
                del free
                assert cuvmm.trim("a") == 32 * MIB and ends(inside, 2)
                """,
                **{name: "expandable_segments:True"},
            )


class Rotary(torch.nn.Module):
    """A layer with a buffer that its state dict does not have."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
        self.register_buffer("frequencies", torch.arange(size, dtype=torch.float32), persistent=False)
        self.register_buffer("mean", torch.ones(size))

    def forward(self, x):
        return self.linear(x * self.frequencies) + self.mean


@only_cuvmm
class Keep(GpuTest):
    enters = False

    def setUp(self):
        super().setUp()
        import cuvmm
        import cuvmm.torch

        self.cuvmm = cuvmm
        self.addCleanup(lambda: cuvmm.asleep() and cuvmm.wake())

    def kept(self):
        gc.collect()
        return self.cuvmm.stats().kept

    def test_buffers_outside_of_the_state_dict(self):
        with self.cuvmm.torch.pool("buffers"):
            model = torch.nn.Sequential(Rotary(1024), Rotary(1024)).cuda()
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        inputs = torch.randn(4, 1024, device="cuda")
        # Without its backward pass, which would need the buffers as long as the result lives.
        expected = model(inputs).detach()
        lost = self.cuvmm.torch.lost_buffers(model, "buffers")
        self.assertEqual(lost, ["0.frequencies", "1.frequencies"])
        for name in lost:
            self.cuvmm.keep(model.get_buffer(name))
        self.assertEqual(self.cuvmm.torch.lost_buffers(model, "buffers"), [])
        self.assertEqual(self.kept(), 2 * 4096)
        for _ in range(2):
            self.cuvmm.sleep("buffers", keep=False)
            other = torch.full((100 * MIB,), 3, dtype=torch.uint8, device="cuda")
            self.cuvmm.wake("buffers")
            model.load_state_dict(state)
            torch.testing.assert_close(model(inputs), expected)
            del other
        del model
        self.assertEqual(self.kept(), 0)

    def test_a_mark_lasts_as_long_as_the_storage(self):
        with self.cuvmm.torch.pool("marks"):
            base = torch.full((MIB,), 5.0, device="cuda")
            leaf = torch.full((MIB,), 3.0, device="cuda", requires_grad=True)
            # Only autograd has it after the next lines.
            middle = leaf * 2
            result = (middle * middle).sum()
        self.cuvmm.keep(base)
        self.cuvmm.keep(middle[100:])
        view = base[10:]
        del base, middle
        self.assertEqual(self.kept(), 2 * 4 * MIB)
        self.cuvmm.sleep("marks", keep=False)
        self.cuvmm.wake("marks")
        self.assertEqual((float(view.min()), float(view.max())), (5.0, 5.0))
        result.backward()
        self.assertEqual((float(leaf.grad.min()), float(leaf.grad.max())), (24.0, 24.0))
        del view, result
        self.assertEqual(self.kept(), 0)
        with self.cuvmm.torch.pool("marks"):
            again = torch.empty(MIB, device="cuda")
        self.assertEqual(self.kept(), 0)
        del again

    def test_memory_of_no_pool(self):
        outside = torch.ones(100, device="cuda")
        with self.assertRaisesRegex(self.cuvmm.Error, "no pool"):
            self.cuvmm.keep(outside)

    def test_a_backward_pass_inside_of_a_worker(self):
        owner = lambda tensor: self.cuvmm._library.get().text("tag_of", tensor.data_ptr())
        layer = torch.nn.Linear(1024, 1024, device="cuda")
        for enter, expected in ((self.cuvmm.torch.pool, ""), (self.cuvmm.torch.worker, "grads")):
            layer.zero_grad(set_to_none=True)
            with enter("grads"):
                layer(torch.ones(64, 1024, device="cuda")).sum().backward()
            self.assertEqual([owner(it.grad) for it in layer.parameters()], [expected] * 2)
        found = []

        def work():
            with self.cuvmm.torch.worker("grads"):
                found.append(torch.ones(MIB, device="cuda"))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([owner(it) for it in found], ["grads"] * 3)


if __name__ == "__main__":
    unittest.main()
