//! Copy-on-write snapshots of a buffer, and the copy of one written extent.

use anyhow::ensure;
use cuvmm::cow::DEFAULT_COW_EXTENT;
use cuvmm::{CowBuffer, Device, Stream};

use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::queue::{Memory, waited};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;

/// Rows of snapshots of 1 GiB with their extent sizes: the default, a small and a large one.
pub(super) const SNAPSHOTS: [(&str, u64); 3] = [
    ("snapshot_1GiB", DEFAULT_COW_EXTENT),
    ("snapshot_1GiB_by_8MiB", EXTENT),
    ("snapshot_1GiB_by_512MiB", 512 * MIB),
];
pub(super) const MAKE_MUT: &str = "snapshot_make_mut_8MiB";

const EXTENT: u64 = 8 * MIB;

/// The copies that are timed beside the snapshots.
const COPIES: usize = 10;

const SHOWN: &str =
    "the same calls by hand: reserve; map, set_access and set_access of each extent";
const SAVED: &str = "a snapshot takes no memory, the copy as much again";
const EXCHANGE: &str = "one extent by hand: create, map and set_access elsewhere, copy, wait, unmap \
                        both, map, set_access";

fn buffer(
    device: &Device,
    stream: &Stream,
    size: u64,
    extent: u64,
) -> anyhow::Result<CowBuffer<u8>> {
    let len = usize::try_from(size)?;
    Ok(CowBuffer::with_extents(device, stream, len, extent)?)
}

/// Measures taking a snapshot of a writable buffer of 1 GiB.
pub(super) fn snapshot(
    stage: &Stage,
    report: &mut Report,
    (name, extent): (&str, u64),
) -> anyhow::Result<()> {
    let size = stage.written(GIB);
    stage.room(3 * size)?;
    stage.room_to_write(2 * size)?;
    let device = stage.device.with_own_counters();
    let stream = Stream::new(&stage.device)?;
    let mut buffer = buffer(&device, &stream, size, extent)?;
    let mut calls = 0;
    let ours = || {
        let before = device.calls();
        let (took, snapshot) = stage.watch.time(|| buffer.snapshot())?;
        calls = device.calls().since(&before).total();
        let shared = buffer.shared();
        ensure!(shared == size, "{shared} bytes are shared");
        drop(snapshot);
        // Makes the buffer writable again for the next snapshot.
        let all = 0..buffer.len();
        buffer.make_mut(all)?;
        Ok(took)
    };
    let starts = (0..size).step_by(usize::try_from(extent)?);
    let extents: Vec<u64> = starts.map(|at| extent.min(size - at)).collect();
    let from = stage.hand.commit(&extents)?;
    let to = stage.hand.commit(&[size])?;
    waited(&stage.hand, &stream, |queue| queue.fill((&from).into()))?;
    let by_hand = || {
        let (took, shown) = stage.watch.time(|| {
            let mut shown = stage.hand.reserve(size, 0)?;
            from.show_in(&mut shown)?;
            anyhow::Ok(shown)
        })?;
        drop(shown);
        from.open()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(stage.times(30, 2), ours, by_hand)?;
    let mut copies = Samples::with_room(COPIES);
    for _ in 0..COPIES {
        copies.add(stage.time(|| {
            waited(&stage.hand, &stream, |queue| {
                queue.copy((&to).into(), (&from).into())
            })
        })?);
    }
    let row = Row::new(name, &ours, SHOWN, &baselines)
        .note(SAVED)
        .count("copy_p50_ns", copies.median())
        .count("mib", (size / MIB) as f64)
        .count("extents", extents.len() as f64)
        .count("driver_calls", calls as f64);
    report.add(row.note(stage.watch.note()));
    Ok(())
}

/// Measures unsharing one extent after the other while a snapshot holds them too.
pub(super) fn make_mut(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let pairs = stage.times(100, 3);
    // One extent for each turn; the first turn is not counted.
    let extents = pairs as u64 + 1;
    stage.room(2 * extents * EXTENT)?;
    stage.room_to_write(2 * extents * EXTENT)?;
    let device = stage.device.with_own_counters();
    let stream = Stream::new(&stage.device)?;
    let mut buffer = buffer(&device, &stream, extents * EXTENT, EXTENT)?;
    let snapshot = buffer.snapshot()?;
    let mut starts = (0..buffer.len()).step_by(usize::try_from(EXTENT)?);
    let mut calls = 0;
    let ours = || {
        let first = starts.next().unwrap_or_default();
        let (before, shared) = (device.calls(), buffer.shared());
        let (took, len) = stage
            .watch
            .time(|| buffer.make_mut(first..first + 1).map(|view| view.len()))?;
        calls = device.calls().since(&before).total();
        let copied = shared - buffer.shared();
        ensure!(
            (len, copied) == (1, EXTENT),
            "{copied} bytes were copied for {len}"
        );
        Ok(took)
    };
    let mut place = stage.hand.commit(&[EXTENT])?;
    let mut beside = stage.hand.reserve(EXTENT, 1)?;
    waited(&stage.hand, &stream, |queue| queue.fill((&place).into()))?;
    let by_hand = || {
        let took = stage.time(|| {
            beside.append(EXTENT)?;
            waited(&stage.hand, &stream, |queue| {
                queue.copy((&beside).into(), Memory::from(&place))
            })?;
            place.unmap()?;
            anyhow::Ok(beside.move_into(&mut place)?)
        })?;
        // On cuvmm's side, the snapshot keeps this memory.
        beside.release()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(pairs, ours, by_hand)?;
    drop(snapshot);
    let row = Row::new(MAKE_MUT, &ours, EXCHANGE, &baselines).count("driver_calls", calls as f64);
    report.add(row.note(stage.watch.note()));
    Ok(())
}
