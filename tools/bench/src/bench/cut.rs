//! The memory that a block of 1 GiB gives up by shrinking to half, and what getting it back costs:
//! from one extent by a copy, from several by a release.

use anyhow::ensure;
use cuvmm::{Block, Limit, Pool, Stream, Tenant};

use super::commit::GIB;
use super::pairs::alternate;
use super::queue::{FILLED, Memory, waited};
use super::report::Report;
use super::row::Row;
use super::stage::Stage;

pub(super) const NAME: &str = "cut_1GiB_to_half";

pub(super) const SHRINK: &str = "shrink_1GiB_to_half";

const BASELINE: &str = "create, map beside, set_access, copy, unmap both, map in place, \
                        set_access, release";

/// Measures cutting a block of one extent, which has shrunk to half, and releasing the rest.
///
/// # Errors
/// The memory was not given back, or bytes were changed.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let size = stage.written(GIB);
    let half = size / 2;
    stage.room(3 * size)?;
    stage.room_to_write(4 * size)?;
    let pool = Pool::builder(&stage.device).limit(Limit::Bytes(2 * size));
    let pool = pool.build()?;
    let tenant = pool.tenant("bench").register()?;
    let stream = Stream::new(&stage.device)?;
    let hand = &stage.hand;
    let ours = || {
        let mut block = tenant.block(size).home_stream(&stream).allocate()?;
        waited(hand, &stream, |queue| queue.fill(Memory::from(&block)))?;
        block.shrink_to(half)?;
        let cut = || {
            let done = tenant.compact(|_| true)?;
            pool.trim(half)?;
            anyhow::Ok(done)
        };
        let (took, done) = stage.watch.time(cut)?;
        ensure!(done.given_back == half, "{done:?}");
        ensure!(pool.stats().free == 0, "the rest was not released");
        let mut seen = [0; 4096];
        block.read(half - seen.len() as u64, &mut seen)?;
        ensure!(
            !stage.keeps_bytes() || seen == [FILLED; 4096],
            "bytes were lost on the way"
        );
        drop(block);
        stream.synchronize()?;
        pool.trim(0)?;
        Ok(took)
    };
    let by_hand = || {
        let mut whole = hand.commit(&[size])?;
        waited(hand, &stream, |queue| queue.fill(Memory::from(&whole)))?;
        let took = stage.time(|| {
            let mut beside = hand.commit(&[half])?;
            waited(hand, &stream, |queue| {
                queue.copy(Memory::from(&beside), Memory::from(&whole).part(0..half)?)
            })?;
            whole.unmap()?;
            beside.move_into(&mut whole)?;
            beside.free()?;
            // It holds the old memory now.
            beside.release()?;
            anyhow::Ok(())
        })?;
        whole.give_back()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(stage.times(20, 2), ours, by_hand)?;
    report.add(Row::new(NAME, &ours, BASELINE, &baselines));
    Ok(())
}

const BASELINE_OF_SHRINK: &str =
    "the same extents: reserve, create and map each, set_access, unmap half, release";

/// Measures a cold block of 1 GiB that is expected to shrink: its allocation, the shrink to half,
/// and the release of the rest.
///
/// # Errors
/// The memory was not given back.
pub(super) fn shrink(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let half = GIB / 2;
    stage.room(2 * GIB)?;
    let pool = Pool::builder(&stage.device).limit(Limit::Bytes(GIB));
    let pool = pool.build()?;
    let stream = Stream::new(&stage.device)?;
    let hand = &stage.hand;
    // A tenant for each block, so that each has new addresses.
    let tenant = || pool.tenant("bench").register();
    let allocate = |tenant: &Tenant| {
        let block = tenant.block(GIB).home_stream(&stream);
        block.expect_shrink(true).allocate()
    };
    let extents = |block: &Block| -> Vec<u64> {
        let extents = block.extents();
        extents.iter().map(|extent| extent.size).collect()
    };
    let shape = extents(&allocate(&tenant()?)?);
    let ours = || {
        stream.synchronize()?;
        pool.trim(0)?;
        let tenant = tenant()?;
        let (took, block) = stage.watch.time(|| {
            let mut block = allocate(&tenant)?;
            block.shrink_to(half)?;
            pool.trim(half)?;
            anyhow::Ok(block)
        })?;
        let stats = pool.stats();
        ensure!(
            (stats.committed, stats.free) == (half, 0),
            "the rest was not released"
        );
        drop(block);
        Ok(took)
    };
    let by_hand = || {
        let (took, range) = stage.watch.time(|| {
            let mut range = hand.commit(&shape)?;
            range.shrink(half)?;
            anyhow::Ok(range)
        })?;
        range.give_back()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(stage.times(50, 2), ours, by_hand)?;
    let row = Row::new(SHRINK, &ours, BASELINE_OF_SHRINK, &baselines);
    report.add(row.count("extents", shape.len() as f64));
    Ok(())
}
