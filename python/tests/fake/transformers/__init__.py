"""The parts of transformers that `cuvmm.torch.transformers` touches: see README.md in the folder above."""

__version__ = "5.17.0"
