"""The parts of `torch.cuda.graphs` that the package calls or replaces functions of.

A capture changes where tensors are made, and asks the driver for nothing.
"""

import ctypes

from .. import _C
from . import memory

_handles = 0


class _PoolId(ctypes.Structure):
    _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]


def graph_pool_handle():
    """Returns a new handle, whose first number is 0."""
    global _handles
    _handles += 1
    return (0, _handles)


def _call(hook, device, pool, *arguments):
    """Calls a function that an installed allocator has for pools."""
    types = [ctypes.c_int, _PoolId] + [ctypes.c_void_p] * len(arguments)
    function = ctypes.CFUNCTYPE(None, *types)(_C.current.hooks[hook])
    function(device, _PoolId(*pool), *arguments)


class CUDAGraph:
    def __init__(self):
        self.pool = None

    def capture_begin(self, pool=None, capture_error_mode="global"):
        """Begins a capture."""
        self.pool = graph_pool_handle() if pool is None else pool
        if _C.current is None:
            self.entered = memory.known.get(self.pool)
            if self.entered is not None:
                memory.entered.insert(0, self.entered)
        else:
            # Without a filter all streams belong to the capture.
            _call("set_begin_allocate_to_pool", 0, self.pool, None)

    def capture_end(self):
        if _C.current is not None:
            _call("set_end_allocate_to_pool_fn", 0, self.pool)
        elif self.entered is not None:
            memory.entered.remove(self.entered)

    def reset(self):
        if _C.current is not None:
            _call("set_release_pool", 0, self.pool)
