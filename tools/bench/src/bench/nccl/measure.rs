//! Measures all kinds of memory alternately, size by size, and checks the sums.

use std::ops::Range;
use std::time::Instant;

use anyhow::{Context as _, bail};
use cuvmm::Device;

use super::kind::{Kind, Whose, doubling};
use super::memory::{Bench, Buffer, Group};
use super::pattern::{element, places, sum};
use super::report::{Refused, Row};
use crate::bench::samples::Samples;

const ELEMENT: u64 = size_of::<f32>() as u64;

/// The maximum number of all-reduces in a sample.
const MOST_IN_A_ROW: u64 = 50;

/// The bytes of host memory that are filled and copied at a time.
const CHUNK: u64 = 64 << 20;

/// The options of a measurement.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// Sizes in bytes, multiples of the element size.
    pub(super) sizes: Vec<u64>,
    pub(super) rounds: usize,
    /// The approximate bytes that a sample moves, with as many all-reduces as that takes, up to 50.
    pub(super) per_sample: u64,
    /// Also registers several extents in one range.
    pub(super) whole: bool,
}

/// The results of a measurement.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) rows: Vec<Row>,
    pub(super) refused: Vec<Refused>,
}

/// Buffers of one kind on all ranks.
struct Side<'a> {
    kind: Kind,
    from: Vec<Buffer<'a>>,
    to: Vec<Buffer<'a>>,
}

/// Measures all kinds of memory with a group of ranks, one for each device.
///
/// # Errors
/// When there is no memory, NCCL fails, or a sum is wrong. A registration that NCCL refuses is a
/// result, not an error.
pub(super) fn measure(
    group: &dyn Group,
    devices: &[Device],
    asked: &Asked,
) -> anyhow::Result<Found> {
    let bench = Bench::new(group, devices)?;
    let most = asked.sizes.iter().copied().max().unwrap_or(0);
    let granule = devices.iter().map(Device::granularity).max().unwrap_or(1);
    let mut found = Found {
        rows: vec![],
        refused: vec![],
    };
    let mut sides = vec![];
    for kind in Kind::all(asked.whole) {
        match side(&bench, kind, most, granule)? {
            Ok(side) => sides.push(side),
            Err(refused) => found.refused.push(refused),
        }
    }
    fill(&mut sides, most)?;
    let seams: Vec<u64> = doubling(most, granule)
        .iter()
        .map(|end| end / ELEMENT)
        .collect();
    for &bytes in &asked.sizes {
        let places = places(bytes / ELEMENT, &seams);
        let times = in_a_row(bytes, asked.per_sample);
        let samples = rounds(&bench, &mut sides, &places, asked.rounds, (bytes, times))?;
        let measured: Vec<(Kind, usize, Samples)> = sides
            .iter()
            .zip(samples)
            .map(|(side, samples)| (side.kind, side.extents(), samples))
            .collect();
        found
            .rows
            .extend(Row::of_size(bytes, bench.ranks(), &measured));
    }
    Ok(found)
}

/// Allocates the buffers of a kind and registers them as it says, or returns why NCCL refuses to
/// register them.
fn side<'a>(
    bench: &'a Bench<'a>,
    kind: Kind,
    bytes: u64,
    granule: u64,
) -> anyhow::Result<Result<Side<'a>, Refused>> {
    let buffers = || kind.buffers(bench, bytes, granule);
    let context = || format!("memory for {}", kind.memory());
    let mut side = Side {
        kind,
        from: buffers().with_context(context)?,
        to: buffers().with_context(context)?,
    };
    let all = || side.from.iter().chain(&side.to);
    if kind.whose != Whose::Nccl {
        for buffer in all() {
            if !buffer.is_shareable()? {
                bail!("memory of ours was not made to be exported");
            }
        }
    }
    let Some(by) = kind.registered else {
        return Ok(Ok(side));
    };
    for buffer in side.from.iter_mut().chain(&mut side.to) {
        if let Err(error) = buffer.register(by) {
            return Ok(Err(Refused {
                memory: kind.memory(),
                registered: kind.how(),
                reason: format!("{error:#}"),
            }));
        }
    }
    Ok(Ok(side))
}

impl Side<'_> {
    fn extents(&self) -> usize {
        self.from.first().map_or(0, Buffer::extents)
    }

    /// Returns the nanoseconds per all-reduce of `times` in a row, and checks the sums.
    fn sample(
        &mut self,
        bench: &Bench<'_>,
        bytes: u64,
        times: u32,
        places: &[Range<u64>],
    ) -> anyhow::Result<f64> {
        self.clear(places)?;
        let begun = Instant::now();
        bench
            .all_reduce(&self.from, &mut self.to, bytes, times)
            .with_context(|| self.said(bytes))?;
        let took = begun.elapsed();
        self.check(bench.ranks(), places)
            .with_context(|| self.said(bytes))?;
        Ok(took.as_nanos() as f64 / f64::from(times))
    }

    fn said(&self, bytes: u64) -> String {
        let (memory, how) = (self.kind.memory(), self.kind.how());
        format!("{bytes} bytes, {memory}, registered: {how}")
    }

    /// Overwrites the checked elements with NaN, so that sums of an earlier sample are not mistaken
    /// for those of the next.
    fn clear(&mut self, places: &[Range<u64>]) -> anyhow::Result<()> {
        for place in places {
            let nothing = bytes_of((place.start..place.end).map(|_| f32::NAN));
            for buffer in &mut self.to {
                buffer.write(place.start * ELEMENT, &nothing)?;
            }
        }
        Ok(())
    }

    fn check(&self, ranks: usize, places: &[Range<u64>]) -> anyhow::Result<()> {
        for place in places {
            let right = bytes_of(place.clone().map(|index| sum(ranks, index)));
            let mut seen = vec![0; right.len()];
            for (rank, buffer) in self.to.iter().enumerate() {
                buffer.read(place.start * ELEMENT, &mut seen)?;
                if seen != right {
                    return Err(wrong(rank, place.start, &right, &seen));
                }
            }
        }
        Ok(())
    }
}

/// Returns the error that names the first wrong number.
fn wrong(rank: usize, start: u64, right: &[u8], seen: &[u8]) -> anyhow::Error {
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        let (elements, _) = bytes.as_chunks();
        elements.iter().copied().map(f32::from_ne_bytes).collect()
    };
    let pairs = numbers(right).into_iter().zip(numbers(seen));
    let mut different = (start..)
        .zip(pairs)
        .filter(|(_, (right, seen))| right != seen);
    let (index, (right, seen)) = different.next().unwrap_or((start, (0.0, 0.0)));
    let more = different.count();
    anyhow::anyhow!(
        "a wrong sum on rank {rank}: element {index} is {seen} and not {right}, and {more} more near it"
    )
}

/// Writes the pattern to all source buffers.
fn fill(sides: &mut [Side<'_>], bytes: u64) -> anyhow::Result<()> {
    let ranks = sides.first().map_or(0, |side| side.from.len());
    for rank in 0..ranks {
        let mut at = 0;
        while at < bytes {
            let end = (at + CHUNK).min(bytes);
            let chunk = bytes_of((at / ELEMENT..end / ELEMENT).map(|index| element(rank, index)));
            for side in &mut *sides {
                if let Some(buffer) = side.from.get_mut(rank) {
                    buffer.write(at, &chunk)?;
                }
            }
            at = end;
        }
    }
    Ok(())
}

/// Takes samples of all sides alternately. Every second round runs in reverse order, so that no
/// side always follows the same one.
fn rounds(
    bench: &Bench<'_>,
    sides: &mut [Side<'_>],
    places: &[Range<u64>],
    rounds: usize,
    (bytes, times): (u64, u32),
) -> anyhow::Result<Vec<Samples>> {
    let mut samples = vec![Samples::with_room(rounds); sides.len()];
    for side in &mut *sides {
        // The first sample is not counted: NCCL connects the ranks in it, and registers
        // permanently.
        side.sample(bench, bytes, times, places)?;
    }
    for round in 0..rounds {
        let mut turns: Vec<_> = sides.iter_mut().zip(&mut samples).collect();
        if round % 2 == 1 {
            turns.reverse();
        }
        for (side, samples) in turns {
            samples.add(side.sample(bench, bytes, times, places)?);
        }
    }
    Ok(samples)
}

fn in_a_row(bytes: u64, per_sample: u64) -> u32 {
    let times = (per_sample / bytes.max(1)).clamp(1, MOST_IN_A_ROW);
    u32::try_from(times).unwrap_or(1)
}

fn bytes_of(numbers: impl Iterator<Item = f32>) -> Vec<u8> {
    numbers.flat_map(f32::to_ne_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fake::Fake;
    use super::*;

    const G: u64 = 2 << 20;

    fn asked() -> Asked {
        Asked {
            sizes: vec![4096, G, 5 * G],
            rounds: 2,
            per_sample: 4 * G,
            whole: true,
        }
    }

    #[test]
    fn every_kind_is_measured_and_the_leases_end() {
        let fake = Fake::new(2);
        let found = measure(&fake, fake.devices(), &asked()).unwrap();
        // The fake refuses a range of several mappings, and its reason must be reported.
        let [refused] = &found.refused[..] else {
            panic!("{:?}", found.refused);
        };
        assert_eq!(
            (refused.memory, refused.registered),
            ("grown region", "whole")
        );
        assert!(refused.reason.contains("several mappings"), "{refused:?}");
        assert_eq!(found.rows.len(), 3 * 6);
        for row in &found.rows {
            assert_eq!(row.n, 2);
            assert!(row.p50_ns > 0.0 && row.bus_gb_per_s > 0.0);
            assert_eq!(row.vs_nccl.is_some(), row.memory != "ncclMemAlloc");
            let extents = if row.memory == "grown region" { 4 } else { 2 };
            if row.memory != "ncclMemAlloc" {
                assert_eq!(row.extents, extents, "5 = 4 + 1, or 1 + 1 + 2 + 1 granules");
            }
        }
        // One registration for NCCL's buffer, two for the region's extents and four for the grown
        // region's, on two ranks with two buffers each.
        assert_eq!(fake.registered(), 2 * 2 * (1 + 2 + 4));
        assert!(fake.is_clean());
    }

    #[test]
    fn a_wrong_sum_is_no_figure() {
        for element in [0, 1023, G / 4 + 5] {
            let fake = Fake::new(2).wrong_at(element);
            let error = measure(&fake, fake.devices(), &asked()).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(&format!("element {element} is")), "{text}");
            assert!(fake.is_clean());
        }
    }

    #[test]
    fn what_fails_is_given_up() {
        let fake = Fake::new(2).fails_at(4);
        let error = measure(&fake, fake.devices(), &asked()).unwrap_err();
        assert!(
            format!("{error:#}").contains("registered: no: it failed"),
            "{error:#}"
        );
        assert!(fake.is_aborted() && fake.is_clean());
    }

    #[test]
    fn a_sample_is_long_enough_to_be_timed() {
        let of = |bytes| in_a_row(bytes, 2 << 30);
        assert_eq!(
            [of(1 << 20), of(64 << 20), of(1 << 30), of(8 << 30)],
            [50, 32, 2, 1]
        );
    }
}
