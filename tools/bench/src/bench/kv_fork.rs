//! Forking a sequence of a KV cache.

use anyhow::ensure;
use cuvmm::{KvCache, Limit, Pool, Stream};

use super::commit::{GIB, MIB, PAGE};
use super::kv::SHAPE;
use super::pairs::{after_itself, alternate};
use super::queue::waited;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use super::wanted::Wanted;

pub(super) const SMALL: &str = "kv_fork";
pub(super) const FEW: &str = "kv_fork_few_extents";

/// Tokens of the prompt, without those of the half granule at its end.
const TOKENS: u64 = 4096;

/// Forks that are alive when the held memory is counted.
const FORKS: u64 = 8;

const COPY: &str = "a copy of it by hand: reserve, create, map and set_access of one physical, copy \
                    on the device, wait";

/// Measures forking a sequence as its cache allocated it, and a sequence whose prefix was compacted
/// into few large extents.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    for name in [SMALL, FEW] {
        if wanted.has(name) {
            forks(stage, name, report)?;
        }
    }
    Ok(())
}

/// Measures a fork at the end of a sequence, in the middle of a granule, with the wait for the copy
/// of the unshared granule. Also counts the memory of the prompt and eight forks.
fn forks(stage: &Stage, name: &'static str, report: &mut Report) -> anyhow::Result<()> {
    let device = stage.device.with_own_counters();
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(2 * GIB))
        .build()?;
    let tenant = pool.tenant("tenant").register()?;
    let stream = Stream::new(&stage.device)?;
    let builder = KvCache::builder(&tenant, &stream, SHAPE).may_fork(true);
    let mut cache = builder.build()?;
    let token = cache.bytes_per_token();
    let tokens = stage.written(TOKENS * token) / token + PAGE / token / 2;
    let size = cache.memory_of(tokens);
    stage.room(3 * GIB)?;
    stage.room_to_write(2 * size)?;
    let prompt = cache.create(tokens)?;
    let once = match name {
        FEW => {
            stream.synchronize()?;
            let (once, copied) = stage.watch.time(|| cache.compact_prefix(prompt, tokens))?;
            ensure!(copied + PAGE == size, "{copied} bytes were copied");
            Some(once)
        }
        _ => None,
    };
    let mut frees = Samples::default();
    let mut calls = 0;
    let ours = || {
        let before = pool.calls();
        let (took, fork) = stage.watch.time(|| {
            let fork = cache.fork(prompt, tokens)?;
            stream.synchronize()?;
            anyhow::Ok(fork)
        })?;
        calls = pool.calls().since(&before).total();
        let shared = cache.stats().shared;
        ensure!(shared + PAGE == size, "{shared} bytes are shared");
        frees.add(stage.watch.time(|| cache.free(fork))?.0);
        ensure!(
            cache.stats().shared == 0,
            "a fork that was freed is there still"
        );
        Ok(took)
    };
    let from = stage.hand.commit(&[size])?;
    waited(&stage.hand, &stream, |queue| queue.fill((&from).into()))?;
    let by_hand = || {
        let (took, to) = stage.watch.time(|| {
            let to = stage.hand.commit(&[size])?;
            waited(&stage.hand, &stream, |queue| {
                queue.copy((&to).into(), (&from).into())
            })?;
            anyhow::Ok(to)
        })?;
        to.give_back()?;
        Ok(took)
    };
    // A create takes up to three times as long when memory was released in the last millisecond,
    // which a fork of the other side ends sooner or later.
    let (ours, baselines) = alternate(stage.times(100, 3), ours, after_itself(by_hand))?;
    from.give_back()?;
    for _ in 0..FORKS {
        cache.fork(prompt, tokens)?;
    }
    let (held, mappings) = (cache.stats().held, pool.stats().mappings);
    let mib = |bytes: u64| bytes as f64 / MIB as f64;
    let row = Row::new(name, &ours, COPY, &baselines)
        .count("mib", mib(size))
        .count("driver_calls", calls as f64)
        .count("free_p50_ns", frees.median())
        .count("mib_of_prompt_and_8_forks", mib(held))
        .count("mib_of_9_copies", mib((FORKS + 1) * size))
        .count("mappings_of_prompt_and_8_forks", mappings as f64);
    let row = match once {
        Some(once) => row.count("compact_once_ns", once),
        None => row,
    };
    report.add(row.note(stage.watch.note()));
    Ok(())
}
