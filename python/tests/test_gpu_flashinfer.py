"""Kernels that the project did not write, and addresses beyond 32-bit counts of elements: FlashInfer's decode kernel
over paged caches, and a block 64 GiB behind the first one."""

from __future__ import annotations

import unittest

from modes import MIB, GpuTest, only_cuvmm

import torch

try:
    import flashinfer
except ImportError:
    flashinfer = None
try:
    import triton
except ImportError:
    triton = None

LAYERS, TOKENS, HEADS, QUERIES, SIZE = 4, 16, 4, 16, 128
#: The last block begins at 64 GiB: 2 MiB a block.
BLOCKS = (64 << 30) // (2 * MIB) + 1


@only_cuvmm
class FarTest(GpuTest):
    enters = False

    def make(self, group, **options):
        import cuvmm.torch

        kv = cuvmm.torch.paged_kv(BLOCKS, group, **options)
        self.addCleanup(kv.close)
        return kv

    @unittest.skipIf(triton is None, "Triton is not installed")
    def test_a_kernel_reaches_a_block_at_the_top_of_64_gib(self):
        import cuvmm.torch
        from test_gpu_paged import expected, launch
        from test_gpu_paged import HEADS, ROW, SIZE

        # A layer and part of a block is 8 KiB, as those kernels have it.
        group = cuvmm.torch.LayerGroup.keys_and_values(128, TOKENS, HEADS, SIZE, torch.float32)
        for layout in ("block-major", "token-major", "layer-major"):
            with self.subTest(layout):
                kv = self.make(group, layout=layout, name=f"far {layout}", extent=2 * MIB)
                self.assertEqual(kv.block_bytes, 2 * MIB)
                numbers = [BLOCKS - 1, 0, BLOCKS // 2]
                kv.back(numbers)
                first, last = kv.tensor(0, 0), kv.tensor(127, 1)
                far = last[BLOCKS - 1].data_ptr() - first.data_ptr()
                self.assertGreaterEqual(far, (64 << 30) - (2 * MIB))
                table = torch.tensor(numbers, device="cuda", dtype=torch.int32)
                found = []
                for tensor, value in ((first, 1000.0), (last, 2000.0)):
                    out = torch.empty(3, TOKENS, ROW, device="cuda")
                    launch(tensor, table, torch.full((1,), value, device="cuda"), out)
                    found.append((tensor, out, expected(3, value)))
                for tensor, out, values in found:
                    self.assertTrue(torch.equal(out, values))
                    for number, rows in zip(numbers, values, strict=True):
                        self.assertTrue(torch.equal(tensor[number].reshape(TOKENS, ROW), rows))

    @unittest.skipIf(flashinfer is None, "FlashInfer is not installed")
    def test_flashinfer_decodes_over_a_cache(self):
        import cuvmm.torch

        # 32 KiB a layer and block: 64 layers make 2 MiB.
        group = cuvmm.torch.LayerGroup.keys_and_values(64, TOKENS, HEADS, SIZE, torch.bfloat16)
        workspace = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        lengths = [1, 16, 37, 100]
        for layout in ("block-major", "token-major"):
            with self.subTest(layout):
                kv = self.make(group, layout=layout, name=f"flashinfer {layout}")
                counts = [-(-length // TOKENS) for length in lengths]
                numbers = [BLOCKS - 1, *range(sum(counts) * 3, 3, -3)][: sum(counts)]
                kv.back(numbers)
                table = torch.tensor(numbers, dtype=torch.int32, device="cuda")
                starts = [sum(counts[:at]) for at in range(len(counts) + 1)]
                indptr = torch.tensor(starts, dtype=torch.int32, device="cuda")
                last = torch.tensor([(length - 1) % TOKENS + 1 for length in lengths], dtype=torch.int32, device="cuda")
                kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
                wrapper.plan(indptr, table, last, QUERIES, HEADS, SIZE, TOKENS, **kinds)
                for layer in (0, 63):
                    keys, values = kv.tensor(layer, 0), kv.tensor(layer, 1)
                    for tensor in (keys, values):
                        tensor[table.long()] = torch.randn(len(numbers), TOKENS, HEADS, SIZE, device="cuda").bfloat16()
                    query = torch.randn(len(lengths), QUERIES, SIZE, device="cuda").bfloat16()
                    out = wrapper.run(query, (keys, values))
                    for at, length in enumerate(lengths):
                        mine = table[starts[at] : starts[at + 1]].long()
                        known = attention(query[at], keys[mine], values[mine], length)
                        torch.testing.assert_close(out[at].float(), known, rtol=2e-2, atol=2e-2)


def attention(query, keys, values, length: int) -> torch.Tensor:
    """Computes the attention of one query over the tokens of its blocks, in float32."""
    keys, values = (it.reshape(-1, HEADS, SIZE)[:length].float() for it in (keys, values))
    query = query.float().view(HEADS, QUERIES // HEADS, SIZE)
    weight = torch.einsum("hqs,ths->hqt", query, keys).mul(SIZE**-0.5).softmax(2)
    return torch.einsum("hqt,ths->hqs", weight, values).reshape(QUERIES, SIZE)


if __name__ == "__main__":
    unittest.main()
