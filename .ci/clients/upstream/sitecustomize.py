"""Lets cuda-core's tests, and the processes that they start, run without the CUDA runtime library.

`Device.sync` of cuda-core calls `cudaDeviceSynchronize`, and the runtime library needs tables of the driver
that the stand-in does not have. The driver's `cuCtxSynchronize` takes its place.
"""

from cuda.bindings import driver, runtime


def synchronize():
    (code,) = driver.cuCtxSynchronize()
    return (runtime.cudaError_t(int(code)),)


runtime.cudaDeviceSynchronize = synchronize
