//! Kernel launches while another thread maps memory.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;
use cuvmm::{Pool, Stream};

use super::by_hand::Hand;
use super::commit::{GIB, PAGE};
use super::kernels::Kernels;
use super::mapper::Mapped;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::{Stage, skip};
use cuvmm_command::watch::wall;

pub(super) const NAME: &str = "launch_with_mapper";
pub(super) const IDLE: &str = "launch_with_mapper_vs_idle";

const SIZE: u64 = 8 * GIB;
const ROUNDS: usize = 5;

const BY_HAND: &str = "launches while a thread makes the same mappings by hand";
const NOTHING: &str = "launches while nothing is mapped";
const NOTE: &str = "each figure is the p99 of a round";

/// The activity of another thread while kernels are launched.
#[derive(Clone, Copy)]
enum Meanwhile<'a> {
    Nothing,
    Grow(&'a Pool, &'a Stream),
    ByHand(&'a Hand, &'a [u64]),
}

/// Measures five rounds of each activity, interleaved.
///
/// # Errors
/// When a launch or a mapping fails.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let kernels = stage.kernels.as_ref().map_err(skip)?;
    stage.room(2 * SIZE)?;
    let mapped = Mapped::start(&stage.device, SIZE)?;
    let (stream, theirs) = (Stream::new(&stage.device)?, Stream::new(&stage.device)?);
    let extents = grow_once(&mapped.pool, &theirs)?;
    let launches = stage.times(50_000, 2_000);
    let mut p99s = [const { Vec::new() }; 3];
    let mut medians = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        let kinds = [
            Meanwhile::Grow(&mapped.pool, &theirs),
            Meanwhile::ByHand(&stage.hand, &extents),
            Meanwhile::Nothing,
        ];
        for (index, kind) in kinds.into_iter().enumerate() {
            let samples = round(kernels, &stream, launches, kind)?;
            p99s[index].push(samples.per_mille(990));
            medians[index].push(samples.median());
        }
    }
    mapped.stop();
    let [ours, by_hand, idle] = p99s.map(Samples::from_iter);
    let [p50, by_hand_p50, idle_p50] = medians.map(|all| Samples::from_iter(all).median());
    let row = Row::new(NAME, &ours, BY_HAND, &by_hand).note(NOTE);
    report.add(
        row.count("p50_ns", p50)
            .count("baseline_p50_ns", by_hand_p50),
    );
    let row = Row::new(IDLE, &ours, NOTHING, &idle).note(NOTE);
    report.add(row.count("p50_ns", p50).count("baseline_p50_ns", idle_p50));
    Ok(())
}

fn round(
    kernels: &Kernels,
    stream: &Stream,
    launches: usize,
    meanwhile: Meanwhile<'_>,
) -> anyhow::Result<Samples> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| until(&stop, meanwhile));
        let measured = launch(kernels, stream, launches);
        stop.store(true, Ordering::Relaxed);
        let other = other
            .join()
            .map_err(|_| anyhow!("the thread that maps has died"))?;
        other.and(measured)
    })
}

fn launch(kernels: &Kernels, stream: &Stream, launches: usize) -> anyhow::Result<Samples> {
    /// The number of launches between waits: the queue of a stream is limited, and a launch into a
    /// full queue blocks.
    const IN_QUEUE: usize = 64;
    let mut samples = Samples::with_room(launches);
    while samples.count() < launches {
        for _ in 0..IN_QUEUE {
            samples.add(wall(|| kernels.nothing(stream))?.0);
        }
        stream.synchronize()?;
    }
    Ok(samples)
}

fn until(stop: &AtomicBool, meanwhile: Meanwhile<'_>) -> anyhow::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        match meanwhile {
            Meanwhile::Nothing => return Ok(()),
            Meanwhile::Grow(pool, home) => drop(grow_once(pool, home)?),
            Meanwhile::ByHand(hand, extents) => {
                let mut range = hand.reserve(extents.iter().sum(), extents.len())?;
                extents.iter().try_for_each(|&size| range.append(size))?;
                range.give_back()?;
            }
        }
    }
    Ok(())
}

/// Grows a block to its full size, returns all memory to the driver, and returns the sizes of the
/// extents.
fn grow_once(pool: &Pool, home: &Stream) -> anyhow::Result<Vec<u64>> {
    let tenant = pool.tenant("tenant").register()?;
    let first = tenant.block(PAGE).capacity(SIZE).home_stream(home);
    let mut block = first.try_allocate()?;
    for size in (2..=SIZE / PAGE).map(|pages| pages * PAGE) {
        block.grow_to(size)?;
    }
    let extents = block.extents().iter().map(|extent| extent.size).collect();
    drop(block);
    drop(tenant);
    home.synchronize()?;
    pool.trim(0)?;
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use cuvmm::driver::model::{ModelDriver, ModelOptions};
    use cuvmm::{Device, Limit};

    use super::*;

    #[test]
    fn what_is_mapped_meanwhile_is_given_back() {
        let driver = Arc::new(ModelDriver::new(ModelOptions::new().capacity(SIZE)));
        let device = Device::open(driver.clone(), 0).unwrap();
        let home = Stream::new(&device).unwrap();
        let hand = Hand::new(driver.clone(), device.ordinal());
        let grown = {
            let pool = Pool::builder(&device).limit(Limit::Bytes(SIZE));
            let pool = pool.build().unwrap();
            let grown = grow_once(&pool, &home).unwrap();
            assert_eq!(grown.iter().sum::<u64>(), SIZE);
            run(Meanwhile::Grow(&pool, &home));
            grown
        };
        run(Meanwhile::ByHand(&hand, &grown));
        run(Meanwhile::Nothing);
        let live = driver.live();
        assert_eq!(
            (live.physicals, live.mappings, live.reservations),
            (0, 0, 0)
        );
    }

    fn run(meanwhile: Meanwhile<'_>) {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| until(&stop, meanwhile));
            std::thread::sleep(Duration::from_millis(5));
            stop.store(true, Ordering::Relaxed);
            other.join().unwrap().unwrap();
        });
    }
}
