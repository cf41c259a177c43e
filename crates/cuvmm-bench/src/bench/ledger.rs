//! The budget that processes share: a charge, and memory that another process has idle.
//!
//! Both members of the ledger are in this process, each with a slot, a thread and a pool of its own.

use std::hint::black_box;
use std::time::Duration;

use anyhow::ensure;
use cuvmm::{Ledger, Limit, Pool, Stream};

use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;

pub(super) const CHARGE: &str = "ledger_charge";
pub(super) const TAKE: &str = "ledger_take_idle_1GiB";

/// How often a charge is made for one sample.
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
///
/// # Errors
/// When a side fails.
pub(super) fn charge(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    let dir = directory()?;
    let ledger = open(stage, &dir, GIB)?;
    let granule = stage.device.granularity();
    let ours = || {
        let (took, ()) = stage.watch.time(|| {
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
        let (took, ()) = stage.watch.time(|| {
            for _ in 0..ROUNDS {
                black_box(std::fs::symlink_metadata(path)?);
            }
            anyhow::Ok(())
        })?;
        Ok(took / f64::from(ROUNDS))
    };
    let (ours, baselines) = alternate(stage.times(30, 2), ours, by_hand)?;
    let baseline = "one lstat of the ledger's path, which each charge makes too";
    report.add(Row::new(CHARGE, &ours, baseline, &baselines));
    Ok(())
}

/// Measures an allocation of 1 GiB out of memory that another process has cached, from the request
/// to the block.
///
/// # Errors
/// When a side fails, or the memory was not the other process's.
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
