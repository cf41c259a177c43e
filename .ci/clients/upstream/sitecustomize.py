"""Lets cuda-core's tests, and the processes that they start, run without two other libraries of NVIDIA's.

`Device.sync` of cuda-core calls `cudaDeviceSynchronize`, and the runtime library needs tables of the driver
that the stand-in does not have. The driver's `cuCtxSynchronize` takes its place. `Device.get_all_devices`
asks the management library (NVML) for the number of devices. The driver's `cuDeviceGetCount` takes its place.
"""

from cuda.bindings import driver, nvml, runtime


def synchronize():
    (code,) = driver.cuCtxSynchronize()
    return (runtime.cudaError_t(int(code)),)


def count():
    driver.cuInit(0)
    _, number = driver.cuDeviceGetCount()
    return number


runtime.cudaDeviceSynchronize = synchronize
nvml.init_v2 = lambda: None
nvml.device_get_count_v2 = count
