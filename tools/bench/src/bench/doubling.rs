//! A vector that grows by pushing to a given size, compared with growth without virtual memory:
//! when full, allocate twice the size, copy, and free the old memory.
//!
//! Pushed elements are filled on the device, so that no copies from the host are timed. A push is a
//! sixteenth of the present size: pushes reach the end of the memory as often as pushes of single
//! elements, with no more calls than needed.

use std::cell::Cell;
use std::ops::Range;

use cuvmm::driver::Call;
use cuvmm::{Device, DeviceVec, Stream};

use super::commit::{GIB, MIB, PAGE};
use super::pairs::{after_itself, alternate};
use super::queue::{Memory, Queue, waited};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use super::wanted::Wanted;
use cuvmm_command::drivers::Concrete;

#[derive(Clone, Copy, Debug)]
pub(super) enum Size {
    Bytes(u64),
    /// A percentage of the device's memory.
    OfAll(u64),
}

pub(super) const SIZES: [(&str, Size); 5] = [
    ("2MiB", Size::Bytes(2 * MIB)),
    ("32MiB", Size::Bytes(32 * MIB)),
    ("512MiB", Size::Bytes(512 * MIB)),
    ("8GiB", Size::Bytes(8 * GIB)),
    ("75pct", Size::OfAll(75)),
];

/// The size of the first push, and the initial capacity of a vector by hand.
const FIRST: u64 = 64 << 10;

const FILLS: &str = "the same fills into memory that was there before";
const DOUBLING: &str = "cuMemAlloc of twice the size, a copy and cuMemFree each time it is full";
const AT_ONCE: &str = "one cuMemAlloc of everything, and the same fills";
const RESERVED: &str = "all memory asked for before the first push";
const NO_ROOM: &str = "by hand it came to an end: the old memory and twice as much beside it \
                       were more than the device has";

fn name(word: &str) -> String {
    format!("vec_doubling_{word}")
}

fn against(word: &str, rival: &str) -> String {
    format!("{}_vs_{rival}", name(word))
}

pub(super) fn names(word: &str) -> [String; 3] {
    let [copies, reserved] = ["alloc_copy_free", "reserved"].map(|rival| against(word, rival));
    [name(word), copies, reserved]
}

impl Size {
    fn bytes(self, stage: &Stage) -> anyhow::Result<u64> {
        Ok(match self {
            Self::Bytes(bytes) => bytes,
            Self::OfAll(hundredths) => {
                stage.device.memory_info()?.total / (100 * PAGE) * hundredths * PAGE
            }
        })
    }
}

/// The point at which a vector by hand ran out of memory, in bytes.
#[derive(Clone, Copy, Debug)]
struct End {
    held: u64,
    wanted: u64,
}

struct Growth<'a> {
    stage: &'a Stage,
    device: Device,
    stream: Stream,
    size: u64,
    pushes: Vec<Range<u64>>,
    /// Creates and driver calls of cuvmm's last vector.
    calls: Cell<(u64, u64)>,
    /// Set if the last vector by hand ran out of memory.
    end: Cell<Option<End>>,
}

/// # Errors
/// A side fails, except a vector by hand that runs out of memory.
pub(super) fn measure(
    stage: &Stage,
    wanted: &Wanted,
    report: &mut Report,
    (word, size): (&str, Size),
) -> anyhow::Result<()> {
    let size = stage.written(size.bytes(stage)?);
    stage.room(size)?;
    // The host driver can allocate more than the system has; old and new memory are written
    // together.
    if let Concrete::Host(_) = stage.driver {
        stage.room_to_write(2 * size)?;
    }
    let growth = Growth {
        stage,
        device: stage.device.with_own_counters(),
        stream: Stream::new(&stage.device)?,
        size,
        pushes: pushes(size),
        calls: Cell::default(),
        end: Cell::new(None),
    };
    let fills = name(word);
    if wanted.has(&fills) {
        let (ours, baselines) = growth.turns(|| growth.pushed(), || growth.filled())?;
        report.add(growth.row(fills, FILLS, &ours, &baselines));
    }
    let doubling = against(word, "alloc_copy_free");
    if wanted.has(&doubling) {
        let (ours, baselines) = growth.turns(|| growth.pushed(), || growth.doubled())?;
        let row = match growth.end.get() {
            None => growth.row(doubling, DOUBLING, &ours, &baselines),
            // The time of an unfinished run is not a baseline.
            Some(end) => growth
                .row(doubling, DOUBLING, &ours, &Samples::default())
                .note(NO_ROOM)
                .count("baseline_held_mib", in_mib(end.held))
                .count("baseline_wanted_mib", in_mib(end.wanted)),
        };
        report.add(row);
    }
    let reserved = against(word, "reserved");
    if wanted.has(&reserved) {
        let (ours, baselines) = growth.turns(|| growth.reserved(), || growth.allocated())?;
        report.add(
            growth
                .row(reserved, AT_ONCE, &ours, &baselines)
                .note(RESERVED),
        );
    }
    Ok(())
}

fn pushes(size: u64) -> Vec<Range<u64>> {
    let mut pushes = Vec::new();
    let mut at = 0;
    while at < size {
        let end = (at + (at / 16).max(FIRST)).min(size);
        pushes.push(at..end);
        at = end;
    }
    pushes
}

fn in_mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

impl Growth<'_> {
    /// Measures both sides alternately. The driver is still busy with a large release at the next
    /// allocation, so above 1 GiB each side follows a release of its own.
    fn turns(
        &self,
        ours: impl FnMut() -> anyhow::Result<f64>,
        rival: impl FnMut() -> anyhow::Result<f64>,
    ) -> anyhow::Result<(Samples, Samples)> {
        let pairs = self.stage.times(10, 1);
        if self.size > GIB {
            alternate(pairs, after_itself(ours), after_itself(rival))
        } else {
            alternate(pairs, ours, rival)
        }
    }

    fn row(&self, name: String, baseline: &str, ours: &Samples, baselines: &Samples) -> Row {
        let (extents, calls) = self.calls.get();
        Row::new(name, ours, baseline, baselines)
            .note(self.stage.watch.note())
            .count("mib", in_mib(self.size))
            .count("extents", extents as f64)
            .count("driver_calls", calls as f64)
    }

    fn pushed(&self) -> anyhow::Result<f64> {
        self.ours(|vec, end| Ok(vec.reserve(usize::try_from(end)?)?))
    }

    /// Times cuvmm's vector, reserving all memory before the first push.
    fn reserved(&self) -> anyhow::Result<f64> {
        let all = usize::try_from(self.size)?;
        self.ours(|vec, _| match vec.capacity() < all {
            true => Ok(vec.reserve(all)?),
            false => Ok(()),
        })
    }

    fn ours(
        &self,
        grow: impl Fn(&mut DeviceVec<u8>, u64) -> anyhow::Result<()>,
    ) -> anyhow::Result<f64> {
        let most = usize::try_from(self.size)?;
        let before = self.device.calls();
        let (took, vec) = self.timed(|queue| {
            let mut vec = DeviceVec::<u8>::new(&self.device, &self.stream, most)?;
            for push in &self.pushes {
                grow(&mut vec, push.end)?;
                queue.fill(Memory::from(&vec).part(push.clone())?)?;
            }
            Ok(vec)
        })?;
        let calls = self.device.calls().since(&before);
        self.calls
            .set((calls.count(Call::MemCreate), calls.total()));
        drop(vec);
        Ok(took)
    }

    /// Times a vector by hand that doubles its memory when full.
    fn doubled(&self) -> anyhow::Result<f64> {
        let hand = &self.stage.hand;
        let (took, (plain, end)) = self.timed(|queue| {
            let mut plain = hand.plain(FIRST)?;
            for push in &self.pushes {
                if push.end > plain.size() {
                    let (held, wanted) = (plain.size(), 2 * plain.size());
                    let larger = match hand.plain(wanted) {
                        Err(error) if error.is_out_of_memory() => {
                            return Ok((plain, Some(End { held, wanted })));
                        }
                        larger => larger?,
                    };
                    let old = Memory::from(&plain).part(0..push.start)?;
                    queue.copy(Memory::from(&larger), old)?;
                    std::mem::replace(&mut plain, larger).free()?;
                }
                queue.fill(Memory::from(&plain).part(push.clone())?)?;
            }
            Ok((plain, None))
        })?;
        self.end.set(end);
        plain.free()?;
        Ok(took)
    }

    /// Times a vector by hand with all memory allocated at the beginning.
    fn allocated(&self) -> anyhow::Result<f64> {
        let (took, plain) = self.timed(|queue| {
            let plain = self.stage.hand.plain(self.size)?;
            self.fill(queue, Memory::from(&plain))?;
            Ok(plain)
        })?;
        plain.free()?;
        Ok(took)
    }

    fn filled(&self) -> anyhow::Result<f64> {
        let plain = self.stage.hand.plain(self.size)?;
        let (took, ()) = self.timed(|queue| self.fill(queue, Memory::from(&plain)))?;
        plain.free()?;
        Ok(took)
    }

    fn fill(&self, queue: &Queue<'_>, memory: Memory<'_>) -> anyhow::Result<()> {
        let mut pushes = self.pushes.iter();
        pushes.try_for_each(|push| queue.fill(memory.part(push.clone())?))
    }

    fn timed<T>(
        &self,
        act: impl FnOnce(&Queue<'_>) -> anyhow::Result<T>,
    ) -> anyhow::Result<(f64, T)> {
        let (watch, hand) = (&self.stage.watch, &self.stage.hand);
        watch.time(|| waited(hand, &self.stream, |queue| act(queue)))
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, GIB, pushes};

    #[test]
    fn pushes_lie_side_by_side_and_are_small_parts() {
        let pushes = pushes(GIB);
        assert_eq!(pushes.first().map(|push| push.end), Some(FIRST));
        assert_eq!(pushes.last().map(|push| push.end), Some(GIB));
        for pair in pushes.windows(2) {
            let [one, next] = pair else { unreachable!() };
            assert_eq!(one.end, next.start);
            assert!(next.end - next.start <= (next.start / 16).max(FIRST));
        }
        assert!(pushes.len() < 200, "{}", pushes.len());
    }
}
