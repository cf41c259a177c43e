#!/usr/bin/env python3
"""Exchanges tensors over DLPack between this library and NumPy, PyTorch or CuPy, both ways.

    dlpack.py --on numpy|torch|cupy --library libdlpack_python.so

The library is the example `dlpack_python` of the crate `cuvmm`, with the feature `dlpack`. NumPy is
tested on memory of the host driver, the other libraries on memory of the GPU.
"""

import argparse
import ctypes
import gc
import os
import sys
import threading
from ctypes import (POINTER, Structure, c_bool, c_char_p, c_int32, c_int64, c_size_t, c_uint8,
                    c_uint64, c_void_p)

MIB = 1 << 20
LIMIT = 256 * MIB
TYPES = {"uint8": (1, 8), "int32": (0, 32), "int64": (0, 64), "float16": (2, 16), "float32": (2, 32),
         "float64": (2, 64)}
NAMES = {True: b"dltensor_versioned", False: b"dltensor"}


class Request(Structure):
    _fields_ = [("offset", c_uint64), ("shape", POINTER(c_size_t)), ("strides", POINTER(c_size_t)),
                ("dimensions", c_size_t), ("code", c_uint8), ("bits", c_uint8), ("read_only", c_bool),
                ("versioned", c_bool), ("has_stream", c_bool), ("stream", c_int64)]


def load(path):
    ours = ctypes.CDLL(path)
    for name, out, arguments in [
        ("last_error", c_char_p, []),
        ("world_open", c_void_p, [c_bool, c_uint64]),
        ("world_close", c_bool, [c_void_p]),
        ("world_used", c_int64, [c_void_p]),
        ("world_in_use", c_uint64, [c_void_p]),
        ("world_trim", c_bool, [c_void_p]),
        ("world_stream", c_uint64, [c_void_p]),
        ("owner_new", c_void_p, [c_void_p, c_uint8, c_uint64]),
        ("owner_drop", None, [c_void_p]),
        ("owner_write", c_bool, [c_void_p, c_void_p, c_uint64, c_char_p, c_size_t]),
        ("owner_read", c_bool, [c_void_p, c_void_p, c_uint64, c_char_p, c_size_t]),
        ("owner_export", c_void_p, [c_void_p, POINTER(Request)]),
        ("owner_device", c_bool, [c_void_p, POINTER(c_int32 * 2)]),
        ("tensor_delete", None, [c_void_p, c_bool]),
        ("tensor_import", c_void_p, [c_void_p, c_void_p, c_bool]),
        ("imported_read", c_bool, [c_void_p, c_uint64, c_char_p, c_size_t]),
        ("imported_write", c_bool, [c_void_p, c_uint64, c_char_p, c_size_t]),
        ("imported_close", c_bool, [c_void_p, c_void_p, c_int64]),
    ]:
        function = getattr(ours, name)
        function.restype, function.argtypes = out, arguments
    return ours


python = ctypes.pythonapi
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = [c_void_p, c_char_p, c_void_p]
python.PyCapsule_GetPointer.restype = c_void_p
# A capsule that is being destroyed cannot be referenced any more, so its address is passed.
python.PyCapsule_GetPointer.argtypes = [c_void_p, c_char_p]
python.PyCapsule_IsValid.argtypes = [c_void_p, c_char_p]
python.PyCapsule_SetName.argtypes = [c_void_p, c_char_p]
# Kept for the life of the process, because a capsule does not copy its name.
USED = {True: b"used_dltensor_versioned", False: b"used_dltensor"}


class Refused(BufferError):
    """An error of the library."""


class World:
    """A device, a pool and a stream of this library."""

    def __init__(self, ours, on_gpu):
        self.ours = ours
        self.on_gpu = on_gpu
        self.at = self.made(ours.world_open(on_gpu, LIMIT))
        self.destroy = ctypes.PYFUNCTYPE(None, c_void_p)(self.destroyed)

    def made(self, answer):
        if not answer:
            raise Refused(self.ours.last_error().decode())
        return answer

    def destroyed(self, capsule):
        """Deletes the tensor of a capsule that was not consumed, as the capsule's destructor."""
        for versioned, name in NAMES.items():
            if python.PyCapsule_IsValid(capsule, name):
                self.ours.tensor_delete(python.PyCapsule_GetPointer(capsule, name), versioned)

    def used(self):
        used = self.ours.world_used(self.at)
        self.made(used >= 0)
        return used

    def in_use(self):
        return self.ours.world_in_use(self.at)

    def trim(self):
        self.made(self.ours.world_trim(self.at))

    def stream(self):
        return self.ours.world_stream(self.at)

    def take(self, capsule):
        """Imports the tensor in a capsule, as consumers of DLPack do."""
        for versioned, name in NAMES.items():
            if python.PyCapsule_IsValid(id(capsule), name):
                pointer = python.PyCapsule_GetPointer(id(capsule), name)
                python.PyCapsule_SetName(id(capsule), USED[versioned])
                return Imported(self, self.made(
                    self.ours.tensor_import(self.at, pointer, versioned)))
        raise TypeError(f"{capsule} is not a tensor")


class Owner:
    """Memory of this library: a block, a vector or a region."""

    def __init__(self, world, kind, size):
        self.world = world
        self.at = world.made(world.ours.owner_new(world.at, ord(kind), size))

    def drop(self):
        self.world.ours.owner_drop(self.at)
        self.at = None

    def write(self, offset, data):
        self.world.made(
            self.world.ours.owner_write(self.world.at, self.at, offset, data, len(data)))

    def read(self, offset, length):
        into = ctypes.create_string_buffer(length)
        self.world.made(
            self.world.ours.owner_read(self.world.at, self.at, offset, into, length))
        return into.raw

    def tensor(self, dtype, shape, **more):
        return Tensor(self, dtype, shape, **more)


class Tensor:
    """A tensor of this library, as consumers see it."""

    def __init__(self, owner, dtype, shape, strides=None, offset=0, read_only=False, legacy=False):
        self.owner, self.dtype, self.shape, self.strides = owner, dtype, shape, strides
        self.offset, self.read_only, self.legacy = offset, read_only, legacy
        self.asked = []

    def __dlpack_device__(self):
        found = (c_int32 * 2)()
        world = self.owner.world
        world.made(world.ours.owner_device(self.owner.at, ctypes.byref(found)))
        return tuple(found)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        del dl_device
        if copy:
            raise BufferError("copies are not supported")
        versioned = not self.legacy and max_version is not None and max_version[0] >= 1
        self.asked.append((stream, versioned))
        count = len(self.shape)
        code, bits = TYPES[self.dtype]
        wanted = Request(
            offset=self.offset, shape=(c_size_t * count)(*self.shape),
            strides=(c_size_t * count)(*self.strides) if self.strides else None,
            dimensions=count, code=code, bits=bits, read_only=self.read_only, versioned=versioned,
            has_stream=stream is not None, stream=stream or 0)
        world = self.owner.world
        pointer = world.made(world.ours.owner_export(self.owner.at, ctypes.byref(wanted)))
        destroy = ctypes.cast(world.destroy, c_void_p)
        return python.PyCapsule_New(pointer, NAMES[versioned], destroy)


class Imported:
    """A tensor of another library, imported into this one."""

    def __init__(self, world, at):
        self.world, self.at = world, at

    def read(self, offset, length):
        into = ctypes.create_string_buffer(length)
        self.world.made(self.world.ours.imported_read(self.at, offset, into, length))
        return into.raw

    def write(self, offset, data):
        self.world.made(self.world.ours.imported_write(self.at, offset, data, len(data)))

    def close(self, producer=-1):
        at, self.at = self.at, None
        self.world.made(self.world.ours.imported_close(self.world.at, at, producer))


class Numpy:
    """The differences between the libraries, for NumPy, which runs on the CPU."""

    on_gpu = False
    says_read_only = True

    def __init__(self):
        import numpy
        self.numpy = self.library = numpy

    def from_dlpack(self, tensor):
        return self.library.from_dlpack(tensor)

    def bytes(self, array):
        return self.numpy.ascontiguousarray(self.to_host(array)).tobytes()

    def to_host(self, array):
        return array

    def from_host(self, array):
        return array.copy()

    def fill(self, array, value):
        array[...] = value

    def capsule(self, array, stream):
        """Returns a capsule for a consumer on a GPU stream, or one of before DLPack 1.0 for None."""
        return array.__dlpack__(max_version=(1, 0)) if stream else array.__dlpack__()

    def producer(self):
        return -1

    def settle(self):
        pass


class Torch(Numpy):
    """PyTorch, which ignores the read-only flag."""

    on_gpu = True
    says_read_only = False

    def __init__(self):
        super().__init__()
        import torch
        self.library = torch

    def to_host(self, array):
        return array.cpu().numpy()

    def from_host(self, array):
        return self.library.from_numpy(array.copy()).cuda()

    def fill(self, array, value):
        array.fill_(value)

    def capsule(self, array, stream):
        if stream is None:
            return array.__dlpack__()
        return array.__dlpack__(stream=stream, max_version=(1, 0))

    def producer(self):
        return self.library.cuda.current_stream().cuda_stream

    def settle(self):
        self.library.cuda.synchronize()


class Cupy(Torch):
    """CuPy, limited to operations that need no kernel compiler."""

    def __init__(self):
        Numpy.__init__(self)
        import cupy
        self.library = cupy
        # CuPy's own pool would distort the driver's figures.
        cupy.cuda.set_allocator(None)

    def to_host(self, array):
        # Copying an array that is not contiguous would need a kernel.
        if array.flags.c_contiguous:
            return array.get()
        whole = self.numpy.empty(array.shape, array.dtype)
        for index in self.numpy.ndindex(*array.shape):
            whole[index] = array[index].get()
        return whole

    def from_host(self, array):
        made = self.library.empty(array.shape, array.dtype)
        made.set(array)
        return made

    def fill(self, array, value):
        array.set(self.numpy.full(array.shape, value, array.dtype))

    def producer(self):
        return self.library.cuda.get_current_stream().ptr

    def settle(self):
        self.library.cuda.Device().synchronize()


def equal(found, wanted, what):
    if found != wanted:
        raise AssertionError(f"{what}: {found!r} instead of {wanted!r}")


def refuses(act, what, *words):
    try:
        act()
    except (BufferError, ValueError, RuntimeError, TypeError) as error:
        text = str(error)
        if not all(word in text for word in words):
            raise AssertionError(f"{what}: says {text!r}") from error
        return
    raise AssertionError(f"{what}: was not refused")


def numbers_go_both_ways(world, on):
    np = on.numpy
    for kind in "bvr":
        owner = Owner(world, kind, 2 * MIB)
        for dtype in TYPES:
            wanted = np.arange(24).astype(dtype).reshape(2, 3, 4)
            array = on.from_dlpack(owner.tensor(dtype, (2, 3, 4), offset=4096))
            equal((tuple(array.shape), str(array.dtype).split(".")[-1]), ((2, 3, 4), dtype), kind)
            if kind != "v":
                owner.write(4096, wanted.tobytes())
                equal(on.bytes(array), wanted.tobytes(), f"our {dtype} elements, in {kind}")
            on.fill(array, 7)
            on.settle()
            sevens = np.full((24,), 7, dtype).tobytes()
            equal(owner.read(4096, len(sevens)), sevens, f"their {dtype} elements, in {kind}")
            del array
        owner.drop()


def strides_and_offsets_are_seen(world, on):
    np = on.numpy
    owner = Owner(world, "b", 2 * MIB)
    owner.write(0, np.arange(100, dtype="int32").tobytes())
    turned = on.from_dlpack(owner.tensor("int32", (4, 3), strides=(2, 10), offset=20))
    wanted = np.lib.stride_tricks.as_strided(np.arange(100, dtype="int32")[5:], (4, 3), (8, 40))
    equal(on.to_host(turned).tolist(), wanted.tolist(), "by strides")
    one = on.from_dlpack(owner.tensor("int32", (), offset=396))
    equal(int(on.to_host(one)), 99, "one element")
    none = on.from_dlpack(owner.tensor("int32", (3, 0)))
    equal(tuple(none.shape), (3, 0), "no element")
    refuses(lambda: on.from_dlpack(owner.tensor("int32", (513, 1024))), "too large", "2097152")
    refuses(lambda: on.from_dlpack(owner.tensor("int32", (2,), offset=2)), "misaligned", "is not a multiple of 4")
    del turned, one, none
    owner.drop()


def the_last_tensor_ends_the_lease(world, on):
    owner = Owner(world, "b", 64 * MIB)
    owner.write(0, bytes(range(256)))
    used = world.used()
    array = on.from_dlpack(owner.tensor("uint8", (64 * MIB,)))
    part = array[128:132]
    half = on.from_dlpack(owner.tensor("uint8", (32 * MIB,)))
    owner.drop()
    world.trim()
    equal(world.in_use(), 64 * MIB, "in use without an owner")
    equal(world.used() >= used, True, "the driver's figure without an owner")
    equal(on.bytes(part), bytes(range(128, 132)), "a tensor that outlives its owner")
    del array, half
    equal(world.in_use(), 64 * MIB, "in use while a view of a view is left")
    # The garbage collector drops the last tensor on another thread.
    circle = [part]
    circle.append(circle)
    del part, circle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    equal(world.in_use(), 0, "in use after the last tensor")
    on.settle()
    world.trim()
    back = used - world.used()
    equal(back >= 62 * MIB, True, f"{back >> 20} of 64 MiB were returned to the driver")

    for kind in "vr":
        before = world.used()
        owner = Owner(world, kind, 32 * MIB)
        array = on.from_dlpack(owner.tensor("float32", (1024, 1024)))
        owner.drop()
        equal(world.used() - before >= 30 * MIB, True, f"{kind} is kept by its tensor")
        del array
        equal(world.used() - before <= 8 * MIB, True, f"{kind} is returned to the driver")


def a_capsule_that_nobody_takes_lets_go(world, _):
    owner = Owner(world, "b", 4 * MIB)
    for versioned in (None, (1, 0)):
        capsule = owner.tensor("uint8", (16,)).__dlpack__(max_version=versioned)
        equal(world.in_use(), 4 * MIB, "held by a capsule")
        del capsule
    owner.drop()
    equal(world.in_use(), 0, "in use after the capsules")


def what_is_only_to_be_read_says_so(world, on):
    owner = Owner(world, "b", 2 * MIB)
    owner.write(0, b"0123")
    if on.says_read_only:
        array = on.from_dlpack(owner.tensor("uint8", (4,), read_only=True))
        equal(array.flags.writeable, False, "writeable")
        refuses(lambda: on.fill(array, 1), "writing", "read-only")
        equal(on.bytes(array), b"0123", "read-only bytes")
        del array
    legacy = owner.tensor("uint8", (4,), read_only=True, legacy=True)
    refuses(lambda: legacy.__dlpack__(), "a legacy descriptor", "read-only")
    # A writable tensor can be exported with a legacy descriptor.
    capsule = owner.tensor("uint8", (4,), legacy=True).__dlpack__()
    taken = world.take(capsule)
    equal(taken.read(0, 4), b"0123", "by a legacy descriptor")
    taken.close()
    owner.drop()


def their_tensor_is_read_and_written_here(world, on):
    np = on.numpy
    stream = world.stream() if on.on_gpu else 1
    for stream in (stream, None):
        wanted = np.arange(1 << 20, dtype="int32")
        array = on.from_host(wanted)
        taken = world.take(on.capsule(array, stream))
        on.settle()
        equal(taken.read(4 << 19, 40), wanted[1 << 19:][:10].tobytes(), "their numbers here")
        refuses(lambda: taken.read((4 << 20) - 2, 4), "beyond the end", "there are 4194304")
        taken.write(8, np.array([-1, -2], dtype="int32").tobytes())
        equal(on.to_host(array)[:5].tolist(), [0, 1, -1, -2, 4], "our numbers there")
        # The import outlives the producer's array. A later array can be given back to its producer.
        del array
        gc.collect()
        equal(taken.read(4 << 19, 40), wanted[1 << 19:][:10].tobytes(), "after the producer dropped it")
        taken.close()
        array = on.from_host(wanted)
        taken = world.take(on.capsule(array, stream))
        taken.close(on.producer())
        equal(on.bytes(array), wanted.tobytes(), "the array that was given back")


def a_forked_child_leaves_the_parents_memory(world, on):
    if on.on_gpu:
        return
    owner = Owner(world, "b", 4 * MIB)
    owner.write(0, b"0123")
    array = on.from_dlpack(owner.tensor("uint8", (4,)))
    owner.drop()
    child = os.fork()
    if child == 0:
        del array
        os._exit(0)
    equal(os.waitpid(child, 0)[1], 0, "the child")
    equal(on.bytes(array), b"0123", "after the child dropped it")
    equal(world.in_use(), 4 * MIB, "in use after the child dropped it")
    del array
    equal(world.in_use(), 0, "in use after the parent dropped it")


def late_work_of_theirs_finds_no_new_owner(world, on):
    """A tensor is dropped while work on it is queued on a stream unknown to this library."""
    if not isinstance(on, Torch) or isinstance(on, Cupy):
        return
    torch = on.library
    side = torch.cuda.Stream()
    # All memory of the pool, so that the next owner gets the same memory.
    size = LIMIT
    for wait in (True, False):
        owner = Owner(world, "b", size)
        array = on.from_dlpack(owner.tensor("uint8", (size,)))
        owner.drop()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # About 100 ms, in cycles.
            torch.cuda._sleep(200_000_000)
            array.fill_(9)
        del array
        equal(side.query(), False, "the work is pending")
        again = Owner(world, "b", size)
        again.write(0, b"new" + bytes(13))
        again.write(size - 16, bytes(13) + b"end")
        if wait:
            on.settle()
        equal(again.read(0, 16), b"new" + bytes(13), "the first bytes of the next owner")
        equal(again.read(size - 16, 16), bytes(13) + b"end", "the last bytes of the next owner")
        on.settle()
        again.drop()
        world.trim()


def consumers_name_their_stream(world, on):
    owner = Owner(world, "b", 2 * MIB)
    tensor = owner.tensor("uint8", (4,))
    array = on.from_dlpack(tensor)
    equal([versioned for _, versioned in tensor.asked], [True], "asked for DLPack 1")
    if not on.on_gpu:
        equal(tensor.asked[0][0], None, "the stream of the CPU")
    del array
    if on.on_gpu:
        for stream in (None, 1, 2, -1):
            tensor.__dlpack__(stream=stream, max_version=(1, 0))
        refuses(lambda: tensor.__dlpack__(stream=0), "stream 0", "0 names no stream")
    owner.drop()


CHECKS = [
    numbers_go_both_ways,
    strides_and_offsets_are_seen,
    the_last_tensor_ends_the_lease,
    a_capsule_that_nobody_takes_lets_go,
    what_is_only_to_be_read_says_so,
    their_tensor_is_read_and_written_here,
    a_forked_child_leaves_the_parents_memory,
    late_work_of_theirs_finds_no_new_owner,
    consumers_name_their_stream,
]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--on", choices=["numpy", "torch", "cupy"], required=True)
    arguments.add_argument("--library", required=True, metavar="FILE")
    arguments = arguments.parse_args()
    on = {"numpy": Numpy, "torch": Torch, "cupy": Cupy}[arguments.on]()
    ours = load(os.path.abspath(arguments.library))
    print(f"{arguments.on} {on.library.__version__}, Python {sys.version.split()[0]}")
    if on.on_gpu:
        # Device memory that a library allocates for itself at its first use does not count.
        on.bytes(on.from_host(on.numpy.zeros(4, "uint8")))
    failed = 0
    for check in CHECKS:
        world = World(ours, on.on_gpu)
        name = check.__name__.replace("_", " ")
        try:
            check(world, on)
            on.settle()
            world.made(ours.world_close(world.at))
            print(f"ok      {name}")
        except Exception as error:
            failed += 1
            print(f"FAILED  {name}: {type(error).__name__}: {error}")
    print(f"{len(CHECKS) - failed} passed, {failed} failed on {arguments.on}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
