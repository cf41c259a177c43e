"""Training: gradients, checkpoints, data loaders, mixed precision, torch.compile."""

import importlib.util
import unittest

from modes import MIB, MODE, GpuTest, memory, torch
from torch.utils.checkpoint import checkpoint


class Numbers(torch.utils.data.Dataset):
    """A data set whose item is filled with its number."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((257,), float(index)), index


def small(dtype=torch.float32):
    torch.manual_seed(3)
    layers = []
    for _ in range(4):
        layers += [torch.nn.Linear(300, 300), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers).to(dtype)


class Training(GpuTest):
    def test_gradients_are_those_of_the_processor(self):
        model, inputs = small(torch.float64), torch.randn(501, 300, dtype=torch.float64)
        model(inputs).pow(2).mean().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.cuda()
        for _ in range(10):
            model.zero_grad(set_to_none=True)
            model(inputs.cuda()).pow(2).mean().backward()
        for parameter, reference in zip(model.parameters(), expected):
            torch.testing.assert_close(parameter.grad.cpu(), reference)

    def test_checkpoints_give_the_same_gradients(self):
        model, inputs = small().cuda(), torch.randn(2000, 300, device="cuda")
        inputs.requires_grad_()
        model(inputs).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        for reentrant in (False, True):
            model.zero_grad(set_to_none=True)
            values = inputs
            for layer in model:
                values = checkpoint(layer, values, use_reentrant=reentrant)
            values.sum().backward()
            for parameter, reference in zip(model.parameters(), expected):
                torch.testing.assert_close(parameter.grad, reference)

    def test_data_loader(self):
        """Workers are forked before and after the first allocation; batches come by pinned memory."""
        for workers in (0, 2):
            loader = torch.utils.data.DataLoader(
                Numbers(),
                batch_size=32,
                num_workers=workers,
                pin_memory=True,
                timeout=60 * (workers > 0),
            )
            seen = 0
            for batch, indexes in loader:
                there = batch.cuda(non_blocking=True)
                self.assertTrue(bool((there[:, 0].cpu() == indexes).all()))
                self.assertTrue(bool((there == there[:, :1]).all()))
                seen += len(indexes)
            self.assertEqual(seen, 200)

    def test_data_loader_that_spawns(self):
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=64, num_workers=1, multiprocessing_context="spawn", timeout=120
        )
        self.assertEqual(sum(len(indexes) for _, indexes in loader), 200)

    def test_mixed_precision_and_optimizer(self):
        model = small().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cuda")
        inputs, losses = torch.randn(512, 300, device="cuda"), []
        for _ in range(30):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (model(inputs) - inputs).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss))
        self.assertLess(losses[-1], losses[0])

    def test_varying_lengths(self):
        """Reserved memory stays near what is live while the lengths of batches change."""
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        torch.cuda.reset_peak_memory_stats()
        for step in range(40):
            optimizer.zero_grad(set_to_none=True)
            length = 64 + step * 37 % 448
            layer(torch.randn(16, length, 256, device="cuda")).square().mean().backward()
            optimizer.step()
        if MODE == "install":
            peak = torch.cuda.max_memory_allocated()
            self.assertLessEqual(torch.cuda.max_memory_reserved(), 1.25 * peak + 64 * MIB)

    def test_convolutions(self):
        model = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
        for size in (17, 32, 65):
            inputs = torch.randn(4, 16, size, size, device="cuda")
            made = model(inputs)
            made.mean().backward()
            torch.testing.assert_close(made.cpu(), model.cpu()(inputs.cpu()), rtol=1e-2, atol=1e-2)
            model.cuda()

    @unittest.skipUnless(importlib.util.find_spec("triton"), "Triton is not installed")
    def test_compile(self):
        model, inputs = small().cuda(), torch.randn(64, 300, device="cuda")
        compiled = torch.compile(model)
        with memory():
            made = compiled(inputs)
            made.sum().backward()
        torch.testing.assert_close(made, model(inputs), rtol=1e-3, atol=1e-3)

    def test_compile_a_function_that_asks_for_figures(self):
        """It is compiled in parts, as it is natively."""

        @torch.compile(backend="eager")
        def doubled(values):
            free, total = torch.cuda.mem_get_info()
            live = torch.cuda.memory_allocated()
            return values * 2 if live <= total and free <= total else values

        values = torch.ones(1000, device="cuda")
        for _ in range(2):
            self.assertEqual(float(doubled(values).sum()), 2000.0)

    @unittest.skipUnless(importlib.util.find_spec("triton"), "Triton is not installed")
    @unittest.skipIf(MODE == "pool", "graph trees set pools of their own")
    def test_compile_with_graph_trees(self):
        model, inputs = small().cuda(), torch.randn(64, 300, device="cuda")
        compiled = torch.compile(model, mode="reduce-overhead")
        with torch.no_grad():
            if MODE == "native":
                for _ in range(4):
                    made = compiled(inputs).clone()
                torch.testing.assert_close(made, model(inputs), rtol=1e-3, atol=1e-3)
            else:
                with self.assertRaisesRegex(Exception, "cuvmm"):
                    for _ in range(4):
                        compiled(inputs)


if __name__ == "__main__":
    unittest.main()
