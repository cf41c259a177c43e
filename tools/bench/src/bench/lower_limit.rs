//! Lowering a pool's limit below its cached memory.

use anyhow::ensure;
use cuvmm::driver::Call;
use cuvmm::{Limit, Scrub, Stream};

use super::commit::GIB;
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;

const SIZE: u64 = 16 * GIB;

pub(super) const NAME: &str = "lower_limit_16GiB";

/// Measures `Pool::set_limit` down to one granule, with 16 GiB cached for a tenant.
///
/// # Errors
/// Memory remains above the limit.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * SIZE)?;
    let pool = stage.pool(SIZE, Scrub::Never)?;
    let tenant = pool.tenant("A").register()?;
    let stream = Stream::new(&stage.device)?;
    let cached = || {
        pool.set_limit(Limit::Bytes(SIZE))?;
        let block = tenant.block(SIZE).home_stream(&stream).allocate()?;
        let extents: Vec<u64> = block.extents().iter().map(|extent| extent.size).collect();
        drop(block);
        stream.synchronize()?;
        anyhow::Ok(extents)
    };
    let extents = cached()?;
    let least = stage.device.granularity();
    let before = pool.calls();
    let ours = || {
        cached()?;
        let (took, change) = stage
            .watch
            .time(|| Ok::<_, cuvmm::Error>(pool.set_limit(Limit::Bytes(least))?))?;
        ensure!(
            change.taken_back == SIZE && change.excess == 0,
            "it left {} bytes",
            change.excess
        );
        Ok(took)
    };
    let by_hand = || {
        let mut range = stage.hand.commit(&extents)?;
        let took = stage.time(|| {
            range.unmap()?;
            range.release()
        })?;
        range.give_back()?;
        Ok(took)
    };
    let times = stage.times(30, 2);
    let (ours, baselines) = alternate(times, ours, by_hand)?;
    let calls = pool.calls().since(&before);
    let each = |call| calls.count(call) as f64 / (times + 1) as f64;
    let baseline = "as many extents by hand: one unmap, and a release of each";
    let row = Row::new(NAME, &ours, baseline, &baselines)
        .count("extents", extents.len() as f64)
        .count("unmaps", each(Call::MemUnmap))
        .count("releases", each(Call::MemRelease));
    report.add(row.note(stage.watch.note()));
    Ok(())
}
