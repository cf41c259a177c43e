"""Bytes of a tensor's memory, as the stand-in for libcuda writes and reads them."""

import ctypes

libcuda = ctypes.CDLL("libcuda.so.1")
libcuda.cuMemsetD8_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint8, ctypes.c_size_t]
libcuda.cuMemcpyDtoH_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t]


def fill(tensor, byte):
    assert libcuda.cuMemsetD8_v2(tensor.address, byte, tensor.size) == 0


def shows(tensor, byte):
    """Returns True if the memory can be read and has this byte everywhere."""
    buffer = ctypes.create_string_buffer(tensor.size)
    code = libcuda.cuMemcpyDtoH_v2(buffer, tensor.address, tensor.size)
    return code == 0 and buffer.raw == bytes([byte]) * tensor.size


def live():
    """Returns the numbers of physicals and of mappings of this process."""
    found = (ctypes.c_uint64 * 8)()
    assert libcuda.fakecuda_live(found) == 0
    return found[1], found[2]
