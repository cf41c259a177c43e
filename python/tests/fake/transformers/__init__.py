"""The parts of transformers that `cuvmm.torch.transformers` touches: see README.md in the folder above."""
