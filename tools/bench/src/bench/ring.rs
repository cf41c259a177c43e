//! A ring buffer in device memory, with runs that cross the end of its memory.

use cuvmm::{RingBuffer, Stream};

use super::commit::MIB;
use super::pairs::alternate;
use super::pinned::Pinned;
use super::queue::{Memory, waited};
use super::report::Report;
use super::row::Row;
use super::stage::Stage;

pub(super) const NAME: &str = "ring_push_pop";

const SIZE: u64 = 4 * MIB;
const RUN: u64 = MIB;

const BASELINE: &str =
    "a plain ring by hand: the same in two copies in and two out, waited for in pairs";

/// Measures pushing and popping 1 MiB through pinned memory. Half of the run lies before the end of
/// the ring's memory and half at its beginning.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * SIZE)?;
    stage.room_to_write(2 * SIZE)?;
    let hand = &stage.hand;
    let stream = Stream::new(&stage.device)?;
    let run = usize::try_from(RUN)?;
    let mut ring = RingBuffer::<f32>::new(&stage.device, &stream, usize::try_from(SIZE / 4)?)?;
    let (capacity, elements) = (ring.capacity(), run / 4);
    let advance = |ring: &mut RingBuffer<f32>, by: usize| {
        ring.produce(by)?;
        ring.consume(by)
    };
    advance(&mut ring, capacity - elements / 2)?;
    let chunk = Pinned::new(hand, run)?;
    let mut back = Pinned::new(hand, run)?;
    let ours = || {
        let took = stage.time(|| {
            ring.extend_from_slice(chunk.numbers())?;
            ring.pop_into(back.numbers_mut())
        })?;
        advance(&mut ring, capacity - elements)?;
        Ok(took)
    };
    let there = hand.commit(&[SIZE])?;
    let mut back = Pinned::new(hand, run)?;
    let by_hand = || {
        let memory = Memory::from(&there);
        let (first, second) = (memory.part(SIZE - RUN / 2..SIZE)?, memory.part(0..RUN / 2)?);
        stage.time(|| {
            let (one, two) = chunk.bytes().split_at(run / 2);
            waited(hand, &stream, |queue| {
                queue.upload(first, one)?;
                queue.upload(second, two)
            })?;
            let (one, two) = back.bytes_mut().split_at_mut(run / 2);
            waited(hand, &stream, |queue| {
                queue.download(one, first)?;
                queue.download(two, second)
            })
        })
    };
    let (ours, baselines) = alternate(stage.times(200, 5), ours, by_hand)?;
    let row = Row::new(NAME, &ours, BASELINE, &baselines);
    report.add(row.note(stage.watch.note()));
    Ok(())
}
