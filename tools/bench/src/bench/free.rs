//! The time that freeing takes on the calling thread.

use cuvmm::{Scrub, Stream};

use super::commit::GIB;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use cuvmm_command::watch::wall_of;

pub(super) const NAME: &str = "free_1GiB";

const BASELINE: &str = "giving one physical back by hand: unmap, release, address free";

/// Measures dropping a block of 1 GiB with a home stream.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    let pool = stage.pool(GIB, Scrub::default())?;
    let tenant = pool.tenant("tenant").register()?;
    let stream = Stream::new(&stage.device)?;
    let mut ours = Samples::default();
    let mut baselines = Samples::default();
    // Freeing by hand takes much longer, so it is measured less often.
    for _ in 0..stage.times(50, 2) {
        for _ in 0..20 {
            let block = tenant.block(GIB).home_stream(&stream).try_allocate()?;
            ours.add(wall_of(|| drop(block)));
        }
        let range = stage.hand.commit(&[GIB])?;
        baselines.add(stage.time(|| range.give_back())?);
    }
    let row = Row::new(NAME, &ours, BASELINE, &baselines);
    report.add(row.note(stage.watch.note_on_baseline()));
    Ok(())
}
