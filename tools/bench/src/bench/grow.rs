//! Growth of one block to 8 GiB in steps of 2 MiB.

use cuvmm::error::BlockError;
use cuvmm::{Block, Stream, Tenant};

use super::cold::Cold;
use super::commit::{GIB, PAGE};
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;

const SIZE: u64 = 8 * GIB;

const PAGES: &str = "2 MiB pages by hand: reserve, then create, map and set_access for each";

pub(super) const NAME: &str = "grow_8GiB";

/// Measures all steps together, immediately after a release.
///
/// # Errors
/// cuvmm's side was not cold.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(SIZE)?;
    let cold = Cold::new(stage, SIZE)?;
    let mut last = None;
    let ours = || {
        let (took, taken) = cold.take(grown)?;
        last = Some((taken.extents.len(), taken.calls));
        drop(taken);
        cold.empty()?;
        Ok(took)
    };
    let pages = usize::try_from(SIZE / PAGE)?;
    let by_hand = || {
        let (took, range) = stage.watch.time(|| {
            let mut range = stage.hand.reserve(SIZE, pages)?;
            (0..pages).try_for_each(|_| range.append(PAGE))?;
            Ok::<_, cuvmm::driver::DriverError>(range)
        })?;
        range.give_back()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(stage.times(30, 2), ours, by_hand)?;
    let (extents, calls) = last.unwrap_or_default();
    let row = Row::new(NAME, &ours, PAGES, &baselines)
        .count("extents", extents as f64)
        .count("driver_calls", calls as f64);
    report.add(row.note(stage.watch.note()));
    Ok(())
}

fn grown(tenant: &Tenant, stream: &Stream) -> Result<Block, BlockError> {
    let first = tenant.block(PAGE).capacity(SIZE).home_stream(stream);
    let mut block = first.try_allocate()?;
    for size in (2..=SIZE / PAGE).map(|pages| pages * PAGE) {
        block.try_grow_to(size)?;
    }
    Ok(block)
}
