"""transformers' continuous batching over a paged cache: the tokens of its own cache, with memory under blocks in use."""

from __future__ import annotations

import unittest

from modes import MIB, GpuTest, not_installed, only_cuvmm

import torch

try:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
except ImportError:
    raise unittest.SkipTest("transformers with continuous batching is not installed") from None


@only_cuvmm
class Batching(GpuTest):
    enters = False

    @classmethod
    def setUpClass(cls):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
        )
        config._attn_implementation = "sdpa"
        cls.model = LlamaForCausalLM(config).eval().cuda()
        chance = torch.Generator().manual_seed(3)
        lengths = (5, 40, 17, 33, 9, 64, 21, 5, 120)
        prompts = [torch.randint(3, 128, (length,), generator=chance).tolist() for length in lengths]
        # Prompts that begin as others do.
        cls.prompts = [*prompts, [*prompts[1][:32], 7, 8, 9], [*prompts[5][:48], 1, 2], prompts[8]]

    def how(self, num_blocks: int, **options) -> dict:
        how = GenerationConfig(max_new_tokens=32, do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(
            block_size=16, num_blocks=num_blocks, max_batch_tokens=128, max_blocks_per_request=0, **options
        )
        return {"generation_config": how, "continuous_batching_config": config}

    def generate(self, num_blocks: int, **options) -> list[list[int]]:
        found = self.model.generate_batch(self.prompts, **self.how(num_blocks, **options), progress_bar=False)
        in_order = sorted(found.items(), key=lambda it: int(it[0].rpartition("_")[2]))
        return [output.generated_tokens for _, output in in_order]

    def check(self, num_blocks: int, **options) -> None:
        import cuvmm.torch.transformers as adapter

        own = self.generate(num_blocks, **options)
        self.assertEqual({len(tokens) for tokens in own}, {32})
        with adapter.paged(name="chat", extent=2 * MIB):
            self.assertEqual(self.generate(num_blocks, **options), own)
            # Blocks that cost addresses only.
            if "use_cuda_graph" in options and not options["use_cuda_graph"]:
                self.assertEqual(self.generate(100 * num_blocks, **options), own)

    def test_tokens_are_those_of_transformers_own_cache(self):
        self.check(128, use_cuda_graph=False)

    def test_few_blocks_are_shared_by_turns(self):
        self.check(24, use_cuda_graph=False)

    def test_two_batches_at_a_time(self):
        self.check(128, use_cuda_graph=False, use_async_batching=True)

    def test_an_engine_without_requests_sleeps_and_those_that_come_wait(self):
        import cuvmm
        import cuvmm.torch.transformers as adapter

        own = self.generate(128, use_cuda_graph=False)
        manager = self.model.init_continuous_batching(**self.how(128, use_cuda_graph=False))
        with adapter.paged(name="sleeper", extent=2 * MIB):
            manager.warmup()
        manager.start()
        try:
            for sleeps in (False, True):
                if sleeps:
                    cuvmm.sleep("sleeper")
                names = [manager.add_request(prompt) for prompt in self.prompts]
                if sleeps:
                    self.assertIsNone(manager.get_result(timeout=0.5))
                    cuvmm.wake("sleeper")
                results = [manager.get_result(timeout=30) for _ in names]
                found = {result.request_id: result.generated_tokens for result in results}
                self.assertEqual([found[name] for name in names], own)
        finally:
            manager.stop(block=True, timeout=10, hard_stop=True)
            manager.destroy()

    # Under `install` PyTorch has no `MemPool`, which transformers makes for graphs.
    @not_installed
    def test_captured_graphs(self):
        self.check(128, use_cuda_graph=True)


if __name__ == "__main__":
    unittest.main()
