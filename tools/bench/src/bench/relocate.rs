//! Moving memory between device and host at unchanged addresses, compared with a plain copy.

use anyhow::ensure;
use cuvmm::driver::DeviceAttribute;
use cuvmm::{HostExtents, Place, Region, Stream};

use super::commit::{GIB, MIB};
use super::pinned::Pinned;
use super::queue::{FILLED, Memory, waited};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::{Stage, skip};
use super::wanted::Wanted;

pub(super) const TO_HOST: &str = "relocate_1GiB_to_host";
pub(super) const TO_DEVICE: &str = "relocate_1GiB_to_device";

const EXTENT: u64 = 64 * MIB;

const DOWN: &str =
    "cuMemcpyDtoHAsync of as much into pinned memory that was there before, waited for";
const UP: &str = "cuMemcpyHtoDAsync of as much out of pinned memory, waited for";
const READY: &str = "the host memory lies ready, and devices alone are let in";
const NEW: &str = "the device memory is new each time";

/// Measures moving a region to the host and back.
///
/// # Errors
/// Bytes were changed.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    let size = stage.written(GIB);
    // While the region moves, its memory exists twice.
    stage.room(3 * size)?;
    stage.room_to_write(4 * size)?;
    let node = nearest_node(stage)?;
    let (host, device) = (Place::HostNuma(node), Place::from(&stage.device));
    let stream = Stream::new(&stage.device)?;
    let ready = HostExtents::new(&stage.device, node, size);
    ready
        .prepare(EXTENT, size / EXTENT)
        .map_err(|error| skip(format!("the driver gives no host memory to map: {error}")))?;
    let mut region = Region::builder(&stage.device, size)
        .largest_extent(EXTENT)
        .host_extents(&ready)
        .reserve()?;
    region.commit(0..size)?;
    region.fill(&stream, 0..size, FILLED)?;
    stream.synchronize()?;
    let relocate = |region: &mut Region, place: &Place| {
        let (took, moved) = stage
            .watch
            .time(|| region.relocate(0..size, place, &stream))?;
        ensure!(moved == size, "{moved} bytes were moved");
        anyhow::Ok(took)
    };
    let hand = &stage.hand;
    let there = hand.commit(&[size])?;
    let mut pinned = Pinned::new(hand, usize::try_from(size)?)?;
    let memory = Memory::from(&there);
    let mut sides: [(Samples, Samples); 2] = Default::default();
    for turn in 0..=stage.times(10, 1) {
        let down = relocate(&mut region, &host)?;
        let download = stage.time(|| {
            waited(hand, &stream, |queue| {
                queue.download(pinned.bytes_mut(), memory)
            })
        })?;
        let up = relocate(&mut region, &device)?;
        let upload =
            stage.time(|| waited(hand, &stream, |queue| queue.upload(memory, pinned.bytes())))?;
        if turn > 0 {
            for ((ours, baselines), took) in sides.iter_mut().zip([(down, download), (up, upload)])
            {
                ours.add(took.0);
                baselines.add(took.1);
            }
        }
    }
    // Also measures moves after each of which the host's processors get access to the region.
    let (mut access, mut back) = (Samples::default(), Samples::default());
    for _ in 0..stage.times(5, 1) {
        relocate(&mut region, &host)?;
        access.add(stage.watch.time(|| region.host_pointer(0..size))?.0);
        back.add(relocate(&mut region, &device)?);
    }
    let mut seen = [0; 4096];
    region.read(&stream, size - seen.len() as u64, &mut seen)?;
    ensure!(
        !stage.keeps_bytes() || seen == [FILLED; 4096],
        "bytes were lost on the way"
    );
    let rows = [(TO_HOST, DOWN, READY), (TO_DEVICE, UP, NEW)];
    for ((name, baseline, note), (ours, baselines)) in rows.into_iter().zip(&sides) {
        if wanted.has(name) {
            let row = Row::new(name, ours, baseline, baselines).note(note);
            let row = row.count("extents", (size / EXTENT) as f64);
            let row = match name {
                TO_HOST => row.count("host_access_p50_ns", access.median()),
                _ => row.count("after_host_access_p50_ns", back.median()),
            };
            report.add(stage.moved(row, size));
        }
    }
    Ok(())
}

fn nearest_node(stage: &Stage) -> anyhow::Result<i32> {
    let ask = |attribute| {
        let (driver, device) = (stage.hand.driver(), stage.hand.device());
        driver.device_attribute(device, attribute)
    };
    if ask(DeviceAttribute::HOST_NUMA_VMM)? == 0 {
        return Err(skip("the device maps no host memory"));
    }
    // The driver reports -1 on a host without NUMA.
    Ok(ask(DeviceAttribute::HOST_NUMA_ID)?.max(0))
}
