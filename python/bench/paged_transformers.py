#!/usr/bin/env python3
"""Compares transformers' continuous batching over `cuvmm.torch.transformers` with the same over its own cache.

    python3 python/bench/paged_transformers.py --json transformers.json
    python3 python/bench/paged_transformers.py churn:eager:16 full:async:256
    python3 python/bench/paged_transformers.py --dry

Needs a GPU, PyTorch 2.11 and transformers 5.17. The model is a Llama with random weights: 24 layers, 16 heads and 8 of
keys and values with 128 elements, 2.3 GB in bf16. In one process two managers serve it, one over each cache. Both have
the same blocks and get the same prompts, whose lengths are those of each run and whose tokens are new in each pair.
They take turns: a run of each that does not count, then `--pairs` pairs, of which each second one begins with the paged
cache. The tokens of both must be equal. A run is timed from the first request until the last one has ended; garbage is
collected before. As all runs have the same batches, the time of each batch is taken too, and its median over the runs:
their sum has less of what a shared machine does meanwhile. A run is named by its load, its mode, and the tokens of a
block:

| load | requests | prompt | generated | blocks |
|---|---|---|---|---|
| `churn` | 384 | 20 to 200 tokens | 4 to 24 | for all that run; no prefixes are kept |
| `full` | 64 | 200 to 1,000 tokens | 16 to 48 | for about two thirds of the requests: the others wait |

A run begins with one request more, which fills the first two batches, so that all others have arrived before the engine
chooses among them and each run has the same batches.

| mode | engine |
|---|---|
| `eager` | kernels are launched one by one |
| `graphs` | each batch is padded, and a captured graph is replayed |
| `async` | graphs, and the next batch is prepared while one runs |

Attention is PyTorch's `varlen_attn`, as which transformers' functions for flash attention gather keys and values.
transformers' decode path with block tables, which needs the package `flash_attn`, is used over neither cache.

One more pair, not timed, counts what the engine's thread spends in calls of the cache, and the memory held over that of
the blocks which requests have. `--dry` compares transformers' cache with itself, with a small model, also on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import random
import statistics
import sys
import time
import traceback
from typing import Any, NamedTuple

#: The calls of a cache in each step, for a new block and for an ended request; and those of the library in them.
CACHE_CALLS = (
    "get_num_free_blocks",
    "allocate_blocks",
    "free_blocks",
    "search_prefix_match",
    "mark_shareable_blocks_as_complete",
)
LIBRARY_CALLS = ("try_back", "back", "release")
#: Of the steps of a counted run, the memory is read after each of this number.
SAMPLED = 4
#: The seconds without a result after which a run has failed.
PATIENCE = 20.0


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests of a run, and the engine that they need."""

    name: str
    requests: int
    prompt: tuple[int, int]
    generated: tuple[int, int]
    #: The tokens that all blocks together have room for.
    tokens: int
    #: The tokens of a batch, and the requests of one.
    batch_tokens: int
    running: int
    #: Blocks of ended requests are kept for their prefixes.
    sharing: bool


LOADS = {
    "churn": Load("churn", 384, (20, 200), (4, 24), 73_728, 2048, 128, False),
    "full": Load("full", 64, (200, 1000), (16, 48), 24_576, 2048, 64, True),
}
DRY_LOADS = {
    "churn": Load("churn", 24, (4, 20), (2, 6), 1024, 64, 8, False),
    "full": Load("full", 12, (20, 90), (4, 8), 1024, 64, 16, True),
}
MODES = ("eager", "graphs", "async")
RUNS = ("churn:eager:256", "churn:graphs:256", "full:eager:256", "full:graphs:256", "churn:eager:16")

#: A prompt, and the number of tokens to generate.
Request = tuple[list[int], int]


def requests_of(load: Load, pair: int, vocabulary: int) -> list[Request]:
    """Returns the requests of one pair: the lengths of all pairs, and tokens of its own."""
    lengths, tokens = random.Random(load.name), random.Random(f"{load.name} {pair}")
    sizes = [(2 * load.batch_tokens, load.generated[0])]
    sizes += [(lengths.randint(*load.prompt), lengths.randint(*load.generated)) for _ in range(load.requests)]
    return [(tokens.choices(range(3, vocabulary), k=prompt), generated) for prompt, generated in sizes]


class Run(NamedTuple):
    """One run of an engine."""

    seconds: float
    #: The tokens of each request.
    tokens: list[list[int]]
    #: The seconds of each batch, from one batch's tokens to those of the next.
    batches: list[float]


@dataclasses.dataclass
class Counts:
    """What the calls of a cache took in one run, and its memory."""

    seconds: float = 0.0
    #: By the name of a call: how often it was made, and for how many seconds.
    calls: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    #: Bytes of the blocks that requests have, and bytes that others cannot have.
    samples: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def share(self, names: tuple[str, ...]) -> float:
        """Returns the part of the run's time that calls of these names took."""
        return sum(self.calls[name][1] for name in names if name in self.calls) / self.seconds

    def number(self, name: str) -> int:
        return int(self.calls.get(name, (0, 0))[0])

    def held_over_live(self) -> float:
        live, held = (sum(sample[of] for sample in self.samples) for of in range(2))
        return held / live if live else 0.0

    def watch(self, place: Any, names: tuple[str, ...]) -> None:
        """Lets methods of an object count themselves. One within another counts no time."""
        inside = [0]
        for name in names:
            setattr(place, name, self._counting(name, getattr(place, name), inside))

    def _counting(self, name: str, call: Any, inside: list[int]) -> Any:
        count = self.calls.setdefault(name, [0, 0.0])

        def counting(*arguments: Any) -> Any:
            begun = time.perf_counter()
            inside[0] += 1
            try:
                return call(*arguments)
            finally:
                inside[0] -= 1
                count[0] += 1
                count[1] += 0.0 if inside[0] else time.perf_counter() - begun

        return counting


def options_of_engine(load: Load, mode: str, block_size: int) -> dict[str, Any]:
    """Returns the arguments of transformers' `ContinuousBatchingConfig`."""
    return {
        "block_size": block_size,
        "num_blocks": -(-load.tokens // block_size),
        "max_batch_tokens": load.batch_tokens,
        "max_requests_per_batch": load.running,
        "max_blocks_per_request": 0,
        "allow_block_sharing": load.sharing,
        "use_cuda_graph": mode != "eager",
        "use_async_batching": mode == "async",
        "q_padding_interval_size": min(256, load.batch_tokens),
        "kv_padding_interval_size": max(load.tokens // 4, 256),
    }


class Engine:
    """A manager of transformers over one of the two caches."""

    def __init__(self, model: Any, load: Load, mode: str, block_size: int, paged: bool) -> None:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        how = GenerationConfig(
            max_new_tokens=load.generated[1], do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        config = ContinuousBatchingConfig(**options_of_engine(load, mode, block_size))
        self.manager = model.init_continuous_batching(
            generation_config=how, continuous_batching_config=config
        )
        with contextlib.ExitStack() as stack:
            if paged:
                import cuvmm.torch.transformers as adapter

                stack.enter_context(adapter.paged(name="chat"))
            # The cache is made here.
            self.manager.warmup()
        self.cache = self.manager.batch_processor.cache
        self.manager.start()

    def run(self, requests: list[Request], pair: int, ended: Any = None) -> Run:
        """Serves requests. After each batch, `ended` is called with its number on the engine's thread."""
        names = [f"{pair}-{number}" for number in range(len(requests))]
        found: dict[str, list[int]] = {}
        processor, times = self.manager.batch_processor, [0.0]
        update = processor.update_batch

        def updated() -> None:
            # Before the last result comes, so that all times are there by then.
            times.append(time.perf_counter())
            update()
            if ended is not None:
                ended(len(times) - 2)

        processor.update_batch = updated
        try:
            begun = times[0] = time.perf_counter()
            for name, (prompt, generated) in zip(names, requests, strict=True):
                self.manager.add_request(prompt, request_id=name, max_new_tokens=generated)
            while len(found) < len(names):
                result = self.manager.get_result(timeout=PATIENCE)
                if result is None:
                    raise RuntimeError(f"no result: {self.manager.background_thread_status.fatal_error!r}")
                if result.error is not None:
                    raise RuntimeError(f"request {result.request_id} failed: {result.error}")
                if result.is_finished():
                    found[result.request_id] = result.generated_tokens
            seconds = time.perf_counter() - begun
        finally:
            del processor.update_batch
        batches = [after - before for before, after in zip(times, times[1:], strict=False)]
        return Run(seconds, [found[name] for name in names], batches)

    def counted(self, requests: list[Request], pair: int) -> Counts:
        """Serves requests with counters around the calls of the cache."""
        counts, kv = Counts(), getattr(self.cache, "kv", None)
        places = [(self.cache, CACHE_CALLS)]
        places += [(kv, LIBRARY_CALLS)] if kv is not None else []

        def ended(batch: int) -> None:
            if batch % SAMPLED == 0:
                counts.samples.append(self.memory())

        for place, names in places:
            counts.watch(place, names)
        try:
            counts.seconds = self.run(requests, pair, ended).seconds
        finally:
            for place, names in places:
                for name in names:
                    delattr(place, name)
        return counts

    def memory(self) -> tuple[int, int]:
        """Returns the bytes of the blocks that requests have, and the bytes that others cannot have."""
        cache, kv = self.cache, getattr(self.cache, "kv", None)
        block = sum(
            it[: cache.block_size].numel() * it.element_size() for it in cache.key_cache + cache.value_cache
        )
        manager = cache._block_manager
        free = len(manager._uninit_block_ids) + len(manager._init_block_ids)
        held = kv.stats().committed if kv is not None else (cache.num_blocks + 2) * block
        return (cache.num_blocks - free) * block, held

    def close(self) -> None:
        self.manager.stop(block=True, timeout=10, hard_stop=True)
        self.manager.destroy()
        del self.cache, self.manager


def spread(figures: list[float]) -> dict[str, float]:
    """Returns the median and the quartiles."""
    low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
    return {"low": low, "median": middle, "high": high}


def of_batches(runs: list[Run]) -> float | None:
    """Returns the sum of the median time of each batch. None if not all runs have the same batches."""
    if len({len(run.batches) for run in runs}) != 1:
        return None
    return sum(map(statistics.median, zip(*(run.batches for run in runs), strict=True)))


def summary(pairs: list[tuple[Run, Run]], counts: tuple[Counts, Counts]) -> dict[str, Any]:
    """Sums up pairs of runs over transformers' cache and a paged one."""
    tokens = sum(map(len, pairs[0][0].tokens))
    own, paged = ([tokens / pair[of].seconds for pair in pairs] for of in range(2))
    ratios = [its / theirs for theirs, its in zip(own, paged, strict=True)]
    batches = [of_batches([pair[of] for pair in pairs]) for of in range(2)]
    return {
        "tokens": tokens,
        "own_tokens_per_s": own,
        "paged_tokens_per_s": paged,
        "own": spread(own),
        "paged": spread(paged),
        "ratio": statistics.median(paged) / statistics.median(own),
        "least_ratio": min(ratios),
        "greatest_ratio": max(ratios),
        "batches": [len(pairs[0][of].batches) for of in range(2)],
        "seconds_of_batches": batches,
        "ratio_of_batches": batches[0] / batches[1] if None not in batches else None,
        "own_share": counts[0].share(CACHE_CALLS),
        "paged_share": counts[1].share(CACHE_CALLS),
        "library_share": counts[1].share(LIBRARY_CALLS),
        "back_calls": counts[1].number("try_back") + counts[1].number("back"),
        "release_calls": counts[1].number("release"),
        "own_held_over_live": counts[0].held_over_live(),
        "paged_held_over_live": counts[1].held_over_live(),
        "calls": [counts[of].calls for of in range(2)],
    }


def compare(engines: tuple[Any, Any], load: Load, pairs: int, vocabulary: int) -> dict[str, Any]:
    """Compares two engines in alternating pairs. The first one has transformers' cache."""
    runs: list[tuple[Run, Run]] = []
    for pair in range(pairs + 1):
        requests = requests_of(load, pair, vocabulary)
        found = {}
        for of in (0, 1) if pair % 2 == 0 else (1, 0):
            gc.collect()
            found[of] = engines[of].run(requests, pair)
        runs.append((found[0], found[1]))
        own, paged = found[0].seconds, found[1].seconds
        print(f"# {load.name}, pair {pair}: {own:.3f} s, paged {paged:.3f} s, {own / paged:.3f}", flush=True)
    wrong = sum(a != b for own, paged in runs for a, b in zip(own.tokens, paged.tokens, strict=True))
    requests = requests_of(load, pairs + 1, vocabulary)
    counts = tuple(engine.counted(requests, pairs + 1) for engine in engines)
    return {**summary(runs[1:], counts), "requests": len(requests), "pairs": pairs, "wrong": wrong}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| load | mode | block | own tokens/s (quartiles) | paged tokens/s (quartiles) | ratio | least | greatest"
        " | ratio of batches"
        " | % of time in cache calls, own | paged | in the library | calls of back | of release | held/live, own | paged"
        " | wrong |",
        "|" + "---|" * 17,
    ]
    for row in rows:
        own, paged = (
            f"{it['median']:.0f} ({it['low']:.0f} to {it['high']:.0f})" for it in (row["own"], row["paged"])
        )
        lines.append(
            f"| {row['load']} | {row['mode']} | {row['block_size']} | {own} | {paged} | {row['ratio']:.3f}"
            f" | {row['least_ratio']:.3f} | {row['greatest_ratio']:.3f}"
            f" | {row['ratio_of_batches'] or float('nan'):.3f} | {row['own_share'] * 100:.2f}"
            f" | {row['paged_share'] * 100:.2f} | {row['library_share'] * 100:.2f} | {row['back_calls']}"
            f" | {row['release_calls']} | {row['own_held_over_live']:.2f} | {row['paged_held_over_live']:.2f}"
            f" | {row['wrong']} |"
        )
    return "\n".join(lines)


def attention(
    module: Any, q: Any, k: Any, v: Any, attention_mask: Any, cache: Any, **given: Any
) -> tuple[Any, None]:
    """Computes attention as transformers' functions for flash attention do, with PyTorch's kernels for it."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    k, v = cache.update(
        key_states=k,
        value_states=v,
        layer_idx=module.layer_idx,
        read_index=given["read_index"],
        write_index=given["write_index"],
    )
    lengths = [given[name].to(torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    most = [given[name] for name in ("max_seqlen_q", "max_seqlen_k")]
    q = q.transpose(1, 2).squeeze(0).contiguous()
    return varlen_attn(
        q, k.contiguous(), v.contiguous(), *lengths, *most, scale=module.scaling, window_size=(-1, 0)
    ), None


def model_of(dry: bool) -> Any:
    """Returns a model with random weights, on the GPU if there is one."""
    import torch
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = (4, 2, 32) if dry else (16, 8, 128)
    config = LlamaConfig(
        vocab_size=128 if dry else 32_000,
        hidden_size=128 if dry else 2048,
        intermediate_size=256 if dry else 5632,
        num_hidden_layers=4 if dry else 24,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        max_position_embeddings=8192,
    )
    there = torch.cuda.is_available()
    AttentionInterface.register("paged|varlen", attention)
    with torch.device("cuda" if there else "cpu"):
        model = LlamaForCausalLM(config).eval().to(torch.bfloat16 if there else torch.float32)
    model.set_attn_implementation("paged|varlen" if there else "paged|sdpa")
    return model


def measured(model: Any, run: tuple[Load, str, int], given: argparse.Namespace) -> dict[str, Any]:
    """Compares the two caches under one load in one mode, with blocks of one size."""
    import torch

    engines: list[Engine] = []
    try:
        for paged in (False, not given.dry):
            engines.append(Engine(model, *run, paged))
        return compare((engines[0], engines[1]), run[0], given.pairs, model.config.vocab_size)
    finally:
        while engines:
            engines.pop().close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_of(name: str, dry: bool) -> tuple[Load, str, int]:
    """Returns the load, the mode and the tokens of a block. Raises ValueError or KeyError for another name."""
    load, mode, block_size = name.split(":")
    if mode not in MODES or not 4 <= int(block_size) <= 1024:
        raise ValueError(name)
    return (DRY_LOADS if dry else LOADS)[load], mode, int(block_size)


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", help=f"LOAD:MODE:BLOCK, by default {' '.join(RUNS)}")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs that count, at least 2")
    parser.add_argument("--dry", action="store_true", help="compare transformers' cache with itself")
    parser.add_argument("--json", metavar="FILE", help="writes the figures there")
    given = parser.parse_args(arguments)
    names, given.runs = given.runs or [*RUNS], []
    for name in names:
        try:
            given.runs.append(run_of(name, given.dry))
        except (KeyError, ValueError):
            parser.error(f"{name!r} is not LOAD:MODE:BLOCK, such as churn:eager:256")
    if given.pairs < 2:
        parser.error("there are at least 2 pairs")
    return given


def main() -> None:
    given = options_of(sys.argv[1:])
    import torch
    import transformers

    begun, model = time.monotonic(), model_of(given.dry)
    gc.collect()
    # A collection of garbage does not look at what is there from the start.
    gc.freeze()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"PyTorch {torch.__version__}, transformers {transformers.__version__}"
    print(f"# {name}, {versions}; model after {time.monotonic() - begun:.0f} s", flush=True)
    rows, failed = [], False
    for run in given.runs:
        try:
            row = measured(model, run, given)
        except Exception:
            traceback.print_exc()
            failed = True
            continue
        rows.append({"load": run[0].name, "mode": run[1], "block_size": run[2], **row})
        failed |= row["wrong"] > 0
        print(f"# {time.monotonic() - begun:.0f} s\n{table(rows[-1:])}", flush=True)
        if given.json:
            with open(given.json, "w") as file:
                json.dump({"device": name, "versions": versions, "rows": rows}, file, indent=1)
    print(table(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
