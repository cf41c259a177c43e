//! The budget that processes share: a charge, idle memory of another process, and a waiting
//! request.
//!
//! All members of the ledger are in this process, each with a slot, a thread and a pool of its own.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use cuvmm::error::BlockError;
use cuvmm::{Ledger, Limit, Pool, Stream};

use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;

pub(super) const CHARGE: &str = "ledger_charge";
pub(super) const TAKE: &str = "ledger_take_idle_1GiB";

pub(super) const WAIT: &str = "ledger_wait_8";

/// The members of a ledger in which a request waits.
const MEMBERS: usize = 8;

/// The wait of a request for one sample.
const WAITS: Duration = Duration::from_millis(200);

/// The interval of a member's looks at the ledger while a request waits.
const LOOKS: Duration = Duration::from_millis(5);

/// Charges per sample.
const ROUNDS: u32 = 1000;

/// The extents that are taken from the other process.
const EXTENT: u64 = 128 * MIB;

const PATIENCE: Duration = Duration::from_secs(10);

fn open(stage: &Stage, dir: &tempfile::TempDir, limit: u64) -> anyhow::Result<Ledger> {
    let ledger = Ledger::builder(&stage.device, dir.path());
    Ok(ledger.limit(limit).name("bench").open()?)
}

/// Returns a directory on a file system that the ledger accepts.
fn directory() -> std::io::Result<tempfile::TempDir> {
    match std::path::Path::new("/dev/shm") {
        memory if memory.is_dir() => tempfile::tempdir_in(memory),
        _ => tempfile::tempdir(),
    }
}

/// Measures one charge and its refund, over 128 slots.
pub(super) fn charge(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let dir = directory()?;
    let ledger = open(stage, &dir, GIB)?;
    let granule = stage.device.granularity();
    let ours = || {
        let took = stage.time(|| {
            for _ in 0..ROUNDS {
                ledger.set_guarantee(granule)?;
                ledger.set_guarantee(0)?;
            }
            anyhow::Ok(())
        })?;
        Ok(took / f64::from(ROUNDS))
    };
    let path = ledger.path();
    let by_hand = || {
        let took = stage.time(|| {
            for _ in 0..ROUNDS {
                black_box(std::fs::symlink_metadata(path)?);
            }
            anyhow::Ok(())
        })?;
        Ok(took / f64::from(ROUNDS))
    };
    let (ours, baselines) = alternate(stage.times(30, 2), ours, by_hand)?;
    let baseline =
        "one lstat of the ledger's path, which a charge spares by an fstat of the open file";
    report.add(Row::new(CHARGE, &ours, baseline, &baselines));
    Ok(())
}

/// Measures an allocation of 1 GiB out of another process's cached memory, from the request to the
/// block.
///
/// # Errors
/// The memory was not the other process's.
pub(super) fn take(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    let dir = directory()?;
    let ledgers = [open(stage, &dir, GIB)?, open(stage, &dir, GIB)?];
    let pool = |ledger| {
        let pool = Pool::builder(&stage.device).limit(Limit::Bytes(GIB));
        pool.largest_extent(EXTENT).ledger(ledger).build()
    };
    let pools = [pool(&ledgers[0])?, pool(&ledgers[1])?];
    let tenants = [
        pools[0].tenant("A").register()?,
        pools[1].tenant("B").register()?,
    ];
    let stream = Stream::new(&stage.device)?;
    let mut turn = [0, 1].into_iter().cycle();
    let allocate = |which: usize| {
        let block = tenants[which].block(GIB).home_stream(&stream);
        block.timeout(PATIENCE).allocate()
    };
    drop(allocate(1)?);
    let ours = || {
        stream.synchronize()?;
        let which = turn.next().unwrap_or_default();
        let (took, block) = stage.watch.time(|| allocate(which))?;
        ensure!(pools[1 - which].stats().committed == 0, "it was not taken");
        drop(block);
        Ok(took)
    };
    let extents = vec![EXTENT; 8];
    let by_hand = || {
        let mut from = stage.hand.commit(&extents)?;
        let (took, to) = stage.watch.time(|| {
            from.unmap()?;
            from.release()?;
            stage.hand.commit(&extents)
        })?;
        from.give_back()?;
        to.give_back()?;
        Ok(took)
    };
    let (ours, baselines) = alternate(stage.times(200, 2), ours, by_hand)?;
    let baseline = "as many extents: unmap, release, reserve, create, map, set_access";
    report.add(Row::new(TAKE, &ours, baseline, &baselines));
    Ok(())
}

/// Measures the processor time of eight members in a second in which one member's request waits for
/// memory that another member uses.
///
/// # Errors
/// The request does not wait, or the system does not report processor times.
pub(super) fn wait(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let size = 64 * MIB;
    stage.room(2 * size)?;
    let dir = directory()?;
    let ledgers = (0..MEMBERS).map(|_| open(stage, &dir, size));
    let ledgers: Vec<Ledger> = ledgers.collect::<Result<_, _>>()?;
    let pools = ledgers.iter().map(|ledger| {
        let pool = Pool::builder(&stage.device).limit(Limit::Bytes(size));
        pool.ledger(ledger).build()
    });
    let pools: Vec<Pool> = pools.collect::<Result<_, _>>()?;
    let tenants = pools.iter().map(|pool| pool.tenant("A").register());
    let tenants: Vec<_> = tenants.collect::<Result<_, _>>()?;
    let count = stage.times(25, 2);
    let patience = WAITS * u32::try_from(count + 2)?;
    let block = tenants[0].allocate(size)?;
    let ours = std::thread::scope(|scope| {
        let waits = || tenants[1].block(size).timeout(patience).allocate();
        let waiting = scope.spawn(waits);
        let ours = processor_times(count)?;
        let refused = waiting.join().ok().and_then(Result::err);
        let is_short = refused.as_ref().is_some_and(BlockError::is_out_of_memory);
        ensure!(is_short, "the request did not wait");
        anyhow::Ok(ours)
    })?;
    drop(block);
    let ends = AtomicBool::new(false);
    let baselines = std::thread::scope(|scope| {
        for _ in 0..MEMBERS {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    std::thread::sleep(LOOKS);
                }
            });
        }
        let times = processor_times(count);
        ends.store(true, Ordering::Relaxed);
        times
    })?;
    let baseline = "eight threads that each wake every 5 ms and do nothing";
    let row = Row::new(WAIT, &ours, baseline, &baselines);
    report.add(row.note("processor time of all members in a second"));
    Ok(())
}

fn processor_times(count: usize) -> anyhow::Result<Samples> {
    let mut samples = Samples::with_room(count);
    // New threads take longer for a moment.
    std::thread::sleep(WAITS);
    for _ in 0..count {
        let (began, before) = (Instant::now(), processor_time(None)?);
        std::thread::sleep(WAITS);
        let used = processor_time(None)? - before;
        samples.add(used / began.elapsed().as_secs_f64());
    }
    Ok(samples)
}

/// Returns the nanoseconds of processor time that threads of this process have used: all threads, or
/// those of a name.
///
/// # Errors
/// There is no such thread, or the system does not report the time.
pub(super) fn processor_time(name: Option<&str>) -> anyhow::Result<f64> {
    let mut times = Vec::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        if let Some(name) = name {
            // Other threads may end meanwhile.
            let comm = std::fs::read_to_string(task.join("comm"));
            if !comm.is_ok_and(|comm| comm.trim() == name) {
                continue;
            }
        }
        let told = std::fs::read_to_string(task.join("schedstat"))?;
        let nanos = told.split_whitespace().next();
        times.push(nanos.context("no time in schedstat")?.parse::<f64>()?);
    }
    ensure!(!times.is_empty(), "there is no thread {name:?}");
    Ok(times.iter().sum())
}
