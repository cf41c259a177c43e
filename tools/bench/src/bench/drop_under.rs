//! Dropping a block that is in use on the device.

use std::time::Duration;

use cuvmm::{Block, Pool, Scrub, Stream};

use super::busy::Busy;
use super::commit::MIB;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use cuvmm_command::watch::{wall, wall_of};

pub(super) const NAME: &str = "drop_under_kernel";

const SIZE: u64 = 256 * MIB;

const BASELINE: &str = "cuMemFree under a kernel of 100 ms, which waits for it";

const WHILE: Duration = Duration::from_millis(100);

/// Measures the drop. Meanwhile another tenant requests the memory; checks that it was not
/// modified.
///
/// # Errors
/// Memory changed under running work.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room_to_write(2 * SIZE)?;
    let busy = Busy::new(stage)?;
    let pool = stage.pool(SIZE, Scrub::Never)?;
    let stream = Stream::new(&stage.device)?;
    let mut ours = Samples::default();
    let mut baselines = Samples::default();
    let mut early = 0;
    for _ in 0..stage.times(10, 2) {
        let tenant = pool.tenant("A").register()?;
        let block = tenant.block(SIZE).home_stream(&stream).try_allocate()?;
        let used = busy.use_block(&stream, &block, WHILE)?;
        ours.add(wall_of(|| drop(block)));
        let stolen = steal(&pool, stage)?;
        early += u32::from(stolen.is_some());
        busy.end(used)?;
        drop(stolen);
        stage.device.synchronize()?;

        let plain = stage.hand.plain(SIZE)?;
        let freed = || Ok(wall(|| plain.free())?.0);
        baselines.add(busy.meanwhile(&stream, WHILE, freed)?);
    }
    let row = Row::new(NAME, &ours, BASELINE, &baselines)
        .count("handed_on_early", early.into())
        .note(busy.said());
    report.add(row);
    Ok(())
}

/// Requests the memory for another tenant, and writes to it if granted.
fn steal(pool: &Pool, stage: &Stage) -> anyhow::Result<Option<Block>> {
    let thief = pool.tenant("B").register()?;
    let stream = Stream::new(&stage.device)?;
    let Ok(block) = thief.block(SIZE).home_stream(&stream).try_allocate() else {
        return Ok(None);
    };
    block.write(0, &[0xee; 4096])?;
    Ok(Some(block))
}
