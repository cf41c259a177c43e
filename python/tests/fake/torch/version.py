"""The version of CUDA that this stand-in claims."""

cuda = "13.0"
