//! Growth of one block to 8 GiB in steps of 2 MiB.

use cuvmm::error::BlockError;
use cuvmm::{Block, Stream, Tenant};

use super::cold::Cold;
use super::commit::{GIB, PAGE};
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;
use super::truly_cold;

const SIZE: u64 = 8 * GIB;

const PAGES: &str = "2 MiB pages by hand: reserve, then create, map and set_access for each";

pub(super) const AT_ONCE: &str = "grow_8GiB";
pub(super) const LATER: &str = "grow_truly_cold_8GiB";

/// Measures all steps together, immediately after a release.
///
/// # Errors
/// When a side fails, or cuvmm's side was not cold.
pub(super) fn at_once(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    measure(stage, report, AT_ONCE, stage.times(30, 2), || Ok(()))
}

/// Measures all steps together, half a second after the last release.
///
/// # Errors
/// When a side fails, or cuvmm's side was not cold. The row is skipped on the host driver.
pub(super) fn later(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    truly_cold::possible(stage)?;
    let pairs = stage.times(10, 2);
    measure(stage, report, LATER, pairs, || stage.settle())
}

fn measure(
    stage: &Stage,
    report: &mut Report,
    name: &str,
    pairs: usize,
    wait: impl Fn() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    stage.room(SIZE)?;
    let cold = Cold::new(stage, SIZE)?;
    let mut last = None;
    let ours = || {
        wait()?;
        let (took, taken) = cold.take(grown)?;
        last = Some((taken.extents.len(), taken.calls));
        drop(taken);
        cold.empty()?;
        Ok(took)
    };
    let pages = usize::try_from(SIZE / PAGE)?;
    let by_hand = || {
        wait()?;
        let (took, range) = stage.watch.time(|| {
            let mut range = stage.hand.reserve(SIZE, pages)?;
            (0..pages).try_for_each(|_| range.append(PAGE))?;
            Ok::<_, cuvmm::driver::DriverError>(range)
        })?;
        range.give_back()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(pairs, ours, by_hand)?;
    let (extents, calls) = last.unwrap_or_default();
    let row = Row::new(name, &ours, PAGES, &baselines)
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
