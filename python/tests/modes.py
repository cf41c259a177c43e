"""How the GPU tests get their memory: the environment variable `CUVMM_MODE` chooses.

    native    PyTorch's own allocator
    install   `cuvmm.torch.install`
    pool      `cuvmm.torch.pool` over PyTorch's own allocator

With `CUVMM_SHAREABLE` the heap's memory is shareable.

Each test file runs in a process of its own. Import this before the first use of CUDA.
"""

from __future__ import annotations

import contextlib
import os
import unittest

MODE = os.environ.get("CUVMM_MODE", "native")
MIB, GIB = 1 << 20, 1 << 30
#: The limit under `install`.
LIMIT = 8 * GIB

if MODE not in ("native", "install", "pool"):
    raise SystemExit(f"CUVMM_MODE is native, install or pool, not {MODE!r}")

try:
    import torch
except ImportError:
    raise unittest.SkipTest("PyTorch is not installed") from None
if not torch.cuda.is_available():
    if os.environ.get("CUVMM_REQUIRE_GPU"):
        raise SystemExit("there is no GPU for PyTorch")
    raise unittest.SkipTest("there is no GPU for PyTorch")

# `is_available` must not have started CUDA: with this, PyTorch asks without a context.
assert not torch.cuda.is_initialized()

if MODE != "native":
    import cuvmm
    import cuvmm.torch

    # Counting the devices does not start CUDA.
    COUNT = torch.cuda.device_count()
    set_up = cuvmm.torch.install if MODE == "install" else cuvmm.configure
    set_up(
        limit=LIMIT,
        peers=range(COUNT) if COUNT > 1 else (),
        shareable=bool(os.environ.get("CUVMM_SHAREABLE")),
    )

only_installed = unittest.skipUnless(MODE == "install", f"in mode {MODE}: needs install")
only_cuvmm = unittest.skipIf(MODE == "native", "in mode native: needs cuvmm")
only_pool = unittest.skipUnless(MODE == "pool", f"in mode {MODE}: needs pool")
not_installed = unittest.skipIf(MODE == "install", "not with a pluggable allocator")


def memory(name: str = "tests"):
    """Enters the pool of a name in mode pool, and nothing in the others. For the calling thread."""
    if MODE == "pool":
        return cuvmm.torch.pool(name)
    return contextlib.nullcontext()


class GpuTest(unittest.TestCase):
    """A test whose thread allocates as the mode says."""

    #: False if the test enters `memory` itself, because it captures graphs or enters other pools.
    enters = True

    def setUp(self) -> None:
        torch.manual_seed(0)
        if self.enters:
            entered = memory()
            entered.__enter__()
            self.addCleanup(entered.__exit__, None, None, None)

    def tearDown(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
