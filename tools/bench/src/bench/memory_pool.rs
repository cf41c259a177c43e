//! Memory pools of the driver within a tenant's limit, compared with pools by themselves.

use cuvmm::{MemPool, Pool, Scrub, Stream, Tenant, TenantMemPool};

use super::commit::{GIB, MIB};
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use cuvmm_command::watch::wall;

pub(super) const ALLOCATE: &str = "memory_pool_alloc_free_2MiB";
pub(super) const CURRENT: &str = "memory_pool_current_2MiB";
pub(super) const RESERVE: &str = "memory_pool_reserve";
pub(super) const EXCHANGE: &str = "memory_pool_exchange_1GiB";
pub(super) const TRIM: &str = "memory_pool_trim_1GiB";

/// Pairs per sample. A clock is too coarse for a single pair.
const BATCH: usize = 64;

const NOTE: &str = "each figure is the mean of a batch of 64";

/// A tenant with a memory pool, and a memory pool by itself.
struct World {
    // Fields in drop order.
    memory: TenantMemPool,
    _tenant: Tenant,
    _pool: Pool,
    plain: MemPool,
    stream: Stream,
}

fn world(stage: &Stage, maximum: u64) -> anyhow::Result<World> {
    let pool = stage.pool(4 * maximum, Scrub::default())?;
    let tenant = pool.tenant("tenant").register()?;
    let plain = MemPool::builder(&stage.device).maximum(maximum).create()?;
    plain.set_release_threshold(u64::MAX)?;
    Ok(World {
        memory: tenant.memory_pool(maximum).build()?,
        _tenant: tenant,
        _pool: pool,
        plain,
        stream: Stream::new(&stage.device)?,
    })
}

fn batch(mut work: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let (took, ()) = wall(|| (0..BATCH).try_for_each(|_| work()))?;
    Ok(took / BATCH as f64)
}

fn add(report: &mut Report, name: &str, (ours, theirs): &(Samples, Samples), baseline: &str) {
    report.add(Row::new(name, ours, baseline, theirs).note(NOTE));
}

pub(super) fn allocate(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(GIB)?;
    let size = 2 * MIB;
    let world = world(stage, 256 * MIB)?;
    let ours = || {
        batch(|| {
            drop(world.memory.allocate_on(&world.stream, size)?);
            Ok(())
        })
    };
    let theirs = || {
        batch(|| {
            drop(world.plain.allocate_on(&world.stream, size)?);
            Ok(())
        })
    };
    let pairs = alternate(stage.times(2_000, 20), ours, theirs)?;
    add(report, ALLOCATE, &pairs, "`MemPool::allocate_on` and drop");
    let by_library = || stage.hand.pooled(&world.stream, size, BATCH);
    let per_pair = |took: f64| took / BATCH as f64;
    let ours = || {
        let current = world.memory.make_current()?;
        by_library()?;
        let (took, ()) = wall(by_library)?;
        drop(current);
        Ok(per_pair(took))
    };
    let theirs = || {
        let current = world.plain.make_current()?;
        by_library()?;
        let (took, ()) = wall(by_library)?;
        drop(current);
        Ok(per_pair(took))
    };
    let pairs = alternate(stage.times(2_000, 20), ours, theirs)?;
    let baseline = "the same calls while a pool of the driver by itself is current";
    add(report, CURRENT, &pairs, baseline);
    world.stream.synchronize()?;
    Ok(())
}

pub(super) fn change(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(8 * GIB)?;
    let world = world(stage, GIB)?;
    let World {
        memory,
        plain,
        stream,
        ..
    } = &world;
    let times = stage.times(200, 2);
    let ours = || batch(|| Ok(memory.reserve(512 * MIB)?));
    let theirs = || {
        batch(|| {
            plain.stats()?;
            Ok(())
        })
    };
    let pairs = alternate(times, ours, theirs)?;
    let baseline = "four figures of a pool: `cuMemPoolGetAttribute`";
    add(report, RESERVE, &pairs, baseline);
    let ours = || {
        let (took, ()) = wall(|| memory.reserve(2 * GIB))?;
        memory.shrink_to(GIB)?;
        Ok(took)
    };
    let theirs = || {
        let (took, ()) = wall(|| stage.hand.memory_pool(2 * GIB))?;
        Ok(took)
    };
    let (ours, theirs) = alternate(times, ours, theirs)?;
    let baseline = "the calls for the driver's pool alone: create, set its threshold, destroy";
    report.add(Row::new(EXCHANGE, &ours, baseline, &theirs));
    let ours = || {
        drop(memory.allocate_on(stream, GIB)?);
        stream.synchronize()?;
        let (took, _) = wall(|| memory.trim())?;
        Ok(took)
    };
    let theirs = || {
        drop(plain.allocate_on(stream, GIB)?);
        stream.synchronize()?;
        let (took, ()) = wall(|| plain.trim_to(0))?;
        Ok(took)
    };
    let (ours, theirs) = alternate(times, ours, theirs)?;
    report.add(Row::new(TRIM, &ours, "`cuMemPoolTrimTo`", &theirs));
    Ok(())
}
