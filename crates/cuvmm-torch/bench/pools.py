#!/usr/bin/env python3
"""Tries whether memory of `cudaMallocAsync` can be shared with another process, and prints answers.

    python3 pools.py
    python3 pools.py --without-torch

Memory of PyTorch's native allocator, of its backend `cudaMallocAsync`, and of plain calls of
`cuMemAllocAsync`, as candle and cudarc make them: from the default memory pool of the device, and
from a shareable pool that was made current. Each case has processes of its own, and uses nothing
but libcuda (and PyTorch). Exits with 1 if an answer is not the one that the documentation of cuvmm
gives.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys

POSIX_FD, PINNED, DEVICE = 1, 1, 1
MEMORY_TYPE, RANGE_START, RANGE_SIZE, HANDLE_TYPES, POOL = 2, 11, 12, 14, 17
ORDINAL = 9
RELEASE_THRESHOLD = 4
SIZE = 4 << 20
BYTE = 77


class Props(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = [
        ("alloc_type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("security", ctypes.c_void_p),
        ("maximum", ctypes.c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class Data(ctypes.Structure):
    """CUmemPoolPtrExportData."""

    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


class Refused(Exception):
    """A call that the driver refused."""


class Cuda:
    """The driver, with the primary context of device 0 current on this thread."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.must("cuInit", 0)
        context = ctypes.c_void_p()
        self.must("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.must("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        """Makes a call and returns the name of its result."""
        code = getattr(self.library, name)(*arguments)
        text = ctypes.c_char_p()
        if self.library.cuGetErrorName(code, ctypes.byref(text)) != 0 or not text.value:
            return str(code)
        return text.value.decode().replace("CUDA_ERROR_", "").replace("CUDA_SUCCESS", "SUCCESS")

    def must(self, name, *arguments):
        answer = self.call(name, *arguments)
        if answer not in ("SUCCESS", "0"):
            raise Refused(f"{name}: {answer}")

    def shareable_pool(self):
        """A pool that can be shared, made current. It keeps what is freed."""
        props = Props(PINNED, POSIX_FD, DEVICE, 0)
        pool = ctypes.c_void_p()
        self.must("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(props))
        most = ctypes.c_uint64(2**64 - 1)
        self.must("cuMemPoolSetAttribute", pool, RELEASE_THRESHOLD, ctypes.byref(most))
        self.must("cuDeviceSetMemPool", 0, pool)
        return pool

    def default_pool(self):
        pool = ctypes.c_void_p()
        self.must("cuDeviceGetDefaultMemPool", ctypes.byref(pool), 0)
        return pool

    def attribute(self, address, number):
        value = ctypes.c_uint64()
        pointer = ctypes.c_uint64(address)
        answer = self.call("cuPointerGetAttribute", ctypes.byref(value), number, pointer)
        return value.value if answer in ("SUCCESS", "0") else answer

    def allocate(self):
        """As candle and cudarc allocate."""
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(SIZE)
        self.must("cuMemAllocAsync", ctypes.byref(address), size, None)
        self.must("cuMemsetD8_v2", address, ctypes.c_ubyte(BYTE), size)
        self.must("cuStreamSynchronize", None)
        return address.value

    def first(self, address):
        byte = ctypes.c_ubyte()
        pointer, one = ctypes.c_uint64(address), ctypes.c_size_t(1)
        self.must("cuMemcpyDtoH_v2", ctypes.byref(byte), pointer, one)
        return byte.value


def give(cuda, address):
    """Exports the pool and the allocation, and lets another process take them."""
    answers = {}
    pool = cuda.attribute(address, POOL)
    answers["pool"] = "none" if pool in (0, "INVALID_VALUE") else "one"
    if answers["pool"] == "one":
        same = ctypes.c_void_p(pool).value == cuda.default_pool().value
        answers["pool"] = "default" if same else "ours"
    answers["handle types"] = cuda.attribute(address, HANDLE_TYPES)
    data, descriptor = Data(), ctypes.c_int(-1)
    pointer = ctypes.c_uint64(address)
    if answers["pool"] == "none":
        answers["export pointer"] = cuda.call(
            "cuMemPoolExportPointer", ctypes.byref(data), pointer
        )
        return answers
    answers["export pool"] = cuda.call(
        "cuMemPoolExportToShareableHandle",
        ctypes.byref(descriptor),
        ctypes.c_void_p(pool),
        POSIX_FD,
        ctypes.c_uint64(0),
    )
    # An allocation can be exported only once a handle of its pool was.
    answers["export pointer"] = cuda.call("cuMemPoolExportPointer", ctypes.byref(data), pointer)
    if descriptor.value < 0 or answers["export pool"] not in ("SUCCESS", "0"):
        return answers
    command = [sys.executable, __file__, "--take", str(descriptor.value), bytes(data.bytes).hex()]
    os.set_inheritable(descriptor.value, True)
    taken = subprocess.run(
        command, pass_fds=[descriptor.value], capture_output=True, text=True, timeout=120
    )
    try:
        answers["the other process"] = json.loads(taken.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answers["the other process"] = {"failed": taken.stderr[-500:]}
    answers["byte here after it wrote"] = cuda.first(address)
    return answers


def take(descriptor, data):
    """The other process: imports, reads, writes and frees, and does some of it twice."""
    cuda, answers = Cuda(), {}
    pool = ctypes.c_void_p()
    handle = ctypes.c_void_p(descriptor)
    answers["import pool"] = cuda.call(
        "cuMemPoolImportFromShareableHandle",
        ctypes.byref(pool),
        handle,
        POSIX_FD,
        ctypes.c_uint64(0),
    )
    data = Data.from_buffer_copy(bytes.fromhex(data))

    def imported():
        address = ctypes.c_uint64()
        answer = cuda.call(
            "cuMemPoolImportPointer", ctypes.byref(address), pool, ctypes.byref(data)
        )
        return answer, address.value

    answers["import pointer"], address = imported()
    if address:
        answers["byte"] = cuda.first(address)
        start = cuda.attribute(address, RANGE_START)
        answers["starts at its address"] = start == address or start
        for name, number in {
            "range": RANGE_SIZE,
            "device": ORDINAL,
            "memory type": MEMORY_TYPE,
            "handle types": HANDLE_TYPES,
        }.items():
            answers[name] = cuda.attribute(address, number)
        pointer, one = ctypes.c_uint64(address), ctypes.c_size_t(1)
        byte = ctypes.c_ubyte(BYTE + 1)
        answers["write"] = cuda.call("cuMemcpyHtoD_v2", pointer, ctypes.byref(byte), one)
        answers["free"] = cuda.call("cuMemFreeAsync", pointer, None)
        cuda.call("cuStreamSynchronize", None)
        answers["import again"], again = imported()
        answers["again at the same address"] = again == address
        if again:
            answers["byte again"] = cuda.first(again)
            answers["import twice"], twice = imported()
            answers["twice at the same address"] = twice == again
            answers["free one"] = cuda.call("cuMemFreeAsync", ctypes.c_uint64(again), None)
            cuda.call("cuStreamSynchronize", None)
            if twice:
                answers["free the other"] = cuda.call(
                    "cuMemFreeAsync", ctypes.c_uint64(twice), None
                )
                cuda.call("cuStreamSynchronize", None)
        answers["destroy pool"] = cuda.call("cuMemPoolDestroy", pool)
    print(json.dumps(answers))


def plain(shareable):
    """Memory of `cuMemAllocAsync`."""
    cuda = Cuda()
    if shareable:
        cuda.shareable_pool()
    return give(cuda, cuda.allocate())


def pytorch(shareable):
    """A tensor of PyTorch, by the backend that the environment selects."""
    import torch

    torch.cuda.init()
    cuda = Cuda()
    if shareable == "late":
        before = torch.full((SIZE,), BYTE, dtype=torch.uint8, device="cuda")
        cuda.shareable_pool()
        torch.cuda.synchronize()
        answers = {"allocated before": give(cuda, before.data_ptr())}
    else:
        answers = {}
        if shareable:
            cuda.shareable_pool()
    tensor = torch.full((SIZE,), BYTE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    answers["backend"] = torch.cuda.get_allocator_backend()
    answers.update(give(cuda, tensor.data_ptr()))
    # PyTorch's own way to share a tensor.
    try:
        from torch.multiprocessing.reductions import reduce_tensor

        reduce_tensor(tensor)
        answers["torch.multiprocessing"] = "shares it"
    except Exception as error:  # Whatever it raises is the answer.
        answers["torch.multiprocessing"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return answers


CASES = {
    "plain calls, default pool": (plain, False, None),
    "plain calls, shareable pool made current": (plain, True, None),
    "PyTorch, native": (pytorch, False, "native"),
    "PyTorch, native, shareable pool made current": (pytorch, True, "native"),
    "PyTorch, cudaMallocAsync, default pool": (pytorch, False, "cudaMallocAsync"),
    "PyTorch, cudaMallocAsync, shareable pool made current": (pytorch, True, "cudaMallocAsync"),
    "PyTorch, cudaMallocAsync, shareable pool late": (pytorch, "late", "cudaMallocAsync"),
}


def is_shared(answers):
    """Whether another process had the bytes, and its write was seen."""
    other = answers.get("the other process", {})
    return other.get("byte") == BYTE and answers.get("byte here after it wrote") == BYTE + 1


def in_a_process(name):
    backend = CASES[name][2]
    environment = dict(os.environ)
    if backend:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = f"backend:{backend}"
    ran = subprocess.run(
        [sys.executable, __file__, "--case", name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    try:
        return json.loads(ran.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"failed": (ran.stderr or ran.stdout)[-500:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without-torch", action="store_true", help="only plain calls")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--take", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.take:
        return take(int(options.take[0]), options.take[1])
    if options.case:
        work, shareable, _ = CASES[options.case]
        print(json.dumps(work(shareable)))
        return None
    wrong = []
    for name, (work, shareable, backend) in CASES.items():
        if options.without_torch and work is pytorch:
            continue
        answers = in_a_process(name)
        print(f"== {name}")
        for part, answer in answers.items():
            if isinstance(answer, dict):
                print(f"   {part}:")
                for inner, value in answer.items():
                    print(f"      {inner}: {value}")
            else:
                print(f"   {part}: {answer}")
        shared = is_shared(answers)
        print(f"   shared with another process: {'yes' if shared else 'no'}")
        if shared != (bool(shareable) and backend != "native"):
            wrong.append(name)
    print("not as documented: " + ", ".join(wrong) if wrong else "all as documented")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
