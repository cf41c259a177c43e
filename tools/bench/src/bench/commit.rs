//! Cold commits immediately after a release, compared with driver calls by hand.

use cuvmm::error::BlockError;
use cuvmm::{Block, Stream, Tenant};

use super::cold::Cold;
use super::pairs::{after_itself, alternate};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;

pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;
pub(super) const PAGE: u64 = 2 * MIB;

pub(super) const SIZES: [(&str, u64); 8] = [
    ("2MiB", 2 * MIB),
    ("32MiB", 32 * MIB),
    ("128MiB", 128 * MIB),
    ("512MiB", 512 * MIB),
    ("1GiB", GIB),
    ("2GiB", 2 * GIB),
    ("4GiB", 4 * GIB),
    ("8GiB", 8 * GIB),
];

/// The baseline of [`pages`].
pub(super) const A_PAGE: &str = "a 2 MiB page by hand: create, map, set_access";

const SAME_EXTENTS: &str = "the same extents by hand: reserve, create and map each, one set_access";
const ONE_PHYSICAL: &str = "one physical by hand: reserve, create, map, set_access";

pub(super) fn name(size: &str) -> String {
    format!("commit_cold_{size}")
}

fn block(size: u64) -> impl Fn(&Tenant, &Stream) -> Result<Block, BlockError> {
    move |tenant, stream| tenant.block(size).home_stream(stream).try_allocate()
}

/// Measures cold commits of one size.
///
/// # Errors
/// cuvmm's side was not cold.
pub(super) fn measure(
    stage: &Stage,
    report: &mut Report,
    (word, size): (&str, u64),
) -> anyhow::Result<()> {
    stage.room(size)?;
    let cold = Cold::new(stage, size)?;
    let extents = cold.take(block(size))?.1.extents;
    cold.empty()?;
    let ours = || {
        let (took, taken) = cold.take(block(size))?;
        drop(taken);
        cold.empty()?;
        Ok(took)
    };
    let (baseline, theirs) = baseline(size, &extents);
    let by_hand = || {
        let (took, range) = stage.watch.time(|| stage.hand.commit(&theirs))?;
        range.give_back()?;
        Ok(took)
    };
    let pairs = stage.times(30, 3);
    // The driver is still busy with a large release at the next create, so each side follows a
    // release of its own.
    let (ours, baselines) = if size > GIB {
        alternate(pairs, after_itself(ours), after_itself(by_hand))?
    } else {
        alternate(pairs, ours, by_hand)?
    };
    let row = Row::new(name(word), &ours, baseline, &baselines).note(stage.watch.note());
    report.add(row.count("extents", extents.len() as f64));
    Ok(())
}

/// Returns the baseline of a commit: one physical up to 1 GiB, a pool's default largest extent, and
/// cuvmm's extents above that.
fn baseline(size: u64, extents: &[u64]) -> (&'static str, Vec<u64>) {
    if size <= GIB {
        (ONE_PHYSICAL, vec![size])
    } else {
        (SAME_EXTENTS, extents.to_vec())
    }
}

/// Times 2 MiB pages appended to a range by hand.
pub(super) fn pages(stage: &Stage) -> anyhow::Result<Samples> {
    let mut range = stage.hand.reserve(GIB, usize::try_from(GIB / PAGE)?)?;
    let mut baselines = Samples::default();
    for _ in 0..GIB / PAGE {
        baselines.add(stage.time(|| range.append(PAGE))?);
    }
    range.give_back()?;
    Ok(baselines)
}
