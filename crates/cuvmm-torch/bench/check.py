#!/usr/bin/env python3
"""Checks PyTorch programs that allocate from cuvmm's heap, on a machine with a GPU.

    python3 check.py --library libcuvmm_torch.so

With `--native` the same checks run on PyTorch's own allocator. Exits with 1 if a check fails.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import threading

import torch

import laws

FAILURE = "allocation of 1.0 PiB on device 0 failed"


def put_in(path):
    """Makes PyTorch allocate from the heap. Returns the library."""
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "cuvmm_malloc", "cuvmm_free")
    library = ctypes.CDLL(path)
    address = lambda name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    allocator.allocator().set_record_stream_fn(address("cuvmm_record_stream"))
    allocator.allocator().set_reset_fn(address("cuvmm_reset"))
    torch.cuda.memory.change_current_allocator(allocator)
    library.cuvmm_stats.restype = ctypes.c_size_t
    library.cuvmm_stats.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    return library


def stats(library):
    text = ctypes.create_string_buffer(1 << 16)
    library.cuvmm_stats(0, text, 1 << 16)
    return json.loads(text.value)


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
        assert heap["held"] <= heap["live"] + (64 << 20), heap


def failing(path):
    """A failed allocation prints a line."""
    command = [sys.executable, os.path.abspath(__file__), "--library", path, "--fail"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert FAILURE in ended.stderr, ended.stderr


def fail(path):
    put_in(path)
    # PyTorch does not check the address: the tensor must not be used.
    made = torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    del made
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description="Checks PyTorch over cuvmm's heap.")
    parser.add_argument("--library")
    parser.add_argument("--native", action="store_true", help="PyTorch's own allocator")
    parser.add_argument("--fail", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fail:
        fail(options.library)
    library = None if options.native else put_in(os.path.abspath(options.library))
    checks = [contents, threads, gradients, copies, lambda: trimmed(library)]
    names = ["contents", "threads", "gradients", "copies", "trimmed"]
    if library is not None:
        checks.append(lambda: failing(os.path.abspath(options.library)))
        names.append("failing")
    failed = 0
    for name, check in zip(names, checks):
        try:
            check()
            print("%s: passed" % name, flush=True)
        except Exception as error:
            failed += 1
            print("%s: FAILED: %s" % (name, str(error)[:2000]), flush=True)
    if library is not None:
        print(json.dumps(stats(library)))
    print("%d passed, %d failed" % (len(checks) - failed, failed))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
