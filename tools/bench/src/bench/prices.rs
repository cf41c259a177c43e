//! The cost of each driver call by size: the model driver's table.

use std::iter;
use std::time::Duration;

use anyhow::Context as _;
use cuvmm::Stream;
use cuvmm::driver::model::{Costs, Curve};
use cuvmm::driver::{AccessFlags, DriverError};

use super::by_hand::access;
use super::calls::{Event, peer_of};
use super::commit::{GIB, MIB, PAGE};
use super::samples::Samples;
use super::stage::Stage;

/// Sizes in MiB.
const SIZES: [u64; 9] = [2, 8, 32, 128, 512, 1_024, 2_048, 8_192, 32_768];

/// Sizes of commits that follow a release of the same size, in GiB.
const BUSY: [u64; 4] = [2, 4, 8, 16];

/// A time after a release at which the driver has finished with it, whatever its size, and still
/// keeps the memory for reuse.
const PASSED: Duration = Duration::from_millis(100);

/// The number of small mappings made first after a wait.
const FIRST: usize = 5;

/// The ranks of a cost's range and median, in thousandths: 80 percent of the samples lie between.
const RANGE: [usize; 3] = [100, 500, 900];

/// Sizes of copies and fills, in bytes.
const COPIES: [u64; 4] = [4_096, 2 * MIB, 32 * MIB, 256 * MIB];

#[derive(Default)]
struct Points(Vec<(u64, Samples)>);

impl Points {
    fn add(&mut self, bytes: u64, nanos: f64) {
        match self.0.iter_mut().find(|(size, _)| *size == bytes) {
            Some((_, samples)) => samples.add(nanos),
            None => self.0.push((bytes, [nanos].into_iter().collect())),
        }
    }

    /// Returns a rank of the samples of a size, in thousandths, as microseconds.
    fn at_most(&self, bytes: u64, thousandths: usize) -> f64 {
        let found = self.0.iter().find(|(size, _)| *size == bytes);
        found.map_or(0.0, |(_, samples)| {
            rounded(samples.per_mille(thousandths) / 1e3)
        })
    }

    /// Replaces `curve` by the measured points, if there are any.
    fn fill(&self, curve: &mut Curve) {
        if self.0.is_empty() {
            return;
        }
        let point = |&(bytes, _): &(u64, Samples)| {
            let cost = RANGE.map(|thousandths| self.at_most(bytes, thousandths));
            (mib(bytes), cost)
        };
        *curve = self.0.iter().map(point).collect();
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

/// Rounds to a tenth of a nanosecond, which is finer than any clock here.
fn rounded(micros: f64) -> f64 {
    (micros * 1e4).round() / 1e4
}

/// Returns a table as the text of a file, with a header.
pub(super) fn written(stage: &Stage, costs: &Costs) -> String {
    let mut text = "# What driver calls cost, in microseconds; by size as MiB:microseconds.\n\
         # Written by `cuvmm-bench run --save-costs`, read by `--costs`. warm_for_us is not measured.\n"
        .to_owned();
    if peer_of(&stage.hand).is_none() {
        text.push_str("# There was no second device: set_access_peer is not measured.\n");
    }
    text + &costs.to_string()
}

pub(super) fn measure(stage: &Stage) -> anyhow::Result<Costs> {
    measured(stage).context("what calls cost cannot be measured")
}

fn measured(stage: &Stage) -> anyhow::Result<Costs> {
    let mut costs = Costs::default();
    costs.about = stage.about.clone();
    costs.memory_mib = mib(stage.device.total_memory());
    let sizes = sizes(stage);
    flat(stage, &mut costs)?;
    let mut turns = Turns::default();
    for _ in 0..stage.times(15, 2) {
        turns.turn(stage, &sizes)?;
    }
    turns.fill(&mut costs);
    plain(stage, &sizes, &mut costs)?;
    copies(stage, &mut costs)?;
    peer(stage, &mut costs)?;
    Ok(costs)
}

/// Returns the sizes to measure. Several mappings of a size have to fit in memory together.
fn sizes(stage: &Stage) -> Vec<u64> {
    let sizes = SIZES.iter().map(|mib| mib * MIB);
    sizes
        .filter(|&bytes| bytes == SIZES[0] * MIB || bytes <= stage.memory() / 4)
        .collect()
}

/// Prices that are measured once per turn, so that slow and fast periods of the driver affect all.
#[derive(Default)]
struct Turns {
    /// Reserve, create, map, set_access, unmap, release and address free, immediately after a
    /// release.
    life: [Points; 7],
    /// Commits in extents of 1 GiB, immediately after a release.
    commits: Points,
    create_cold: Points,
    access_cold: Points,
}

impl Turns {
    fn turn(&mut self, stage: &Stage, sizes: &[u64]) -> anyhow::Result<()> {
        // Waits until the driver has finished with the memory that the previous turn released.
        stage.settle()?;
        first(stage)?;
        for bytes in SIZES.map(|mib| mib * MIB) {
            if sizes.contains(&bytes) {
                self.life(stage, bytes)?;
            }
        }
        for bytes in BUSY.map(|gib| gib * GIB) {
            if bytes <= stage.memory() / 2 {
                self.commit(stage, bytes)?;
            }
        }
        self.cold(stage, sizes)
    }

    /// Measures the calls of one mapping, immediately after a release of the same size.
    fn life(&mut self, stage: &Stage, bytes: u64) -> anyhow::Result<()> {
        life(stage, bytes)?;
        if bytes > GIB {
            // A large release keeps the driver busy, which is measured as a separate cost. The
            // released memory is still kept for reuse.
            stage.watch.wait(PASSED);
            first(stage)?;
        }
        for (points, took) in self.life.iter_mut().zip(life(stage, bytes)?) {
            points.add(bytes, took);
        }
        Ok(())
    }

    /// Measures a commit immediately after a release of the same size.
    fn commit(&mut self, stage: &Stage, bytes: u64) -> anyhow::Result<()> {
        let extents = vec![GIB; usize::try_from(bytes / GIB)?];
        stage.hand.commit(&extents)?.give_back()?;
        let (took, range) = stage.watch.time(|| stage.hand.commit(&extents))?;
        range.give_back()?;
        self.commits.add(bytes, took);
        Ok(())
    }

    /// Measures commits half a second after the last release: all sizes one after the other,
    /// without a release in between. The first commit is not counted, because half a second also
    /// empties the processor's caches.
    fn cold(&mut self, stage: &Stage, sizes: &[u64]) -> anyhow::Result<()> {
        stage.settle()?;
        let first = stage.hand.commit(&[PAGE])?;
        let mut kept = Vec::new();
        let mut together = PAGE;
        // Commit rounds omit 8 MiB too, and earlier commits affect a commit slightly.
        for &bytes in sizes.iter().filter(|&&bytes| bytes != 8 * MIB) {
            together += bytes;
            if together > stage.memory() {
                break;
            }
            let (reserved, mut range) = stage.watch.time(|| stage.hand.reserve(bytes, 1))?;
            let created = stage.time(|| range.hold(bytes))?;
            let mapped = stage.time(|| range.place())?;
            self.access_cold.add(bytes, stage.time(|| range.open())?);
            // Reserve and map also take longer then. The table has only one curve for cold calls,
            // so their excess is added to the create's.
            let [reserve, _, map, ..] = &self.life;
            let usual = [(reserved, reserve), (mapped, map)];
            let more =
                usual.map(|(took, points)| (took - 1e3 * points.at_most(bytes, 500)).max(0.0));
            self.create_cold
                .add(bytes, created + more.iter().sum::<f64>());
            kept.push(range);
        }
        drop(kept);
        Ok(first.give_back()?)
    }

    fn fill(&self, costs: &mut Costs) {
        let [reserve, create, map, access, unmap, release, free] = &self.life;
        reserve.fill(&mut costs.reserve);
        create.fill(&mut costs.create_warm);
        map.fill(&mut costs.map);
        access.fill(&mut costs.set_access);
        unmap.fill(&mut costs.unmap);
        release.fill(&mut costs.release);
        free.fill(&mut costs.address_free);
        self.create_cold.fill(&mut costs.create_cold);
        self.access_cold.fill(&mut costs.set_access_cold);
        costs.busy = self.busy(costs);
    }

    /// Returns the time after a release of the same size until which a commit's last create can
    /// begin, for commits that take longer than the sum of their calls.
    fn busy(&self, costs: &Costs) -> Curve {
        let (low, high) = costs.range().unwrap_or((costs.clone(), costs.clone()));
        let point = |&(bytes, _): &(u64, Samples)| {
            let until = |costs: &Costs, thousandths| {
                let extents = (bytes / GIB) as f64;
                let create = costs.create_warm.at(GIB);
                let creates = costs.reserve.at(bytes) + extents * create;
                let calls = creates + extents * (costs.map.at(GIB) + costs.set_access.at(GIB));
                let longer = self.commits.at_most(bytes, thousandths) - calls;
                let before = costs.address_free.at(bytes) + creates - create;
                rounded(if longer > 0.0 { before + longer } else { 0.0 })
            };
            let usual = until(costs, RANGE[1]);
            let low = until(&low, RANGE[0]).min(usual);
            let high = until(&high, RANGE[2]).max(usual);
            (mib(bytes), [low, usual, high])
        };
        let points = self.commits.0.iter().map(point);
        iter::once((mib(GIB), [0.0; 3])).chain(points).collect()
    }
}

/// Makes small mappings that are not counted, because a wait has emptied the processor's caches.
fn first(stage: &Stage) -> anyhow::Result<()> {
    (0..FIRST).try_for_each(|_| life(stage, PAGE).map(drop))
}

/// Returns the time of each call that creates and removes one mapping.
fn life(stage: &Stage, bytes: u64) -> anyhow::Result<[f64; 7]> {
    let (reserved, mut range) = stage.watch.time(|| stage.hand.reserve(bytes, 1))?;
    Ok([
        reserved,
        stage.time(|| range.hold(bytes))?,
        stage.time(|| range.place())?,
        stage.time(|| range.open())?,
        stage.time(|| range.unmap())?,
        stage.time(|| range.release())?,
        stage.time(|| range.free())?,
    ])
}

fn plain(stage: &Stage, sizes: &[u64], costs: &mut Costs) -> anyhow::Result<()> {
    let mut alloc = Points::default();
    let mut free = Points::default();
    for &bytes in sizes {
        for turn in 0..=stage.times(21, 3) {
            let (allocated, plain) = stage.watch.time(|| stage.hand.plain(bytes))?;
            let given_back = stage.time(|| plain.free())?;
            if turn > 0 {
                alloc.add(bytes, allocated);
                free.add(bytes, given_back);
            }
        }
    }
    alloc.fill(&mut costs.alloc);
    free.fill(&mut costs.free);
    Ok(())
}

/// Measures copies and fills until they are complete.
fn copies(stage: &Stage, costs: &mut Costs) -> anyhow::Result<()> {
    let room = stage.writable();
    let stream = Stream::new(&stage.device)?;
    let mut host = Points::default();
    let mut fill = Points::default();
    let mut device = Points::default();
    for bytes in COPIES.into_iter().filter(|&bytes| bytes <= room / 4) {
        let plain = stage.hand.plain(bytes)?;
        let other = stage.hand.plain(bytes)?;
        let mut buffer = vec![1; usize::try_from(bytes)?];
        for turn in 0..=stage.times(9, 2) {
            let read = stage.time(|| plain.read(&mut buffer))?;
            let until_done = |act: &dyn Fn() -> Result<(), DriverError>| {
                let begun = stage.time(act)?;
                let waited = stage.time(|| stream.synchronize())?;
                anyhow::Ok((begun + waited - costs.launch * 1e3).max(0.0))
            };
            let filled = until_done(&|| plain.fill(&stream, bytes))?;
            let copied = until_done(&|| plain.copy_to(&other, &stream, bytes))?;
            if turn > 0 {
                host.add(bytes, read);
                fill.add(bytes, filled);
                device.add(bytes, copied);
            }
        }
        plain.free()?;
        other.free()?;
    }
    host.fill(&mut costs.host_copy);
    fill.fill(&mut costs.fill);
    device.fill(&mut costs.device_copy);
    Ok(())
}

fn peer(stage: &Stage, costs: &mut Costs) -> anyhow::Result<()> {
    let Some(peer) = peer_of(&stage.hand) else {
        return Ok(());
    };
    let mut points = Points::default();
    for bytes in [2 * MIB, 128 * MIB, 2_048 * MIB] {
        if bytes > stage.memory() {
            continue;
        }
        for turn in 0..=stage.times(9, 2) {
            let mut range = stage.hand.reserve(bytes, 1)?;
            range.hold(bytes)?;
            range.place()?;
            let alone = stage.time(|| range.open())?;
            range.unmap()?;
            range.place()?;
            let devices = [stage.hand.device(), peer];
            let devices = devices.map(|device| access(device, AccessFlags::READ_WRITE));
            let both = stage.time(|| range.set_access(0, &devices))?;
            if turn > 0 {
                points.add(bytes, (both - alone).max(0.0));
            }
        }
    }
    points.fill(&mut costs.set_access_peer);
    Ok(())
}

/// Measures calls whose cost does not depend on size.
fn flat(stage: &Stage, costs: &mut Costs) -> anyhow::Result<()> {
    let hand = &stage.hand;
    let stream = Stream::new(&stage.device)?;
    let plain = hand.plain(2 * MIB)?;
    costs.launch = median(stage, || plain.fill(&stream, 4))?;
    stream.synchronize()?;
    costs.pool = median(stage, || hand.pooled(&stream, 2 * MIB, 1))? / 2.0;
    stream.synchronize()?;
    costs.memory_info = median(stage, || hand.driver().memory_info(hand.device()))?;
    let event = Event::new(hand)?;
    costs.event_record = median(stage, || event.record(&stream))?;
    stream.synchronize()?;
    costs.query = median(stage, || event.query())?;
    costs.wait_event = median(stage, || event.wait_on(&stream))?;
    stream.synchronize()?;
    costs.synchronize = median(stage, || hand.driver().context_synchronize(hand.device()))?;
    costs.other = median(stage, || stream.is_capturing())?;
    plain.free()?;
    Ok(())
}

fn median<T, E>(stage: &Stage, mut act: impl FnMut() -> Result<T, E>) -> Result<f64, E> {
    act()?;
    let times = stage.times(2_000, 50);
    let mut samples = Samples::with_room(times);
    for _ in 0..times {
        samples.add(stage.watch.time(&mut act)?.0);
    }
    Ok(rounded(samples.median() / 1e3))
}

#[cfg(test)]
mod tests {
    use super::{Costs, GIB, Points, Turns};

    /// Returns ten samples, each a microsecond more than the one before.
    fn points(bytes: u64, micros: u32) -> Points {
        let mut points = Points::default();
        (micros..micros + 10).for_each(|micros| points.add(bytes, 1e3 * f64::from(micros)));
        points
    }

    #[test]
    fn the_driver_is_busy_until_the_last_create_of_a_commit_that_takes_longer_than_its_calls() {
        let mut turns = Turns {
            // The calls of 2 GiB take 70, 98 and 126 microseconds by themselves.
            life: std::array::from_fn(|_| points(GIB, 10)),
            commits: points(2 * GIB, 190),
            ..Turns::default()
        };
        for busy in [" 2048:138\n", " 2048:139/139/928\n"] {
            let mut costs = Costs::default();
            turns.fill(&mut costs);
            let said = costs.to_string();
            assert!(said.contains(&format!("busy 1024:0{busy}")), "{said}");
            (0..2).for_each(|_| turns.commits.add(2 * GIB, 1e6));
        }
    }
}
