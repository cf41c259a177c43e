"""Two GPUs: all-reduce over NCCL of tensors in memory of many pieces, eagerly, captured, and registered."""

import ctypes
import os
import tempfile
import time
import unittest

from modes import MIB, MODE, GpuTest, memory, only_cuvmm, only_installed, torch

if MODE != "native":
    import cuvmm
    import cuvmm.torch

two = unittest.skipUnless(torch.cuda.device_count() >= 2, "needs two GPUs")

#: The tensor of 600 MiB, in elements of 4 bytes, and the tensors of 40 MiB that are freed before.
ELEMENTS, PIECES, PIECE = 150 * MIB, 15, 40 * MIB
REPLAYS = 100
#: The seconds that both ranks may take.
LONGEST = 100
#: The numbers of `ncclDataType_t` and `ncclRedOp_t`.
FLOAT32, SUM = 7, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Communicator:
    """A communicator of two ranks, by NCCL's own functions: PyTorch has none to register one tensor."""

    def __init__(self, rank, folder):
        # PyTorch has loaded it.
        self.nccl = ctypes.CDLL("libnccl.so.2")
        self.nccl.ncclGetErrorString.restype = ctypes.c_char_p
        store = torch.distributed.FileStore(os.path.join(folder, "store"), 2)
        unique = UniqueId()
        if rank == 0:
            self.check(self.nccl.ncclGetUniqueId(ctypes.byref(unique)))
            store.set("id", bytes(unique).hex())
        else:
            unique = UniqueId.from_buffer_copy(bytes.fromhex(store.get("id").decode()))
        self.handle = ctypes.c_void_p()
        self.check(self.nccl.ncclCommInitRank(ctypes.byref(self.handle), 2, unique, rank))
        self.small = torch.zeros(1, device="cuda")

    def check(self, code):
        if code != 0:
            raise RuntimeError(f"NCCL: {self.nccl.ncclGetErrorString(code).decode()}")

    def all_reduce(self, source, target):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        addresses = ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr())
        count = ctypes.c_size_t(source.numel())
        self.check(self.nccl.ncclAllReduce(*addresses, count, FLOAT32, SUM, self.handle, stream))

    def barrier(self):
        """Waits until the work of both ranks is complete."""
        torch.cuda.synchronize()
        self.all_reduce(self.small, self.small)
        torch.cuda.synchronize()

    def register(self, tensor):
        """Registers each piece of memory under a tensor. Returns the handles."""
        handles = []
        for address, nbytes in cuvmm.extents(tensor):
            handle = ctypes.c_void_p()
            address, nbytes = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
            self.check(self.nccl.ncclCommRegister(self.handle, address, nbytes, ctypes.byref(handle)))
            handles.append(handle)
        return handles

    def deregister(self, handles):
        for handle in handles:
            self.check(self.nccl.ncclCommDeregister(self.handle, handle))

    def end(self):
        self.barrier()
        self.check(self.nccl.ncclCommDestroy(self.handle))


def in_pieces(entered):
    """Returns two tensors whose memory has several pieces: of the heap, those that were freed before. `entered`
    returns what is entered for both."""
    with entered():
        pieces = [torch.empty(PIECE, dtype=torch.uint8, device="cuda") for _ in range(2 * PIECES)]
        del pieces
    torch.cuda.synchronize()
    with entered(trim=True):
        both = [torch.empty(ELEMENTS, device="cuda") for _ in range(2)]
    for tensor in both:
        count = len(cuvmm.extents(tensor))
        assert count > 1, f"{tensor.nbytes} bytes are one piece of memory, and should be several"
    return both


def entered(name, shareable):
    return lambda **more: cuvmm.torch.pool(name, shareable=shareable, **more)


class Sums:
    """The all-reduce of a tensor that changes before each one. Both ranks run the same calls."""

    def __init__(self, rank, communicator, source, target):
        self.rank, self.communicator, self.source, self.target = rank, communicator, source, target
        # Whole numbers that float32 has. The same ones lie nowhere near each other in two pieces.
        self.first = torch.arange(ELEMENTS, device="cuda").remainder_(1_000_003).float()
        self.source.copy_(self.first).add_(rank)
        self.added = 0

    def queue(self):
        self.communicator.all_reduce(self.source, self.target)

    def captured(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.queue()
        return graph

    def run(self, queue, times, said):
        """Reduces some times, and compares all sums each time."""
        for turn in range(times):
            self.source.add_(1)
            self.added += 1
            queue()
            expected = self.first.mul(2).add_(2 * self.added + 1)
            wrong = int((self.target != expected).sum())
            assert wrong == 0, f"rank {self.rank}, {said} {turn}: {wrong} of {ELEMENTS} sums are wrong"


def sleeping(rank, folder):
    """Eager and captured sums in pools, and 100 replays after the pool has slept."""
    torch.cuda.set_device(rank)
    communicator = Communicator(rank, folder)
    for shareable in (False, True):
        name = f"nccl {shareable}"
        both = in_pieces(entered(name, shareable))
        sums = Sums(rank, communicator, *both)
        sums.run(sums.queue, 3, "eager")
        graph = sums.captured()
        sums.run(graph.replay, 3, "captured")
        communicator.barrier()
        cuvmm.sleep(name)
        cuvmm.wake(name)
        sums.run(graph.replay, REPLAYS, "after the sleep")
        communicator.barrier()
        del graph, sums, both
    communicator.end()


def registered(rank, folder):
    """Sums of registered memory, and after a sleep, before which the registration ends."""
    torch.cuda.set_device(rank)
    communicator = Communicator(rank, folder)
    both = in_pieces(entered("nccl", True))
    sums = Sums(rank, communicator, *both)
    handles = [handle for tensor in both for handle in communicator.register(tensor)]
    sums.run(sums.queue, 3, "registered")
    graph = sums.captured()
    sums.run(graph.replay, 20, "registered and captured")
    communicator.barrier()
    # The graph has the addresses of the registration.
    del graph
    communicator.deregister(handles)
    communicator.barrier()
    cuvmm.sleep("nccl")
    cuvmm.wake("nccl")
    handles = [handle for tensor in both for handle in communicator.register(tensor)]
    sums.run(sums.queue, REPLAYS, "registered again")
    communicator.barrier()
    communicator.deregister(handles)
    communicator.end()


def awake(rank, folder, pooled):
    """Captured sums of memory that does not sleep, which NCCL registers itself as it likes."""
    torch.cuda.set_device(rank)
    communicator = Communicator(rank, folder)
    both = in_pieces(entered("nccl", True) if pooled else lambda **_: memory())
    sums = Sums(rank, communicator, *both)
    sums.run(sums.queue, 3, "eager")
    graph = sums.captured()
    sums.run(graph.replay, REPLAYS, "captured")
    communicator.barrier()
    del graph
    communicator.end()


@two
@only_cuvmm
class AllReduce(GpuTest):
    enters = False

    def both(self, target, *arguments, **variables):
        """Runs a function in two processes."""
        for name, value in {"NCCL_NVLS_ENABLE": "0", **variables}.items():
            before = os.environ.get(name)
            os.environ[name] = value
            restore = os.environ.pop if before is None else os.environ.__setitem__
            self.addCleanup(restore, name, before)
        with tempfile.TemporaryDirectory() as folder:
            ranks = torch.multiprocessing.spawn(target, args=(folder, *arguments), nprocs=2, join=False)
            late = time.monotonic() + LONGEST
            try:
                while not ranks.join(1):
                    self.assertLess(time.monotonic(), late, "the ranks have not ended")
            finally:
                for process in ranks.processes:
                    process.kill()

    def test_pools_sleep_and_graphs_reduce_as_before(self):
        self.both(sleeping, NCCL_GRAPH_REGISTER="0")

    def test_registered_memory(self):
        self.both(registered, NCCL_GRAPH_REGISTER="0")

    def test_graphs_of_shareable_memory_that_nccl_registers(self):
        self.both(awake, True, NCCL_GRAPH_REGISTER="1")

    @only_installed
    def test_graphs_of_the_heaps_memory_that_nccl_registers(self):
        self.both(awake, False, NCCL_GRAPH_REGISTER="1")

    @only_installed
    def test_graphs_of_a_shareable_heap_that_nccl_registers(self):
        self.both(awake, False, NCCL_GRAPH_REGISTER="1", CUVMM_SHAREABLE="1")


if __name__ == "__main__":
    unittest.main()
