"""GPU memory for Python from cuvmm: PyTorch, CuPy and DLPack over one heap with a hard limit.

    import cuvmm.torch

    cuvmm.torch.install(limit="60GiB")  # before PyTorch's first use of CUDA

`cuvmm.torch.install` makes all of PyTorch's tensors use the heap; `cuvmm.torch.pool` only those of
a block of code, which `cuvmm.sleep` and `cuvmm.wake` move out and in. `cuvmm.cupy.install` does it
for CuPy. `cuvmm.stats` shows who has what. `cuvmm.empty` and `cuvmm.from_dlpack` exchange memory
with any library that has DLPack, and `copy_from` and `numpy` copy from and to NumPy. `cuvmm.publish` gives tensors to other processes, which
`cuvmm.attach` them without a copy. `cuvmm.extents` lists the physical memory under a tensor.
"""

from __future__ import annotations

from ._arrays import DeviceArray, ForeignArray, empty, from_dlpack
from ._attaching import Attached, attach
from ._errors import Error, NotPublishedError, OutOfMemoryError
from ._extents import Extent, extents
from ._groups import Group, group
from ._keepers import Keeper, drop
from ._keeping import keep, trim
from ._library import path as library_path
from ._publishing import Publication, publish
from ._settings import configure
from ._sleeping import Slept, asleep, exchange, limit_host, prepare, release_host, sleep, wake
from ._stats import Stats, empty_cache, stats
from ._streams import end_stream

__all__ = [
    "Attached",
    "DeviceArray",
    "Error",
    "Extent",
    "Group",
    "ForeignArray",
    "Keeper",
    "NotPublishedError",
    "OutOfMemoryError",
    "Publication",
    "Slept",
    "Stats",
    "asleep",
    "attach",
    "configure",
    "drop",
    "empty",
    "empty_cache",
    "end_stream",
    "exchange",
    "extents",
    "from_dlpack",
    "group",
    "keep",
    "library_path",
    "limit_host",
    "prepare",
    "publish",
    "release_host",
    "sleep",
    "stats",
    "trim",
    "wake",
]

__version__ = "0.1.0"
