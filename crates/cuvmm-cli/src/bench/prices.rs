//! What each driver call costs, by size: the table that the model driver reads.

use std::fmt::Write as _;

use cuvmm::Stream;
use cuvmm::driver::DriverError;
use cuvmm::driver::model::{Costs, Curve};

use super::calls::{Calls, Event, peer_of};
use super::commit::MIB;
use super::samples::Samples;
use super::stage::Stage;

/// Sizes in MiB.
const SIZES: [u64; 9] = [2, 8, 32, 128, 512, 1_024, 2_048, 8_192, 32_768];

/// Copies to the host, in bytes.
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

    /// What it shows, or what was known before if nothing was measured.
    fn curve(&self, known: Curve) -> Curve {
        if self.0.is_empty() {
            return known;
        }
        let point =
            |(bytes, samples): &(u64, Samples)| (*bytes as f64 / MIB as f64, micros(samples));
        let points: Vec<_> = self.0.iter().map(point).collect();
        Curve::new(&points)
    }
}

fn micros(samples: &Samples) -> f64 {
    // A tenth of a nanosecond is more than any clock here tells.
    (samples.median() * 10.0).round() / 10_000.0
}

/// Measures all calls and says in words where it was done.
///
/// # Errors
/// When a call fails.
pub(super) fn measure(stage: &Stage, about: &str) -> anyhow::Result<String> {
    let mut costs = Costs::default();
    by_size(stage, &mut costs)?;
    peer(stage, &mut costs)?;
    flat(stage, &mut costs)?;
    let mut text = format!(
        "# What driver calls cost, in microseconds; by size as MiB:microseconds.\n\
         # {about}\n\
         # Written by `cuvmm bench --save-costs`, read by `--costs`. warm_for_us is not measured.\n"
    );
    if peer_of(&stage.hand).is_none() {
        text.push_str("# There was no second device: set_access_peer is not measured.\n");
    }
    write!(text, "{costs}")?;
    Ok(text)
}

fn by_size(stage: &Stage, costs: &mut Costs) -> anyhow::Result<()> {
    let room = stage.memory();
    // Large ones are rare, and four of them have to be there at one time.
    let sizes: Vec<u64> = SIZES
        .iter()
        .map(|mib| mib * MIB)
        .filter(|&bytes| bytes == SIZES[0] * MIB || bytes <= room / 4)
        .collect();
    let time = |act: &mut dyn FnMut() -> Result<(), DriverError>| {
        stage.watch.time(act).map(|(took, ())| took)
    };
    let mut points: [Points; 9] = Default::default();
    let [
        reserve,
        create_warm,
        map,
        set_access,
        unmap,
        release,
        address_free,
        alloc,
        free,
    ] = &mut points;
    for &bytes in &sizes {
        for turn in 0..=stage.times(21, 3) {
            let mut calls = Calls::new(&stage.hand, bytes);
            let reserved = time(&mut || calls.reserve())?;
            let created = time(&mut || calls.create())?;
            let mapped = time(&mut || calls.map())?;
            let opened = time(&mut || calls.set_access())?;
            let unmapped = time(&mut || calls.unmap())?;
            let released = time(&mut || calls.release())?;
            let freed = time(&mut || calls.free_addresses())?;
            let (allocated, plain) = stage.watch.time(|| stage.hand.plain(bytes))?;
            let given_back = time_once(stage, || plain.free())?;
            if turn == 0 {
                continue;
            }
            reserve.add(bytes, reserved);
            create_warm.add(bytes, created);
            map.add(bytes, mapped);
            set_access.add(bytes, opened);
            unmap.add(bytes, unmapped);
            release.add(bytes, released);
            address_free.add(bytes, freed);
            alloc.add(bytes, allocated);
            free.add(bytes, given_back);
        }
    }
    let mut create_cold = Points::default();
    for _ in 0..stage.times(15, 2) {
        stage.settle()?;
        let mut kept = Vec::new();
        let mut together = 0;
        for &bytes in &sizes {
            together += bytes;
            if together > room {
                break;
            }
            let (took, bare) = stage.watch.time(|| stage.hand.create(bytes))?;
            create_cold.add(bytes, took);
            kept.push(bare);
        }
        for bare in kept {
            bare.release()?;
        }
    }
    let fill = |curve: &mut Curve, points: &Points| *curve = points.curve(curve.clone());
    fill(&mut costs.reserve, reserve);
    fill(&mut costs.create_warm, create_warm);
    fill(&mut costs.create_cold, &create_cold);
    fill(&mut costs.map, map);
    fill(&mut costs.set_access, set_access);
    fill(&mut costs.unmap, unmap);
    fill(&mut costs.release, release);
    fill(&mut costs.address_free, address_free);
    fill(&mut costs.alloc, alloc);
    fill(&mut costs.free, free);

    let mut copies = Points::default();
    for bytes in COPIES.into_iter().filter(|&bytes| bytes <= room / 4) {
        let plain = stage.hand.plain(bytes)?;
        let mut buffer = vec![1; usize::try_from(bytes)?];
        for turn in 0..=stage.times(9, 2) {
            let took = time(&mut || plain.read(&mut buffer))?;
            if turn > 0 {
                copies.add(bytes, took);
            }
        }
        plain.free()?;
    }
    fill(&mut costs.host_copy, &copies);
    Ok(())
}

fn time_once(
    stage: &Stage,
    act: impl FnOnce() -> Result<(), DriverError>,
) -> Result<f64, DriverError> {
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
            let alone = time_once(stage, || calls.set_access())?;
            calls.unmap()?;
            calls.map()?;
            let both = time_once(stage, || calls.set_access_with(peer))?;
            if turn > 0 {
                points.add(bytes, (both - alone).max(0.0));
            }
        }
    }
    costs.set_access_peer = points.curve(costs.set_access_peer.clone());
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
