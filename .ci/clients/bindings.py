"""The interface of virtual memory through NVIDIA's cuda-bindings, from two processes.

The second process is this program with the number of a socket. Physical memory travels as a descriptor.
"""

import ctypes
import os
import socket
import subprocess
import sys

from cuda.bindings import driver as cu

GRANULE = 2 << 20


def ok(answer):
    """Returns the results of a call that has to succeed."""
    code, *results = answer
    assert code == cu.CUresult.CUDA_SUCCESS, code
    return results[0] if len(results) == 1 else results


def refused(answer, name):
    """Checks that a call answers with an error."""
    assert answer[0].name == name, f"{answer[0].name} and not {name}"


def enter():
    ok(cu.cuInit(0))
    device = ok(cu.cuDeviceGet(0))
    context = ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuCtxSetCurrent(context))
    return device


def properties():
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 0
    wanted.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return wanted


def access(flags):
    wanted = cu.CUmemAccessDesc()
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 0
    wanted.flags = flags
    return wanted


BOTH = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
READ = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def read(address, size):
    buffer = bytearray(size)
    ok(cu.cuMemcpyDtoH(buffer, address, size))
    return bytes(buffer)


def live():
    """Returns the numbers of live reservations, physicals and mappings."""
    counts = (ctypes.c_uint64 * 8)()
    assert ctypes.CDLL("libcuda.so.1").fakecuda_live(ctypes.byref(counts)) == 0
    return list(counts)[:3]


def mappings():
    """Reserves, creates, maps, opens, closes, moves and frees."""
    wanted = properties()
    least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert ok(cu.cuMemGetAllocationGranularity(wanted, least)) == GRANULE
    base = ok(cu.cuMemAddressReserve(4 * GRANULE, 0, 0, 0))
    handles = [ok(cu.cuMemCreate(GRANULE, wanted, 0)) for _ in range(2)]
    for index, handle in enumerate(handles):
        ok(cu.cuMemMap(int(base) + index * GRANULE, GRANULE, 0, handle, 0))
    refused(cu.cuMemsetD8(base, 1, 16), "CUDA_ERROR_INVALID_VALUE")
    ok(cu.cuMemSetAccess(base, 2 * GRANULE, [access(BOTH)], 1))
    ok(cu.cuMemsetD8(base, 7, 2 * GRANULE))
    assert read(int(base) + GRANULE - 8, 16) == bytes([7] * 16)
    place = access(BOTH).location
    assert ok(cu.cuMemGetAccess(place, base)) == int(BOTH)
    ok(cu.cuMemSetAccess(base, GRANULE, [access(READ)], 1))
    refused(cu.cuMemsetD8(base, 1, 16), "CUDA_ERROR_INVALID_VALUE")
    back = ok(cu.cuMemGetAllocationPropertiesFromHandle(handles[0]))
    assert back.location.id == 0 and back.requestedHandleTypes == FD
    again = ok(cu.cuMemRetainAllocationHandle(int(base) + 100))
    assert int(again) == int(handles[0])
    ok(cu.cuMemRelease(again))
    start, size = ok(cu.cuMemGetAddressRange(int(base) + GRANULE + 5))
    assert (int(start), size) == (int(base) + GRANULE, GRANULE)
    kind = cu.CUpointer_attribute
    assert ok(cu.cuPointerGetAttribute(kind.CU_POINTER_ATTRIBUTE_MAPPING_SIZE, base)) == GRANULE
    asked = [kind.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, kind.CU_POINTER_ATTRIBUTE_IS_MANAGED]
    assert ok(cu.cuPointerGetAttributes(2, asked, base)) == [0, False]
    refused(cu.cuMemAddressFree(base, 4 * GRANULE), "CUDA_ERROR_INVALID_VALUE")
    # The second physical moves to another place and keeps its bytes.
    ok(cu.cuMemUnmap(int(base) + GRANULE, GRANULE))
    ok(cu.cuMemMap(int(base) + 3 * GRANULE, GRANULE, 0, handles[1], 0))
    ok(cu.cuMemSetAccess(int(base) + 3 * GRANULE, GRANULE, [access(BOTH)], 1))
    assert read(int(base) + 3 * GRANULE, 4) == bytes([7] * 4)
    for handle in handles:
        ok(cu.cuMemRelease(handle))
    assert live() == [1, 2, 2], live()
    ok(cu.cuMemUnmap(base, GRANULE))
    ok(cu.cuMemUnmap(int(base) + 3 * GRANULE, GRANULE))
    ok(cu.cuMemAddressFree(base, 4 * GRANULE))
    assert live() == [0, 0, 0], live()


def mapped(handle):
    base = ok(cu.cuMemAddressReserve(GRANULE, 0, 0, 0))
    ok(cu.cuMemMap(base, GRANULE, 0, handle, 0))
    ok(cu.cuMemRelease(handle))
    ok(cu.cuMemSetAccess(base, GRANULE, [access(BOTH)], 1))
    return int(base)


def giver():
    """Shares a physical with another process, which reads and writes it."""
    handle = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    descriptor = ok(cu.cuMemExportToShareableHandle(handle, FD, 0))
    base = mapped(handle)
    ok(cu.cuMemcpyHtoD(base, b"from the giver", 14))
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    socket.send_fds(ours, [b"x"], [int(descriptor)])
    os.close(int(descriptor))
    assert child.wait(timeout=120) == 0
    assert read(base, 14) == b"from the taker"
    ok(cu.cuMemUnmap(base, GRANULE))
    ok(cu.cuMemAddressFree(base, GRANULE))


def taker(number):
    enter()
    _, descriptors, _, _ = socket.recv_fds(socket.socket(fileno=number), 1, 1)
    handle = ok(cu.cuMemImportFromShareableHandle(descriptors[0], FD))
    os.close(descriptors[0])
    base = mapped(handle)
    assert read(base, 14) == b"from the giver"
    ok(cu.cuMemcpyHtoD(base, b"from the taker", 14))
    ok(cu.cuMemUnmap(base, GRANULE))
    ok(cu.cuMemAddressFree(base, GRANULE))


def streams():
    """Orders work by streams and events, and allocates from pools."""
    stream = ok(cu.cuStreamCreateWithPriority(cu.CUstream_flags.CU_STREAM_NON_BLOCKING, -2))
    assert ok(cu.cuStreamGetPriority(stream)) == -2
    start, end = ok(cu.cuEventCreate(0)), ok(cu.cuEventCreate(0))
    ok(cu.cuEventRecord(start, stream))
    address = ok(cu.cuMemAllocAsync(4096, stream))
    ok(cu.cuMemsetD32Async(address, 0x01020304, 1024, stream))
    ok(cu.cuEventRecord(end, stream))
    ok(cu.cuStreamSynchronize(stream))
    assert ok(cu.cuEventElapsedTime(start, end)) >= 0
    assert read(address, 4) == bytes([4, 3, 2, 1])
    ok(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuEventDestroy(start))
    ok(cu.cuEventDestroy(end))
    ok(cu.cuStreamDestroy(stream))
    refused(cu.cuMemAlloc(0), "CUDA_ERROR_INVALID_VALUE")
    name = ok(cu.cuGetErrorName(cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY))
    assert name == b"CUDA_ERROR_OUT_OF_MEMORY"


def main():
    if len(sys.argv) > 1:
        taker(int(sys.argv[1]))
        return
    enter()
    mappings()
    giver()
    streams()
    print("cuda-bindings: as expected")


main()
