#!/usr/bin/env python3
"""Checks PyTorch programs that allocate from cuvmm's heap, on a machine with a GPU.

    python3 check.py --library libcuvmm_torch.so

With `--native` the same checks run on PyTorch's own allocator. Exits with 1 if a check fails.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time

import torch

import laws

MIB, GIB = 1 << 20, 1 << 30
# The most bytes of an extent under the preset `tight`.
LARGEST_EXTENT = 128 * MIB

# PyTorch's names of its functions, and this library's.
FUNCTIONS = {
    "set_record_stream_fn": "cuvmm_record_stream",
    "set_reset_fn": "cuvmm_reset",
    "set_memory_fraction_fn": "cuvmm_memory_fraction",
    "set_base_alloc_fn": "cuvmm_base_alloc",
    "set_begin_allocate_to_pool": "cuvmm_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "cuvmm_end_allocate_to_pool",
    "set_release_pool": "cuvmm_release_pool",
}


def loaded(path):
    """The library, with the types of the functions that are called here."""
    library = ctypes.CDLL(path)
    text = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    for name in ["cuvmm_stats", "cuvmm_memory_stats", "cuvmm_table"]:
        getattr(library, name).argtypes = text
        getattr(library, name).restype = ctypes.c_size_t
    library.cuvmm_last_error.argtypes = text[1:]
    library.cuvmm_last_error.restype = ctypes.c_size_t
    library.cuvmm_get_memory_fraction.restype = ctypes.c_double
    library.cuvmm_tag_enter.argtypes = [ctypes.c_char_p]
    library.cuvmm_sleep.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.cuvmm_wake.argtypes = [ctypes.c_char_p]
    return library


def put_in(path):
    """Makes PyTorch allocate from the heap. Returns the library."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "cuvmm_malloc", "cuvmm_free")
    library = loaded(path)
    for setter, name in FUNCTIONS.items():
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        getattr(allocator.allocator(), setter)(address)
    torch.cuda.memory.change_current_allocator(allocator)
    return library


def text(write, *arguments):
    """What a function of the library writes."""
    buffer = ctypes.create_string_buffer(1 << 20)
    write(*arguments, buffer, 1 << 20)
    return buffer.value.decode()


def stats(library):
    return json.loads(text(library.cuvmm_stats, 0))


def must(library, code):
    assert code == 0, text(library.cuvmm_last_error)


def churn(seed, steps):
    """Fills tensors on four streams, and reads them on others just before they are freed.

    Readers are late, so a tensor's memory that is reused too early is seen. Returns the number of
    wrong bytes.
    """
    random = laws.Random(seed)
    streams = [torch.cuda.Stream() for _ in range(4)]
    live, wrong = [], []
    for step in range(steps):
        home = streams[random.below(4)]
        size = 1 + random.below((64 << 20) if random.below(4) == 0 else (1 << 20))
        byte = (step * 7 + seed) % 251
        with torch.cuda.stream(home):
            made = torch.full((size,), byte, dtype=torch.uint8, device="cuda")
        live.append((made, byte, home))
        del made
        if len(live) <= 40:
            continue
        tensor, byte, home = live.pop(random.below(len(live)))
        reader = streams[random.below(4)]
        if reader is not home:
            reader.wait_stream(home)
            tensor.record_stream(reader)
        with torch.cuda.stream(reader):
            torch.cuda._sleep(500_000)
            wrong.append((tensor != byte).sum())
        del tensor
    torch.cuda.synchronize()
    found = sum(int(count) for count in wrong)
    for tensor, byte, _ in live:
        found += int((tensor != byte).sum())
    return found


def contents():
    found = churn(1, 1000)
    assert found == 0, "%d bytes are wrong" % found


def threads():
    found = [None] * 4

    def run(number):
        found[number] = churn(10 + number, 300)

    running = [threading.Thread(target=run, args=(number,)) for number in range(len(found))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert found == [0] * len(found), "wrong bytes: %s" % found


def gradients():
    """Compares a network's gradients with those on the processor."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(300, 700), torch.nn.Tanh(), torch.nn.Linear(700, 11)
    ).double()
    inputs = torch.randn(501, 300, dtype=torch.float64)
    model(inputs).pow(2).mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.cuda()
    for _ in range(20):
        model.zero_grad(set_to_none=True)
        model(inputs.cuda()).pow(2).mean().backward()
    for parameter, reference in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad.cpu(), reference)


def copies():
    """Copies to and from pinned memory on a stream of their own."""
    stream = torch.cuda.Stream()
    for number in range(50):
        source = torch.full((3_000_001,), number, dtype=torch.uint8).pin_memory()
        with torch.cuda.stream(stream):
            there = source.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        there.record_stream(torch.cuda.current_stream())
        doubled = there * 2
        del there
        assert int(doubled.max()) == int(doubled.min()) == 2 * number % 256


def trimmed(library):
    """All memory but what is live goes back to the driver."""
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= free, "memory was kept"
    if library is not None:
        heap = stats(library)["heap"]
        # An extent is kept whole if a part of it is live.
        assert heap["held"] <= heap["live"] + 2 * LARGEST_EXTENT, heap


def noise(rounds):
    """Fills memory that is free, on two streams, so that wrong reuse is seen."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for number in range(rounds):
        with torch.cuda.stream(streams[number % 2]):
            made = [torch.full((size,), 77, dtype=torch.uint8, device="cuda") for size in (999, MIB, 9 * MIB)]
        del made
    torch.cuda.synchronize()


def graphs():
    """Captures two graphs into one pool, and one into another, and replays them while other memory is
    allocated and freed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    ).cuda()
    given = torch.zeros(256, 512, device="cuda")
    inputs = [torch.randn(256, 512, device="cuda") for _ in range(4)]
    with torch.no_grad():
        expected = [(model(one), (model(one) * 2).cumsum(0)) for one in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                (model(given) * 2).cumsum(0)
        torch.cuda.current_stream().wait_stream(side)
        first, second, third = [torch.cuda.CUDAGraph() for _ in range(3)]
        with torch.cuda.graph(first):
            result = model(given)
            doubled = result * 2
        with torch.cuda.graph(second, pool=first.pool()):
            summed = doubled.cumsum(0)
        with torch.cuda.graph(third):
            other = (model(given) * 2).cumsum(0)
        for turn in range(3):
            for one, (plain, total) in zip(inputs, expected):
                given.copy_(one)
                noise(3)
                first.replay()
                noise(3)
                second.replay()
                third.replay()
                torch.cuda.synchronize()
                torch.testing.assert_close(result, plain)
                torch.testing.assert_close(summed, total)
                torch.testing.assert_close(other, total)
    del result, doubled, summed, other
    del first, second, third
    gc.collect()
    noise(10)
    torch.cuda.empty_cache()


def backward_graph():
    """Captures a training step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = torch.randn(64, 300, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(given).pow(2).mean().backward()
        optimizer.step()

    start = [parameter.detach().clone() for parameter in model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(side)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(given).pow(2).mean().backward()
        optimizer.step()
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), start):
            parameter.copy_(before)
    for _ in range(5):
        graph.replay()
        noise(2)
    for parameter, reference in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.detach(), reference)


def out_of_memory(library):
    """Catches PyTorch's own exception, several times, and goes on."""
    kept = torch.full((64 * MIB,), 5, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
            raise AssertionError("a PiB was allocated")
        except torch.cuda.OutOfMemoryError as error:
            assert "CUDA out of memory. Tried to allocate" in str(error), error
    # Until memory is full, and then half of it goes.
    held = []
    try:
        while True:
            held.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        assert held
    count = len(held)
    del held[::2]
    again = [torch.full((GIB,), 3, dtype=torch.uint8, device="cuda") for _ in range(count // 2 - 1)]
    # A sum of bytes as 64-bit numbers would need eight times the memory.
    assert all(int(one.min()) == int(one.max()) == 3 for one in again)
    assert int(kept.min()) == int(kept.max()) == 5
    del held, again
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if library is not None:
        ooms = json.loads(text(library.cuvmm_memory_stats, 0))["num_ooms"]
        assert ooms >= 6, ooms
        assert "allocated" in text(library.cuvmm_table, 0)


def fraction(library):
    before = library.cuvmm_get_memory_fraction(0)
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert abs(library.cuvmm_get_memory_fraction(0) - 0.25) < 0.01
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.empty(total * 3 // 10, dtype=torch.uint8, device="cuda")
        raise AssertionError("more than the limit was allocated")
    except torch.cuda.OutOfMemoryError:
        pass
    torch.cuda.set_per_process_memory_fraction(before)
    made = torch.empty(total * 3 // 10, dtype=torch.uint8, device="cuda")
    del made


def tags(path):
    """Memory of PyTorch's own allocator under tags, which sleeps and wakes."""
    library = loaded(path)
    memory = torch.cuda.memory.CUDAPluggableAllocator(path, "cuvmm_tag_malloc", "cuvmm_tag_free")
    pools = {name: torch.cuda.MemPool(memory.allocator()) for name in ("weights", "cache")}

    def made(name, value):
        must(library, library.cuvmm_tag_enter(name.encode()))
        with torch.cuda.use_mem_pool(pools[name]):
            tensor = torch.full((300 * MIB,), value, dtype=torch.uint8, device="cuda")
        library.cuvmm_tag_leave()
        return tensor

    weights, cache = made("weights", 1), made("cache", 2)
    addresses = weights.data_ptr(), cache.data_ptr()
    for turn in range(3):
        free = torch.cuda.mem_get_info()[0]
        weights.add_(1)
        torch.cuda._sleep(200_000_000)
        # Kernels are still running.
        cache.add_(1)
        must(library, library.cuvmm_sleep(b'["weights"]', 1))
        must(library, library.cuvmm_sleep(b"null", 0))
        assert torch.cuda.mem_get_info()[0] >= free + 590 * MIB, "memory was kept"
        assert library.cuvmm_sleep(b'["weights"]', 1) == -1
        assert "asleep" in text(library.cuvmm_last_error)
        must(library, library.cuvmm_wake(b"null"))
        cache.fill_(9)
        assert int(weights.min()) == int(weights.max()) == 2 + turn
        assert int(cache.min()) == int(cache.max()) == 9
        assert addresses == (weights.data_ptr(), cache.data_ptr())
    del weights, cache
    for name in list(pools):
        del pools[name]
    gc.collect()
    torch.cuda.empty_cache()
    print("tags: passed")


def ends(path):
    """Ends the process while three threads allocate and kernels run."""
    library = put_in(path)
    library.cuvmm_malloc.restype = ctypes.c_void_p
    library.cuvmm_malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.cuvmm_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    kept = [torch.full((MIB,), 1, device="cuda") for _ in range(20)]
    streams = [torch.cuda.Stream() for _ in range(3)]

    def run(number):
        # PyTorch's functions are not made for threads that outlive the interpreter.
        random, stream = laws.Random(number), streams[number].cuda_stream
        for step in itertools.count():
            size = 1 + random.below(64 << 20)
            library.cuvmm_free(library.cuvmm_malloc(size, 0, stream), size, 0, stream)
            if step % 20 == 0:
                library.cuvmm_reset()

    for number in range(3):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    time.sleep(2)
    torch.cuda._sleep(1_000_000_000)
    print("ends: passed", len(kept), flush=True)
    sys.exit(0)


def settle():
    """Gives up what a check has left, so that the next one has the memory, whatever happened."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def passes(name, check):
    """Runs a check and prints its outcome. Returns True if it passed."""
    begun, passed = time.monotonic(), True
    for part in (check, settle):
        # After the first the exception is gone, and so are the tensors of its frames.
        try:
            part()
        except Exception as error:
            passed = False
            said = type(error).__name__, str(error)[:3000]
            print("%s: FAILED: %s: %s" % (name, *said), flush=True)
    if passed:
        print("%s: passed (%.1f s)" % (name, time.monotonic() - begun), flush=True)
    return passed


def in_a_process(path, name):
    """Runs a check that needs a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--library", path, "--only", name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    said = (ended.stdout + ended.stderr)[-3000:]
    assert ended.returncode == 0, "ended with %d: %s" % (ended.returncode, said)
    assert name + ": passed" in ended.stdout, said


def main():
    parser = argparse.ArgumentParser(description="Checks PyTorch over cuvmm's heap.")
    parser.add_argument("--library")
    parser.add_argument("--native", action="store_true", help="PyTorch's own allocator")
    parser.add_argument("--only", choices=["tags", "ends"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        return {"tags": tags, "ends": ends}[options.only](os.path.abspath(options.library))
    library = None if options.native else put_in(os.path.abspath(options.library))
    checks = {
        "contents": contents,
        "threads": threads,
        "gradients": gradients,
        "copies": copies,
        "trimmed": lambda: trimmed(library),
        "graphs": graphs,
        "backward_graph": backward_graph,
        "out_of_memory": lambda: out_of_memory(library),
    }
    if library is not None:
        path = os.path.abspath(options.library)
        checks["fraction"] = lambda: fraction(library)
        checks["tags"] = lambda: in_a_process(path, "tags")
        checks["ends"] = lambda: in_a_process(path, "ends")
    failed = 0
    for name, check in checks.items():
        failed += not passes(name, check)
    if library is not None:
        print(text(library.cuvmm_table, 0))
        print(json.dumps(stats(library)))
    print("%d passed, %d failed" % (len(checks) - failed, failed))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
