//! What each driver call costs, by size: the table that the model driver reads.

use std::time::Duration;

use anyhow::Context as _;
use cuvmm::Stream;
use cuvmm::driver::DriverError;
use cuvmm::driver::model::{Costs, Curve};
use cuvmm::plan::Clock as _;

use super::calls::{Calls, Event, peer_of};
use super::commit::{GIB, MIB, PAGE};
use super::samples::Samples;
use super::stage::Stage;

/// Sizes in MiB.
const SIZES: [u64; 9] = [2, 8, 32, 128, 512, 1_024, 2_048, 8_192, 32_768];

/// What is released in a row, in GiB.
const BUSY: [u64; 4] = [2, 4, 8, 16];

/// So long after a release of any size the driver is done with it, and still has it at hand.
const PASSED: Duration = Duration::from_millis(100);

/// How many small mappings come first after such a wait.
const FIRST: usize = 5;

/// What is copied and filled, in bytes.
const COPIES: [u64; 4] = [4_096, 2 * MIB, 32 * MIB, 256 * MIB];

/// A curve that is being measured.
#[derive(Default)]
struct Points(Vec<(u64, Samples)>);

impl Points {
    fn add(&mut self, bytes: u64, nanos: f64) {
        match self.0.iter_mut().find(|(size, _)| *size == bytes) {
            Some((_, samples)) => samples.add(nanos),
            None => self.0.push((bytes, [nanos].into_iter().collect())),
        }
    }

    /// Replaces what was known by what was measured, if anything was.
    fn fill(&self, curve: &mut Curve) {
        if self.0.is_empty() {
            return;
        }
        let point =
            |(bytes, samples): &(u64, Samples)| (*bytes as f64 / MIB as f64, micros(samples));
        let points: Vec<_> = self.0.iter().map(point).collect();
        *curve = Curve::new(&points);
    }
}

fn micros(samples: &Samples) -> f64 {
    rounded(samples.median() / 1e3)
}

/// A tenth of a nanosecond is more than any clock here tells.
fn rounded(micros: f64) -> f64 {
    (micros * 1e4).round() / 1e4
}

/// The table that expectations are made by: the one given, or else one that is measured, once.
///
/// # Errors
/// When a call fails.
pub(super) fn table(stage: &Stage) -> anyhow::Result<&Costs> {
    match &stage.given {
        Some(given) => Ok(given),
        None => measured(stage),
    }
}

/// The table of this machine, measured once.
///
/// # Errors
/// When a call fails.
pub(super) fn measured(stage: &Stage) -> anyhow::Result<&Costs> {
    if let Some(costs) = stage.costs.get() {
        return Ok(costs);
    }
    let costs = measure(stage).context("what calls cost cannot be measured")?;
    Ok(stage.costs.get_or_init(|| costs))
}

/// A table as a file, with a head that says what made it.
pub(super) fn written(stage: &Stage, costs: &Costs) -> String {
    let mut text = "# What driver calls cost, in microseconds; by size as MiB:microseconds.\n\
         # Written by `cuvmm bench --save-costs`, read by `--costs`. warm_for_us is not measured.\n"
        .to_owned();
    if peer_of(&stage.hand).is_none() {
        text.push_str("# There was no second device: set_access_peer is not measured.\n");
    }
    text + &costs.to_string()
}

/// Measures all calls.
fn measure(stage: &Stage) -> anyhow::Result<Costs> {
    let mut costs = Costs::default();
    costs.about = stage.about.clone();
    costs.memory_mib = (stage.device.total_memory() / MIB) as f64;
    let sizes = sizes(stage);
    flat(stage, &mut costs)?;
    at_once(stage, &sizes, &mut costs)?;
    busy(stage, &mut costs)?;
    cold(stage, &sizes, &mut costs)?;
    plain(stage, &sizes, &mut costs)?;
    copies(stage, &mut costs)?;
    peer(stage, &mut costs)?;
    Ok(costs)
}

/// Large ones are rare, and a few of them have to be there at one time.
fn sizes(stage: &Stage) -> Vec<u64> {
    let sizes = SIZES.iter().map(|mib| mib * MIB);
    sizes
        .filter(|&bytes| bytes == SIZES[0] * MIB || bytes <= stage.memory() / 4)
        .collect()
}

/// The life of one mapping, over and over: what is created was released a moment ago.
fn at_once(stage: &Stage, sizes: &[u64], costs: &mut Costs) -> anyhow::Result<()> {
    let mut points: [Points; 7] = Default::default();
    let [reserve, create, map, access, unmap, release, free] = &mut points;
    for &bytes in sizes {
        for turn in 0..=stage.times(21, 3) {
            if bytes > GIB {
                // The driver is busy with a large release, which is a cost of its own; what was
                // released is still at hand. The wait empties the processor's caches.
                stage.watch.wait(PASSED);
                for _ in 0..FIRST {
                    life(stage, PAGE)?;
                }
            }
            let took = life(stage, bytes)?;
            if turn == 0 {
                continue;
            }
            let all = [&mut *reserve, create, map, access, unmap, release, free];
            for (points, took) in all.into_iter().zip(took) {
                points.add(bytes, took);
            }
        }
    }
    reserve.fill(&mut costs.reserve);
    create.fill(&mut costs.create_warm);
    map.fill(&mut costs.map);
    access.fill(&mut costs.set_access);
    unmap.fill(&mut costs.unmap);
    release.fill(&mut costs.release);
    free.fill(&mut costs.address_free);
    Ok(())
}

/// What each call in the life of one mapping takes.
fn life(stage: &Stage, bytes: u64) -> Result<[f64; 7], DriverError> {
    let mut calls = Calls::new(&stage.hand, bytes);
    Ok([
        time(stage, || calls.reserve())?,
        time(stage, || calls.create())?,
        time(stage, || calls.map())?,
        time(stage, || calls.set_access())?,
        time(stage, || calls.unmap())?,
        time(stage, || calls.release())?,
        time(stage, || calls.free_addresses())?,
    ])
}

/// What a commit takes longer at once after a release of that much than its calls by themselves.
fn busy(stage: &Stage, costs: &mut Costs) -> anyhow::Result<()> {
    let mut curve = vec![(1024.0, 0.0)];
    for gib in BUSY {
        let bytes = gib * GIB;
        if bytes > stage.memory() / 2 {
            break;
        }
        let extents = vec![GIB; usize::try_from(gib)?];
        let mut samples = Samples::default();
        for turn in 0..=stage.times(11, 2) {
            let (took, range) = stage.watch.time(|| stage.hand.commit(&extents))?;
            range.give_back()?;
            if turn > 0 {
                samples.add(took);
            }
        }
        let each = [&costs.create_warm, &costs.map, &costs.set_access];
        let each: f64 = each.map(|curve| curve.at(GIB)).iter().sum();
        let calls = costs.reserve.at(bytes) + gib as f64 * each;
        curve.push((
            (bytes / MIB) as f64,
            rounded(micros(&samples) - calls).max(0.0),
        ));
    }
    costs.busy = Curve::new(&curve);
    Ok(())
}

/// Half a second after the last release; all sizes one after the other, with none released
/// meanwhile. A first commit does not count: half a second empties the processor's caches too.
fn cold(stage: &Stage, sizes: &[u64], costs: &mut Costs) -> anyhow::Result<()> {
    let mut create = Points::default();
    let mut access = Points::default();
    for _ in 0..stage.times(15, 2) {
        stage.settle()?;
        let first = stage.hand.commit(&[PAGE])?;
        let mut kept = Vec::new();
        let mut together = PAGE;
        // Rounds of commits have no such size either: what comes before a commit matters a little.
        for &bytes in sizes.iter().filter(|&&bytes| bytes != 8 * MIB) {
            together += bytes;
            if together > stage.memory() {
                break;
            }
            let mut calls = Calls::new(&stage.hand, bytes);
            let reserved = time(stage, || calls.reserve())?;
            let created = time(stage, || calls.create())?;
            let mapped = time(stage, || calls.map())?;
            access.add(bytes, time(stage, || calls.set_access())?);
            // Those two take longer as well by then. The table has one line for cold: what they take
            // more is the create's.
            let usual = [(reserved, &costs.reserve), (mapped, &costs.map)];
            let more = usual.map(|(took, curve)| (took - 1e3 * curve.at(bytes)).max(0.0));
            create.add(bytes, created + more.iter().sum::<f64>());
            kept.push(calls);
        }
        drop(kept);
        first.give_back()?;
    }
    create.fill(&mut costs.create_cold);
    access.fill(&mut costs.set_access_cold);
    Ok(())
}

/// The driver's own allocations.
fn plain(stage: &Stage, sizes: &[u64], costs: &mut Costs) -> anyhow::Result<()> {
    let mut alloc = Points::default();
    let mut free = Points::default();
    for &bytes in sizes {
        for turn in 0..=stage.times(21, 3) {
            let (allocated, plain) = stage.watch.time(|| stage.hand.plain(bytes))?;
            let given_back = time(stage, || plain.free())?;
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

/// Copies and fills, until they are done.
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
            let read = time(stage, || plain.read(&mut buffer))?;
            let until_done = |act: &dyn Fn() -> Result<(), DriverError>| {
                let begun = time(stage, act)?;
                let (waited, ()) = stage.watch.time(|| stream.synchronize())?;
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

fn time(stage: &Stage, act: impl FnOnce() -> Result<(), DriverError>) -> Result<f64, DriverError> {
    stage.watch.time(act).map(|(took, ())| took)
}

/// What another device's access costs more.
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
            let mut calls = Calls::new(&stage.hand, bytes);
            calls.reserve()?;
            calls.create()?;
            calls.map()?;
            let alone = time(stage, || calls.set_access())?;
            calls.unmap()?;
            calls.map()?;
            let both = time(stage, || calls.set_access_with(peer))?;
            if turn > 0 {
                points.add(bytes, (both - alone).max(0.0));
            }
        }
    }
    points.fill(&mut costs.set_access_peer);
    Ok(())
}

/// Calls that cost the same whatever the size.
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
    Ok(micros(&samples))
}
