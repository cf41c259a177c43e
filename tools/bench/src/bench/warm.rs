//! Allocating and freeing memory that was just freed on the same stream.

use cuvmm::{Scrub, Stream};

use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;
use cuvmm_command::watch::wall;

pub(super) const SIZES: [(&str, u64); 3] = [("2MiB", 2 * MIB), ("32MiB", 32 * MIB), ("1GiB", GIB)];

/// Pairs per sample. A clock is too coarse for a single pair.
const BATCH: usize = 64;

const BASELINE: &str = "cuMemAllocAsync and cuMemFreeAsync on a stream, warm";

const NOTE: &str = "each figure is the mean of a batch of 64";

pub(super) fn name(size: &str) -> String {
    format!("warm_alloc_free_{size}")
}

pub(super) fn measure(
    stage: &Stage,
    report: &mut Report,
    (word, size): (&str, u64),
) -> anyhow::Result<()> {
    stage.room(2 * size)?;
    let pool = stage.pool(size, Scrub::default())?;
    let tenant = pool.tenant("tenant").register()?;
    let (stream, theirs) = (Stream::new(&stage.device)?, Stream::new(&stage.device)?);
    drop(tenant.block(size).home_stream(&stream).try_allocate()?);
    let before = pool.calls();
    let per_pair = |took: f64| took / BATCH as f64;
    let ours = || {
        let (took, ()) = wall(|| {
            for _ in 0..BATCH {
                drop(tenant.block(size).home_stream(&stream).try_allocate()?);
            }
            anyhow::Ok(())
        })?;
        Ok(per_pair(took))
    };
    let rival = || {
        let pooled = || stage.hand.pooled(&theirs, size, BATCH);
        let (took, ()) = stage.watch.time(pooled)?;
        Ok(per_pair(took))
    };
    let (ours, baselines) = alternate(stage.times(2_000, 20), ours, rival)?;
    theirs.synchronize()?;
    let calls = pool.calls().since(&before).total();
    let row = Row::new(name(word), &ours, BASELINE, &baselines).count("driver_calls", calls as f64);
    report.add(row.note(NOTE).note(stage.watch.note_on_baseline()));
    Ok(())
}
