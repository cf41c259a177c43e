//! Sparse arrays: committing tiles, and backing holes that read as zero.

use anyhow::ensure;
use cuvmm::{SparseArray, Stream};

use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;

pub(super) const COMMIT: &str = "sparse_commit_1GiB";
pub(super) const ZEROS: &str = "sparse_zeros_1TiB";

const TILE: u64 = 32 * MIB;
const TIB: u64 = 1 << 40;

/// The size of the physical that backs holes: the default of an array.
const ALIAS: u64 = 64 * MIB;

const TILES: &str = "the same tiles by hand in addresses that were had: create and map each, one \
                     set_access";
const ALIASES: &str = "the same aliases by hand of memory that was had: map each, one set_access";
const KEPT: &str = "the memory behind the zeros was there before, on both sides";

/// Measures committing all tiles of 1 GiB in one call.
pub(super) fn commit(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    let device = stage.device.with_own_counters();
    let stream = Stream::new(&stage.device)?;
    let len = usize::try_from(GIB)?;
    let mut array = SparseArray::<u8>::builder(&device, &stream, len)
        .tile_bytes(TILE)
        .reserve()?;
    let mut calls = 0;
    let ours = || {
        let before = device.calls();
        let (took, tiles) = stage.watch.time(|| array.commit(0..len))?;
        calls = device.calls().since(&before).total();
        ensure!(tiles as u64 == GIB / TILE, "{tiles} tiles are new");
        array.decommit(0..len)?;
        stream.synchronize()?;
        array.purge()?;
        let held = array.stats().held;
        ensure!(held == 0, "{held} bytes were not given back");
        Ok(took)
    };
    let tiles = usize::try_from(GIB / TILE)?;
    let mut range = stage.hand.reserve(GIB, tiles)?;
    let by_hand = || {
        let took = stage.time(|| {
            (0..tiles).try_for_each(|_| range.hold(TILE))?;
            range.map()
        })?;
        range.unmap()?;
        range.release()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(stage.times(30, 2), ours, by_hand)?;
    range.give_back()?;
    let row = Row::new(COMMIT, &ours, TILES, &baselines)
        .count("tiles", tiles as f64)
        .count("driver_calls", calls as f64);
    report.add(row.note(stage.watch.note()));
    Ok(())
}

/// Measures backing 1 TiB of holes with zeros.
pub(super) fn zeros(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * ALIAS)?;
    let stream = Stream::new(&stage.device)?;
    let len = usize::try_from(TIB)?;
    let mut array = SparseArray::<u8>::builder(&stage.device, &stream, len)
        .zero_extent(ALIAS)
        .reserve()?;
    let mut last = None;
    let ours = || {
        let took = stage.time(|| array.back_with_zeros(0..len))?;
        let stats = array.stats();
        ensure!(
            stats.zero_backed == TIB,
            "{} bytes read as zero",
            stats.zero_backed
        );
        last = Some(stats);
        array.remove_zeros(0..len)?;
        Ok(took)
    };
    let physical = stage.hand.create(ALIAS)?;
    let mut range = stage.hand.reserve(TIB, 0)?;
    let by_hand = || {
        let took = stage.time(|| range.repeat(&physical))?;
        range.unmap()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(stage.times(5, 1), ours, by_hand)?;
    range.give_back()?;
    physical.release()?;
    let mut row = Row::new(ZEROS, &ours, ALIASES, &baselines).note(KEPT);
    if let Some(stats) = last {
        row = row
            .count("mappings", stats.mappings as f64)
            .count("mib_held", stats.held as f64 / MIB as f64);
    }
    report.add(row.note(stage.watch.note()));
    Ok(())
}
