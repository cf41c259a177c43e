#!/usr/bin/env python3
"""Compares PyTorch's allocators with cuvmm's heap under PyTorch, on a machine with a GPU.

    python3 compare.py --library libcuvmm_torch.so --json compare.json

It needs PyTorch (tried with 2.11) and gcc. Each allocator runs each scenario in a process of its own.
A scenario that fails, takes too long or has no time left is a row that says so. The table on standard
output is Markdown; the JSON has all figures.

    live     the highest sum of the sizes of live allocations. For a law it is known; for a training
             run PyTorch or the heap counted it
    held     the most that the allocator had from the driver, by its own count: `max_memory_reserved`,
             or `peak_held` of cuvmm_stats
    device   how much less memory the device had free at the end, by cudaMemGetInfo. It includes
             kernels that were loaded, and other programs on the device
    us       the time of `torch.empty` or of a free, in Python, in microseconds
    step/native  the time of a step over that of the native allocator in the same repeat

With `--repeats` each scenario is run several times, and the allocators alternate: each repeat runs all
of them, beginning with another one. The figures are medians of the repeats; `held` is the highest. The
JSON has all repeats too.

`--dry-run` needs no GPU and no PyTorch: it makes the sequences and prints their figures as JSON.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

import laws

HERE = os.path.dirname(os.path.abspath(__file__))
GIB = 1 << 30

# Each allocator: the settings with which PyTorch is loaded, and the allocator that is put in.
ALLOCATORS = {
    "native": ("", None),
    "expandable": ("expandable_segments:True", None),
    "cudaMallocAsync": ("backend:cudaMallocAsync", None),
    "cuvmm tight": ("", "tight"),
    "cuvmm fast": ("", "fast"),
    "noop": ("", "noop"),
}
TRAININGS = ["encoder", "llama", "llama checkpointed", "resnet"]
SCENARIOS = [*laws.LAWS, "pairs", *TRAININGS]

# Bytes of the allocations of the pair benchmark.
PAIRS = [4096, 1536 << 10, 20 << 20, 200 << 20]
PAIR_ROUNDS = 2000

WARM_STEPS = 3
STEPS = 12


def percentiles(times):
    """Figures of a list of nanoseconds."""
    ordered = sorted(times)
    at = lambda part: ordered[min(len(ordered) - 1, int(part * len(ordered)))] / 1e3
    return {
        "operations": len(ordered),
        "us_p50": at(0.5),
        "us_p99": at(0.99),
        "us_mean": sum(ordered) / len(ordered) / 1e3,
        "total_s": sum(ordered) / 1e9,
    }


# In the process of one scenario.


class Allocator:
    """The allocator under test, and its figures."""

    def __init__(self, kind, library, noop):
        import torch

        self.torch, self.kind = torch, kind
        self.library = None
        if kind == "noop":
            self.put_in(noop, "noop_malloc", "noop_free")
        elif kind is not None:
            os.environ["CUVMM_TORCH_PRESET"] = kind
            pluggable = self.put_in(library, "cuvmm_malloc", "cuvmm_free")
            self.library = ctypes.CDLL(library)
            self.library.cuvmm_stats.restype = ctypes.c_size_t
            self.library.cuvmm_stats.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
            address = lambda name: ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value
            pluggable.set_record_stream_fn(address("cuvmm_record_stream"))
            pluggable.set_reset_fn(address("cuvmm_reset"))
        torch.cuda.init()
        torch.cuda.synchronize()
        if kind != "noop":
            # Loads what the first kernel needs.
            del_me = torch.zeros(1024, device="cuda")
            torch.cuda.synchronize()
            del del_me
            torch.cuda.empty_cache()
        if kind is None:
            torch.cuda.reset_peak_memory_stats()
        self.free_before = torch.cuda.mem_get_info()[0]

    def put_in(self, path, malloc, free):
        memory = self.torch.cuda.memory
        allocator = memory.CUDAPluggableAllocator(path, malloc, free)
        memory.change_current_allocator(allocator)
        self.kept = allocator
        return allocator.allocator()

    def figures(self):
        """What the allocator held. Called while the scenario's memory is still held."""
        self.torch.cuda.synchronize()
        found = {"device": self.free_before - self.torch.cuda.mem_get_info()[0]}
        if self.library is not None:
            length = self.library.cuvmm_stats(0, None, 0)
            buffer = ctypes.create_string_buffer(length + 64)
            self.library.cuvmm_stats(0, buffer, length + 64)
            stats = json.loads(buffer.value)
            heap = stats["heap"]
            found.update(live=heap["peak_live"], held=heap["peak_held"], stats=stats)
        elif self.kind is None:
            stats = self.torch.cuda.memory_stats()
            live = stats.get("requested_bytes.all.peak") or stats["allocated_bytes.all.peak"]
            found.update(
                live=live or self.torch.cuda.max_memory_allocated(),
                held=self.torch.cuda.max_memory_reserved(),
                retries=stats.get("num_alloc_retries"),
            )
        return found


def churn(allocator, name, seed):
    torch = allocator.torch
    operations = laws.trace(name, seed)
    count = 1 + max(operation[2] for operation in operations if len(operation) == 3)
    touches = count > 1 and allocator.kind != "noop"
    # The first is the default stream: a law with one stream runs there.
    streams = [torch.cuda.default_stream()] + [torch.cuda.Stream() for _ in range(count - 1)]
    live, times = {}, []
    empty, kind, clock = torch.empty, torch.uint8, time.perf_counter_ns
    current = 0
    gc.disable()
    for operation in operations:
        if len(operation) == 3:
            number, size, stream = operation
            if stream != current:
                torch.cuda.set_stream(streams[stream])
                current = stream
            begun = clock()
            made = empty(size, dtype=kind, device="cuda")
            times.append(clock() - begun)
            if touches:
                # Work for the stream, so that its memory is not free for others at once.
                made[:4096].zero_()
            live[number] = made
            del made
        else:
            begun = clock()
            del live[operation[0]]
            times.append(clock() - begun)
    gc.enable()
    row = {**allocator.figures(), **percentiles(times)}
    row["live"] = laws.peak(operations)
    return row


def pairs(allocator, name, seed):
    empty, kind, clock = allocator.torch.empty, allocator.torch.uint8, time.perf_counter_ns
    times, by_size = [], {}
    gc.disable()
    for size in PAIRS:
        some = []
        for turn in range(PAIR_ROUNDS + 100):
            begun = clock()
            made = empty(size, dtype=kind, device="cuda")
            del made
            if turn >= 100:
                some.append((clock() - begun) // 2)
        by_size[str(size)] = percentiles(some)
        times += some
    gc.enable()
    return {**allocator.figures(), **percentiles(times), "by_size": by_size, "live": None}


def training(allocator, name, seed, count):
    torch = allocator.torch
    import models

    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = False
    model, loss_of = models.RUNS[name](laws.Random(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for _ in range(WARM_STEPS + count):
        torch.cuda.synchronize()
        begun = time.perf_counter_ns()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        final = loss.item()
        times.append(time.perf_counter_ns() - begun)
        del loss
    steps = sorted(times[WARM_STEPS:])
    row = allocator.figures()
    row.update(steps=count, step_ms=steps[len(steps) // 2] / 1e6, loss=final)
    return row


def perform(request):
    """Runs one scenario in this process."""
    allocator, name = request["allocator"], request["scenario"]
    kind = ALLOCATORS[allocator][1]
    under_test = Allocator(kind, request["library"], request["noop"])
    if name in TRAININGS:
        return training(under_test, name, request["seed"], request["steps"])
    return (pairs if name == "pairs" else churn)(under_test, name, request["seed"])


# In the process that has loaded PyTorch and forks one for each scenario. It never uses the GPU.


def read_all(pipe, pid, seconds):
    """What a child writes until it ends or time is up. Returns it and whether time was up."""
    text, end = b"", time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            os.kill(pid, signal.SIGKILL)
            return text, True
        part = os.read(pipe, 1 << 16)
        if not part:
            return text, False
        text += part


def in_a_child(request):
    """Forks a process for a scenario and returns its row."""
    with tempfile.TemporaryFile() as said:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(ours)
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                answer = json.dumps(perform(request)).encode()
                while answer:
                    answer = answer[os.write(theirs, answer) :]
                code = 0
            except BaseException:
                # Not sys.stderr: its buffer is not written at the end.
                os.write(2, traceback.format_exc().encode())
            # Nothing is torn down: some allocators could not.
            os._exit(code)
        os.close(theirs)
        text, late = read_all(ours, pid, request["timeout"])
        os.close(ours)
        status = os.waitpid(pid, 0)[1]
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if late:
        return {"failed": "took longer than %.0f s" % request["timeout"]}
    if status != 0:
        return {"failed": reason(lines) or "ended with status %d" % status}
    return json.loads(text)


def reason(lines):
    """The last line that an allocator or Python said about a failure."""
    ours = [line for line in lines if line.startswith("cuvmm: ")]
    last = lines[-1] if lines else ""
    return "; ".join(part for part in [ours[0] if ours else "", last] if part)[:300]


def serve():
    """Answers requests, a line of JSON each, until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    # What PyTorch prints must not be taken for an answer.
    os.dup2(2, 1)
    import torch

    answers.write(json.dumps({"torch": torch.__version__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(in_a_child(json.loads(line))) + "\n")
        answers.flush()


# In the process that the user starts.


class Server:
    """A process that has loaded PyTorch with some settings."""

    def __init__(self, settings):
        environment = {**os.environ, "PYTHONPATH": HERE}
        if "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
        for name in ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]:
            environment.pop(name, None)
            if settings:
                environment[name] = settings
        for name in ["LIMIT", "ALIASES", "STREAM_WAITS"]:
            environment.pop("CUVMM_TORCH_" + name, None)
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.torch = None

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the process with PyTorch has ended (%s)" % self.process.wait())
        return json.loads(line)

    def ask(self, request):
        if self.torch is None:
            self.torch = self.answer()["torch"]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def skipped(request):
    """Why an allocator does not run a scenario, if it does not."""
    if request["allocator"] == "noop":
        if request["scenario"] in TRAININGS:
            return "has no memory to train in"
        if request["noop"] is None:
            return "noop.c was not compiled"
    return None


def row_of(servers, request, left):
    """Runs a scenario and returns its row, whatever happens."""
    settings = ALLOCATORS[request["allocator"]][0]
    why = skipped(request)
    if why is None and left < 2:
        why = "no time was left"
    if why is not None:
        return {"skipped": why}
    try:
        if settings not in servers:
            servers[settings] = Server(settings)
        return servers[settings].ask({**request, "timeout": min(request["timeout"], left)})
    except (OSError, RuntimeError, ValueError) as error:
        # The next scenario gets a fresh process.
        if settings in servers:
            servers.pop(settings).end()
        return {"failed": str(error)[:300]}


def compiled(folder):
    """Compiles the allocator that does nothing. Returns `None` where that fails."""
    library = os.path.join(folder, "libnoop.so")
    source = os.path.join(HERE, "noop.c")
    try:
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print("noop.c was not compiled: %s" % error, file=sys.stderr)
        return None
    return library


def described(row):
    """The cells of a row."""
    why = row.get("failed") or row.get("skipped")
    size = lambda bytes_: "" if bytes_ is None else "%.2f" % (bytes_ / GIB)
    number = lambda name, form: "" if row.get(name) is None else form % row[name]
    ratio, against = "", ""
    if row.get("live") and row.get("held"):
        ratio = "%.3f" % (row["held"] / row["live"])
    if row.get("step_ratio"):
        against = "%.4f (%.4f to %.4f)" % tuple(row["step_ratio"])
    return [
        row["allocator"],
        size(row.get("live")),
        size(row.get("held")),
        ratio,
        size(row.get("device")),
        number("us_p50", "%.1f"),
        number("us_p99", "%.1f"),
        number("us_mean", "%.2f"),
        number("total_s", "%.3f"),
        number("step_ms", "%.2f"),
        against,
        number("loss", "%.5f"),
        "" if why is None else ("failed: " if "failed" in row else "skipped: ") + why,
    ]


COLUMNS = ["allocator", "live GiB", "held GiB", "held/live", "device GiB"]
COLUMNS += ["us p50", "us p99", "us mean", "total s", "step ms", "step/native", "final loss", ""]


# Of several repeats, the highest counts for these, and the median for other numbers.
HIGHEST = ["held", "device"]


def combined(rows, natives):
    """One row of an allocator's repeats of a scenario, beside those of the native allocator."""
    ran = [row for row in rows if "failed" not in row and "skipped" not in row]
    for row in rows:
        if "failed" in row:
            return {**row, "repeats": len(rows)}
    if not ran:
        return rows[0]
    row = dict(ran[0], repeats=len(ran))
    for name, value in ran[0].items():
        values = [one[name] for one in ran if isinstance(one.get(name), (int, float))]
        if isinstance(value, (int, float)) and len(values) == len(ran):
            row[name] = max(values) if name in HIGHEST else statistics.median(values)
    ratios = [
        one["step_ms"] / natives[one["repeat"]]["step_ms"]
        for one in ran
        if "step_ms" in one and "step_ms" in natives.get(one["repeat"], {})
    ]
    if ratios:
        row["step_ratio"] = [statistics.median(ratios), min(ratios), max(ratios)]
    if "loss" in row:
        row["losses"] = [one["loss"] for one in ran]
    return row


def summary(scenario, allocators, rows):
    """One row for each allocator of a scenario."""
    rows = [row for row in rows if row["scenario"] == scenario]
    natives = {row["repeat"]: row for row in rows if row["allocator"] == "native"}
    of = lambda allocator: [row for row in rows if row["allocator"] == allocator]
    return [combined(of(allocator), natives) for allocator in allocators]


def table(scenario, rows):
    """A scenario's rows as Markdown, without the columns that none of them has."""
    cells = [described(row) for row in rows if row["scenario"] == scenario]
    kept = [at for at in range(len(COLUMNS)) if any(line[at] for line in cells)]
    lines = [[COLUMNS[at] for at in kept], ["---"] * len(kept)]
    lines += [[line[at].replace("|", "/") for at in kept] for line in cells]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "\n### %s\n\n%s" % (scenario, text)


def dry_run(seed):
    """The figures of the sequences."""
    found = {}
    for name in laws.LAWS:
        operations = laws.trace(name, seed)
        found[name] = {
            "operations": len(operations),
            "peak_live_bytes": laws.peak(operations),
            "checksum": laws.checksum(operations),
        }
    return found


def chosen(text, known):
    names = [name.strip() for name in text.split(",")] if text else list(known)
    for name in names:
        if name not in known:
            sys.exit("%r is none of: %s" % (name, ", ".join(known)))
    return names


def arguments():
    parser = argparse.ArgumentParser(description="Compares PyTorch's allocators with cuvmm's heap.")
    parser.add_argument("--library", default=os.path.join(HERE, "..", "lib", "libcuvmm_torch.so"))
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--seconds", type=float, default=220, help="for the whole [220]")
    parser.add_argument("--timeout", type=float, default=45, help="for one scenario [45 s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1, help="of each scenario [1]")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a training run [%d]" % STEPS)
    parser.add_argument("--allocators", metavar="LIST", help="some of: " + ", ".join(ALLOCATORS))
    parser.add_argument("--scenarios", metavar="LIST", help="some of: " + ", ".join(SCENARIOS))
    parser.add_argument("--dry-run", action="store_true", help="only make the sequences")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def written(path, report):
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


def compare(options, folder):
    """Runs all scenarios. The JSON is complete after each of them."""
    allocators = chosen(options.allocators, ALLOCATORS)
    scenarios = chosen(options.scenarios, SCENARIOS)
    begun = time.monotonic()
    report = {"version": 2, "seed": options.seed, "torch": None, "rows": [], "repeats": []}
    noop = compiled(folder) if "noop" in allocators else None
    # PyTorch is loaded by all of them at the same time.
    servers = {settings: Server(settings) for settings in {ALLOCATORS[name][0] for name in allocators}}
    try:
        for scenario in scenarios:
            for repeat in range(options.repeats):
                # Each is first as often as any other.
                first = repeat % len(allocators)
                for allocator in allocators[first:] + allocators[:first]:
                    request = {
                        "allocator": allocator,
                        "scenario": scenario,
                        "seed": options.seed,
                        "steps": options.steps,
                        "library": os.path.abspath(options.library),
                        "noop": noop,
                        "timeout": options.timeout,
                    }
                    started = time.monotonic()
                    row = row_of(servers, request, options.seconds - (started - begun))
                    row.update(allocator=allocator, scenario=scenario, repeat=repeat)
                    row["seconds"] = time.monotonic() - started
                    report["repeats"].append(row)
                    written(options.json, report)
            report["rows"] += summary(scenario, allocators, report["repeats"])
            print(table(scenario, report["rows"]), flush=True)
        report["torch"] = next((it.torch for it in servers.values() if it.torch), None)
        report["seconds"] = time.monotonic() - begun
        written(options.json, report)
    finally:
        for server in servers.values():
            server.end()
    failed = sum("failed" in row for row in report["repeats"])
    print("\nPyTorch %s, %.0f s, %d failed" % (report["torch"], report["seconds"], failed))


def main():
    options = arguments()
    if options.serve:
        serve()
    elif options.dry_run:
        print(json.dumps(dry_run(options.seed), indent=1))
    elif not os.path.exists(options.library):
        sys.exit("%s is not there: pass --library" % options.library)
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, folder)


if __name__ == "__main__":
    main()
