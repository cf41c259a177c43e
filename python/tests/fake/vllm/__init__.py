"""A stand-in for vLLM: see README.md in the folder above."""
