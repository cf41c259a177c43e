//! Cold commits immediately after a release, compared with driver calls by hand.

use cuvmm::error::BlockError;
use cuvmm::{Block, Stream, Tenant};

use super::cold::Cold;
use super::pairs::{after_itself, alternate};
use super::report::Report;
use super::row::Row;
use super::stage::Stage;
use super::wanted::Wanted;

pub(super) const MIB: u64 = 1 << 20;
pub(super) const GIB: u64 = 1 << 30;
pub(super) const PAGE: u64 = 2 * MIB;

/// The sizes, with the labels used in row names.
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

/// The size that is also compared with 2 MiB pages and with the driver's own allocation.
const RIVALS_AT: u64 = GIB;

const SAME_EXTENTS: &str = "the same extents by hand: reserve, create and map each, one set_access";
pub(super) const ONE_PHYSICAL: &str = "one physical by hand: reserve, create, map, set_access";
const PAGES: &str = "2 MiB pages by hand: reserve, create and map each, one set_access";
const RECYCLED: &str = "2 MiB pages by hand that were kept: reserve, map each, one set_access";
const PLAIN: &str = "cuMemAlloc";

pub(super) fn name(size: &str) -> String {
    format!("commit_cold_{size}")
}

/// Returns the names of the rows of one size, in order.
pub(super) fn names((word, size): (&str, u64)) -> Vec<String> {
    let name = name(word);
    let mut names = vec![name.clone()];
    let mut rival = |rival: &str| names.push(format!("{name}_vs_{rival}"));
    if size > GIB {
        rival("one_physical");
    }
    if size == RIVALS_AT {
        rival("pages");
        rival("pages_recycled");
        rival("cuMemAlloc");
    }
    names
}

/// Returns a function that allocates a block of `size` bytes for the cold rows.
pub(super) fn block(size: u64) -> impl Fn(&Tenant, &Stream) -> Result<Block, BlockError> {
    move |tenant, stream| tenant.block(size).home_stream(stream).try_allocate()
}

/// Measures cold commits of one size against its baselines.
///
/// # Errors
/// When a side fails, or cuvmm's side was not cold.
pub(super) fn measure(
    stage: &Stage,
    wanted: &Wanted,
    report: &mut Report,
    (word, size): (&str, u64),
) -> anyhow::Result<()> {
    stage.room(size)?;
    let name = name(word);
    let cold = Cold::new(stage, size)?;
    let extents = cold.take(block(size))?.1.extents;
    cold.empty()?;
    let ours = || {
        let (took, taken) = cold.take(block(size))?;
        drop(taken);
        cold.empty()?;
        Ok(took)
    };
    let by_hand = |extents: &[u64]| {
        let (took, range) = stage.watch.time(|| stage.hand.commit(extents))?;
        range.give_back()?;
        Ok(took)
    };
    let pairs = stage.times(30, 3);
    let mut add = |name: &str, baseline: &str, samples| {
        let (ours, baselines) = samples;
        let row = Row::new(name, &ours, baseline, &baselines).note(stage.watch.note());
        report.add(row.count("extents", extents.len() as f64));
    };
    if wanted.has(&name) {
        let (baseline, theirs) = baseline(size, &extents);
        let by_hand = || by_hand(&theirs);
        // The driver is still busy with a large release at the next create, so each side has to
        // follow a release of its own.
        let samples = if size > GIB {
            alternate(pairs, after_itself(ours), after_itself(by_hand))?
        } else {
            alternate(pairs, ours, by_hand)?
        };
        add(&name, baseline, samples);
    }
    let rival = |rival: &str| {
        let name = format!("{name}_vs_{rival}");
        wanted.has(&name).then_some(name)
    };
    if let Some(name) = rival("one_physical").filter(|_| size > GIB) {
        let one = after_itself(|| by_hand(&[size]));
        add(
            &name,
            ONE_PHYSICAL,
            alternate(pairs, after_itself(ours), one)?,
        );
    }
    if size != RIVALS_AT {
        return Ok(());
    }
    let pages = vec![PAGE; usize::try_from(size / PAGE)?];
    if let Some(name) = rival("pages") {
        let side = after_itself(|| by_hand(&pages));
        add(&name, PAGES, alternate(pairs, after_itself(ours), side)?);
    }
    if let Some(name) = rival("pages_recycled") {
        stage.room(2 * size)?;
        let mut kept = stage.hand.commit(&pages)?;
        kept.unmap()?;
        let side = || {
            let (took, range) = stage.watch.time(|| {
                let mut range = stage.hand.reserve(size, pages.len())?;
                kept.move_into(&mut range).map(|()| range)
            })?;
            let mut range = range;
            range.unmap()?;
            range.swap_held(&mut kept);
            range.give_back()?;
            Ok(took)
        };
        add(&name, RECYCLED, alternate(pairs, after_itself(ours), side)?);
        kept.give_back()?;
    }
    if let Some(name) = rival("cuMemAlloc") {
        let side = after_itself(|| {
            let (took, plain) = stage.watch.time(|| stage.hand.plain(size))?;
            plain.free()?;
            Ok(took)
        });
        add(&name, PLAIN, alternate(pairs, after_itself(ours), side)?);
    }
    Ok(())
}

/// Returns the baseline of a commit: one physical up to 1 GiB, the default largest extent of a
/// pool, and the same extents above that.
pub(super) fn baseline(size: u64, extents: &[u64]) -> (&'static str, Vec<u64>) {
    if size <= GIB {
        (ONE_PHYSICAL, vec![size])
    } else {
        (SAME_EXTENTS, extents.to_vec())
    }
}
