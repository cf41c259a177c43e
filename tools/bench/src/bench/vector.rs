//! Filling an empty device vector, compared with the copies alone.

use cuvmm::{DeviceVec, Stream};

use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::pinned::Pinned;
use super::queue::{Memory, waited};
use super::report::Report;
use super::row::Row;
use super::stage::Stage;

pub(super) const NAME: &str = "vec_push_8GiB";

const CHUNK: u64 = MIB;

const BASELINE: &str =
    "the same copies by hand, each waited for, into memory that was there before";

/// Measures pushing 1 MiB at a time from pinned memory until the vector holds 8 GiB.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let size = stage.times(8, 1) as u64 * GIB;
    stage.room(2 * size)?;
    stage.room_to_write(2 * size)?;
    let stream = Stream::new(&stage.device)?;
    let chunk = Pinned::new(&stage.hand, usize::try_from(CHUNK)?)?;
    let most = usize::try_from(size / 4)?;
    let ours = || {
        let mut vec = DeviceVec::<f32>::new(&stage.device, &stream, most)?;
        let mut chunks = 0..size / CHUNK;
        stage.time(|| chunks.try_for_each(|_| vec.extend_from_slice(chunk.numbers())))
    };
    let there = stage
        .hand
        .commit(&vec![GIB; usize::try_from(size / GIB)?])?;
    let by_hand = || {
        let memory = Memory::from(&there);
        stage.time(|| {
            (0..size / CHUNK).try_for_each(|at| {
                let part = memory.part(at * CHUNK..(at + 1) * CHUNK)?;
                waited(&stage.hand, &stream, |queue| {
                    queue.upload(part, chunk.bytes())
                })
            })
        })
    };
    let (ours, baselines) = alternate(stage.times(10, 2), ours, by_hand)?;
    drop(there);
    let row = Row::new(NAME, &ours, BASELINE, &baselines);
    report.add(row.note(stage.watch.note()));
    Ok(())
}
