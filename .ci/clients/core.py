"""cuda-core's memory resources on the stand-in, and two faults of cuda-core 1.2.2 that the stand-in shows.

Nothing but the driver is needed: no kernel is compiled or launched.
"""

import ctypes
import gc
import subprocess
import sys

from cuda.core import (
    Device,
    DeviceMemoryResource,
    DeviceMemoryResourceOptions,
    LegacyPinnedMemoryResource,
    VirtualMemoryResource,
)

GRANULE = 2 << 20


def live():
    """Returns the numbers of live reservations, physicals and mappings."""
    counts = (ctypes.c_uint64 * 8)()
    assert ctypes.CDLL("libcuda.so.1").fakecuda_live(ctypes.byref(counts)) == 0
    return list(counts)[:3]


def resources(device):
    """Allocates from each kind of memory, copies between them, and closes."""
    stream = device.create_stream()
    pool = DeviceMemoryResource(device, options=DeviceMemoryResourceOptions(max_size=64 << 20))
    pinned = LegacyPinnedMemoryResource()
    source = pinned.allocate(4096, stream=stream)
    ctypes.memset(int(source.handle), 42, 4096)
    virtual = VirtualMemoryResource(device).allocate(GRANULE, stream=stream)
    pooled = pool.allocate(4096, stream=stream)
    back = pinned.allocate(4096, stream=stream)
    whole = device.allocate(GRANULE, stream=stream)
    source.copy_to(pooled, stream=stream)
    pooled.copy_to(back, stream=stream)
    stream.sync()
    assert ctypes.string_at(int(back.handle), 4096) == bytes([42]) * 4096
    whole.copy_to(virtual, stream=stream)
    event = stream.record()
    event.sync()
    assert event.is_done and virtual.is_device_accessible and source.is_host_accessible
    for buffer in (pooled, whole, source, back, virtual):
        buffer.close(stream)
    stream.sync()
    pool.close()


def leak(device):
    """Finds that each allocation leaves its physical behind (NVIDIA/cuda-python#2882)."""
    resource = VirtualMemoryResource(device)
    before = live()
    for _ in range(8):
        resource.allocate(2 * GRANULE).close()
    gc.collect()
    reservations, physicals, mappings = (now - then for now, then in zip(live(), before))
    assert (reservations, mappings) == (0, 0)
    assert physicals == 8, f"{physicals} physicals are left: is the fault mended?"


def grow():
    """Grows a buffer in a process of its own, whose warnings the caller reads."""
    device = Device(0)
    device.set_current()
    resource = VirtualMemoryResource(device)
    buffer = resource.allocate(GRANULE)
    grown = resource.modify_allocation(buffer, 4 * GRANULE)
    assert grown.size == 4 * GRANULE
    grown.close()


def double_close():
    """Finds that growing frees a range twice, which the driver refuses (NVIDIA/cuda-python#2877)."""
    command = [sys.executable, __file__, "grow"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert "CUDA_ERROR_INVALID_VALUE" in said, f"no refusal: is the fault mended? {said}"


def main():
    if sys.argv[1:] == ["grow"]:
        grow()
        return
    device = Device(0)
    device.set_current()
    resources(device)
    leak(device)
    double_close()
    print("cuda-core: as expected, with both faults found")


main()
