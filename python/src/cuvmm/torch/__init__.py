"""PyTorch's memory from the heap.

    import cuvmm.torch

    cuvmm.torch.install(limit="60GiB")  # before PyTorch's first use of CUDA

From then on all CUDA tensors use the heap, and `torch.cuda.memory_stats` and its relatives report
the heap's figures. Without `install`, `pool` gives the memory of some tensors a name, by which
`cuvmm.sleep` and `cuvmm.wake` move it out and in, and `graphs` the memory of captured graphs.
`paged_kv` makes the tensors of a paged KV cache, with memory under the blocks in use.

The modules `cuvmm.torch.memory_saver`, with torch_memory_saver's interface, and `cuvmm.torch.vllm`, for
vLLM's sleep mode, are imported by their names.
"""

from ._access import check_access
from ._buffers import lost_buffers
from ._graphs import graphs
from ._install import install, is_installed
from ._numbers import FreeNumbers
from ._paged import BackRequest, Evictions, LayerGroup, PagedKv, PagedStats, Part, paged_kv
from ._pools import pool, worker
from ._sharing import read_only, sent

__all__ = [
    "BackRequest",
    "Evictions",
    "FreeNumbers",
    "LayerGroup",
    "PagedKv",
    "PagedStats",
    "Part",
    "check_access",
    "graphs",
    "install",
    "is_installed",
    "lost_buffers",
    "paged_kv",
    "pool",
    "read_only",
    "sent",
    "worker",
]
