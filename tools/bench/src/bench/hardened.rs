//! The cost of a hardened pool: operations in it, compared with a plain pool.

use std::time::Duration;

use cuvmm::{Hardened, Limit, Pool, Stream, Tenant};

use super::commit::{GIB, MIB, PAGE};
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;
use cuvmm_command::watch::wall;

/// The sizes, with the labels used in row names.
pub(super) const SIZES: [(&str, u64); 2] = [("2MiB", 2 * MIB), ("128MiB", 128 * MIB)];

pub(super) const GROWTH: &str = "hardened_grow_1GiB";

/// Allocate/free pairs in one sample.
const BATCH: usize = 16;

/// Blocks that fit in the pool. A freed block cannot be reused before its fill is complete.
const ROOM: u64 = 8;

/// Timeout for an allocation that has to wait for a fill.
const PATIENCE: Duration = Duration::from_secs(1);

const BASELINE: &str = "the same in a plain pool";

const NOTE: &str = "each figure is the mean of a batch of 16";

pub(super) fn name(size: &str) -> String {
    format!("hardened_alloc_free_{size}")
}

/// One of the two pools, with its tenant and stream.
struct Side {
    pool: Pool,
    tenant: Tenant,
    stream: Stream,
}

impl Side {
    fn new(stage: &Stage, limit: u64, hardened: bool) -> anyhow::Result<Self> {
        let device = stage.device.with_own_counters();
        let mut builder = Pool::builder(&device).limit(Limit::Bytes(limit));
        if hardened {
            builder = builder.hardened(Hardened::new());
        }
        let pool = builder.build()?;
        Ok(Self {
            tenant: pool.tenant("tenant").register()?,
            // Opened on the same device handle, so that the stream's driver calls are counted too.
            stream: Stream::new(&device)?,
            pool,
        })
    }

    fn both(stage: &Stage, limit: u64) -> anyhow::Result<[Self; 2]> {
        Ok([
            Self::new(stage, limit, true)?,
            Self::new(stage, limit, false)?,
        ])
    }

    /// Allocates and frees a batch, and returns the time of one pair in nanoseconds.
    fn pairs(&self, size: u64) -> anyhow::Result<f64> {
        let (took, ()) = wall(|| {
            for _ in 0..BATCH {
                let block = self.tenant.block(size).home_stream(&self.stream);
                drop(block.timeout(PATIENCE).allocate()?);
            }
            anyhow::Ok(())
        })?;
        Ok(took / BATCH as f64)
    }

    /// Grows a block from one page to 1 GiB in an empty pool, and returns the time.
    fn growth(&self) -> anyhow::Result<f64> {
        self.stream.synchronize()?;
        self.pool.trim(0)?;
        let (took, block) = wall(|| {
            let first = self.tenant.block(PAGE).capacity(GIB);
            let mut block = first.home_stream(&self.stream).try_allocate()?;
            for size in (2..=GIB / PAGE).map(|pages| pages * PAGE) {
                block.try_grow_to(size)?;
            }
            anyhow::Ok(block)
        })?;
        drop(block);
        Ok(took)
    }

    fn calls(&self) -> u64 {
        self.pool.calls().total()
    }
}

/// Measures allocating and freeing blocks of one size.
///
/// # Errors
/// When a side fails.
pub(super) fn pairs(
    stage: &Stage,
    report: &mut Report,
    (word, size): (&str, u64),
) -> anyhow::Result<()> {
    stage.room(2 * ROOM * size)?;
    stage.room_to_write(ROOM * size)?;
    let [hardened, plain] = Side::both(stage, ROOM * size)?;
    // Create the pool's memory before measuring: as many physicals as are in use at one time.
    hardened.pairs(size)?;
    let before = hardened.calls();
    let times = stage.times(500, 3);
    let (ours, baselines) = alternate(times, || hardened.pairs(size), || plain.pairs(size))?;
    let pairs = (times + 1) * BATCH;
    let calls = (hardened.calls() - before) as f64 / pairs as f64;
    let row = Row::new(name(word), &ours, BASELINE, &baselines).count("driver_calls_a_pair", calls);
    report.add(row.note(NOTE));
    Ok(())
}

/// Measures a block that grows in steps of 2 MiB.
///
/// # Errors
/// When a side fails.
pub(super) fn growth(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(2 * GIB)?;
    stage.room_to_write(GIB)?;
    let [hardened, plain] = Side::both(stage, GIB)?;
    let times = stage.times(20, 2);
    let before = [hardened.calls(), plain.calls()];
    let (ours, baselines) = alternate(times, || hardened.growth(), || plain.growth())?;
    let each = |side: &Side, before| (side.calls() - before) as f64 / (times + 1) as f64;
    let row = Row::new(GROWTH, &ours, BASELINE, &baselines)
        .count("driver_calls", each(&hardened, before[0]))
        .count("driver_calls_of_the_plain_pool", each(&plain, before[1]));
    report.add(row);
    Ok(())
}
