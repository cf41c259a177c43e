//! Paged caches: blocks backed and released where their memory is there, a step of decoding that
//! enters new extents, and one cache's memory taken for another.

use std::time::Instant;

use anyhow::ensure;
use cuvmm::driver::Call;
use cuvmm::paged::{LayerGroup, PagedKvBuilder};
use cuvmm::{PagedKv, Scrub, Stream, Tenant};

use super::commit::{A_PAGE, GIB, MIB, PAGE, pages};
use super::mapper::Mapped;
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use super::wanted::Wanted;
use cuvmm_command::watch::wall;

pub(super) const BACK: &str = "paged_back_256";
pub(super) const RELEASE: &str = "paged_release_256";
pub(super) const STEP: &str = "paged_decode_step_256";
pub(super) const STEP_AHEAD: &str = "paged_decode_step_256_ahead";

/// Rows of taking memory: name, and bytes of an extent.
pub(super) const TAKES: [(&str, u64); 2] = [
    ("paged_take_1GiB_by_32MiB", 32 * MIB),
    ("paged_take_1GiB_by_2MiB", PAGE),
];

/// Blocks of a call.
const BATCH: usize = 256;

/// Bytes of an extent where a row names none: eight blocks.
const EXTENT: u64 = 16 * MIB;

/// Extents that a step enters.
const ENTERED: u64 = 8;

const APPENDED: &str = "the same extents by hand: create and map each, one set_access";
const MOVED: &str = "the same extents by hand: unmap, map each, one set_access";

/// Builds a cache of a model like Llama 3 8B, whose block of 16 tokens has 2 MiB.
fn cache(tenant: &Tenant, stream: &Stream, blocks: u32, extent: u64) -> anyhow::Result<PagedKv> {
    Ok(builder(tenant, stream, blocks).extent(extent).build()?)
}

fn builder<'a>(tenant: &'a Tenant, stream: &'a Stream, blocks: u32) -> PagedKvBuilder<'a> {
    let group = LayerGroup::new(32, 16).keys_and_values(8, 128, 2);
    PagedKv::builder(tenant, stream, blocks).group(group)
}

/// The numbers of a step in a cache of 512 blocks: those of which every eighth is in use from the
/// beginning, and a block for each of 256 sequences, of which the last `new` enter new extents.
fn decoding(new: u32) -> (Vec<u32>, Vec<u32>) {
    let (kept, there) = (0..512 - new).partition::<Vec<u32>, _>(|number| number % 8 == 0);
    let there = there.into_iter().take(BATCH - new as usize);
    (kept, there.chain(512 - new..512).collect())
}

/// Measures backing and releasing 256 blocks beside others that touch the same extents.
pub(super) fn there(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    let pool = stage.pool(GIB, Scrub::default())?;
    let tenant = pool.tenant("tenant").register()?;
    let stream = Stream::new(&stage.device)?;
    let kv = cache(&tenant, &stream, 512, EXTENT)?;
    let kept: Vec<u32> = (0..512).step_by(8).collect();
    kv.back(&kept)?;
    let others = (0..512).filter(|number| number % 8 > 0);
    let numbers: Vec<u32> = others.take(BATCH).collect();
    let rounds = stage.times(1000, 20);
    let mut samples = [Samples::with_room(rounds), Samples::with_room(rounds)];
    let before = pool.calls().total();
    for _ in 0..rounds {
        let (backed, ()) = wall(|| kv.back(&numbers))?;
        let (released, ()) = wall(|| kv.release(&numbers))?;
        samples[0].add(backed);
        samples[1].add(released);
    }
    let calls = pool.calls().total() - before;
    let baselines = pages(stage)?;
    for (name, ours) in [BACK, RELEASE].into_iter().zip(&samples) {
        if wanted.has(name) {
            let row = Row::new(name, ours, A_PAGE, &baselines)
                .count("blocks", BATCH as f64)
                .count("driver_calls", calls as f64);
            report.add(row.note(stage.watch.note_on_baseline()));
        }
    }
    Ok(())
}

/// Measures a step of decoding in which each of 256 sequences takes a block: most find memory there,
/// and 64 of them have eight new extents.
///
/// # Errors
/// The step made other driver calls than those for new extents.
pub(super) fn step(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    let pool = stage.pool(GIB, Scrub::default())?;
    let tenant = pool.tenant("tenant").register()?;
    let stream = Stream::new(&stage.device)?;
    let kv = cache(&tenant, &stream, 512, EXTENT)?;
    let new = (ENTERED * EXTENT / kv.block_bytes()) as u32;
    let (kept, numbers) = decoding(new);
    kv.back(&kept)?;
    let mut counted = [0; 4];
    let ours = || {
        let before = pool.calls();
        let (took, ()) = stage.watch.time(|| kv.back(&numbers))?;
        let calls = pool.calls().since(&before);
        let kinds = [Call::MemCreate, Call::MemMap, Call::MemSetAccess];
        let [created, mapped, opened] = kinds.map(|call| calls.count(call));
        ensure!(
            created == ENTERED && mapped == ENTERED,
            "{created} creates and {mapped} maps for {ENTERED} new extents"
        );
        counted = [created, mapped, opened, calls.total()];
        kv.release(&numbers)?;
        stream.synchronize()?;
        kv.purge()?;
        pool.trim(0)?;
        Ok(took)
    };
    let mut range = stage.hand.reserve(ENTERED * EXTENT, ENTERED as usize)?;
    let by_hand = || {
        let took = stage.time(|| {
            (0..ENTERED).try_for_each(|_| range.hold(EXTENT))?;
            range.map()
        })?;
        range.shrink(0)?;
        Ok(took)
    };
    let (ours, baselines) = alternate(stage.times(100, 5), ours, by_hand)?;
    range.give_back()?;
    let [created, mapped, opened, all] = counted.map(|count| count as f64);
    let row = Row::new(STEP, &ours, APPENDED, &baselines)
        .count("blocks", BATCH as f64)
        .count("creates", created)
        .count("maps", mapped)
        .count("set_access", opened)
        .count("driver_calls", all);
    report.add(row.note(stage.watch.note()));
    Ok(())
}

/// Measures the same step where the mapper has mapped the new extents ahead.
///
/// # Errors
/// The step made a driver call.
pub(super) fn step_ahead(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    let mapped = Mapped::start(&stage.device, GIB)?;
    let tenant = mapped.pool.tenant("tenant").register()?;
    let stream = Stream::new(&stage.device)?;
    let kv = builder(&tenant, &stream, 512).extent(EXTENT).precommit(512);
    let kv = kv.build()?;
    let new = (ENTERED * EXTENT / kv.block_bytes()) as u32;
    let (kept, numbers) = decoding(new);
    kv.back(&kept[1..])?;
    let baselines = pages(stage)?;
    let rounds = stage.times(100, 5);
    let mut samples = Samples::with_room(rounds);
    let mut calls = 0;
    for _ in 0..rounds {
        kv.purge()?;
        mapped.pool.trim(0)?;
        // This takes an extent, after which the mapper maps the others.
        kv.back(&kept[..1])?;
        let begun = Instant::now();
        while kv.stats()?.precommitted < ENTERED * EXTENT {
            ensure!(begun.elapsed().as_secs() < 10, "the mapper maps nothing");
            std::thread::yield_now();
        }
        let before = mapped.calls_of_others();
        let (took, ()) = wall(|| kv.back(&numbers))?;
        calls += mapped.calls_of_others() - before;
        samples.add(took);
        kv.release(&numbers)?;
        kv.release(&kept[..1])?;
        stream.synchronize()?;
    }
    ensure!(
        calls == 0,
        "{calls} driver calls for extents that were mapped ahead"
    );
    drop((kv, tenant));
    mapped.stop();
    let row = Row::new(STEP_AHEAD, &samples, A_PAGE, &baselines)
        .count("blocks", BATCH as f64)
        .count("driver_calls", calls as f64);
    report.add(row.note(stage.watch.note_on_baseline()));
    Ok(())
}

/// Measures a gigabyte of one cache's released blocks that another tenant's cache grows into, in
/// turns.
///
/// # Errors
/// cuvmm's side created new memory.
pub(super) fn take(
    stage: &Stage,
    report: &mut Report,
    (name, extent): (&str, u64),
) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    let pool = stage.pool(GIB, Scrub::Never)?;
    let tenants = [pool.tenant("A").register()?, pool.tenant("B").register()?];
    let streams = [Stream::new(&stage.device)?, Stream::new(&stage.device)?];
    let blocks = (GIB / PAGE) as u32;
    let cache = |which: usize| cache(&tenants[which], &streams[which], blocks, extent);
    let caches = [cache(0)?, cache(1)?];
    let all: Vec<u32> = (0..blocks).collect();
    let give = |which: usize| {
        caches[which].release(&all)?;
        anyhow::Ok(streams[which].synchronize()?)
    };
    caches[1].back(&all)?;
    let extents = caches[1].stats()?.mappings;
    give(1)?;
    let mut turn = [0, 1].into_iter().cycle();
    let before = pool.calls();
    let ours = || {
        let which = turn.next().unwrap_or_default();
        let (took, ()) = stage.watch.time(|| caches[which].back(&all))?;
        give(which)?;
        Ok(took)
    };
    let sizes = vec![extent; usize::try_from(GIB / extent)?];
    let mut from = stage.hand.commit(&sizes)?;
    let mut to = stage.hand.reserve(GIB, sizes.len())?;
    let by_hand = || {
        let took = stage.time(|| from.move_into(&mut to))?;
        std::mem::swap(&mut from, &mut to);
        Ok(took)
    };
    let times = stage.times(30, 2);
    let (ours, baselines) = alternate(times, ours, by_hand)?;
    from.give_back()?;
    to.give_back()?;
    let calls = pool.calls().since(&before);
    let created = calls.count(Call::MemCreate);
    ensure!(created == 0, "{created} extents were new and not taken");
    let each = |call| calls.count(call) as f64 / (times + 1) as f64;
    let row = Row::new(name, &ours, MOVED, &baselines)
        .count("extents", extents as f64)
        .count("unmaps", each(Call::MemUnmap))
        .count("maps", each(Call::MemMap))
        .count("set_access", each(Call::MemSetAccess));
    report.add(row.note(stage.watch.note()));
    Ok(())
}
