//! Leases and allocations of one tenant while another tenant reclaims 16 GiB from the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuvmm::{Limit, Pool, Scrub, Stream, Tenant};

use super::commit::{GIB, PAGE};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use cuvmm_command::watch::{wall, wall_of};

pub(super) const NAMES: [&str; 3] = [
    "lease_beside_take_back",
    "alloc_beside_take_back",
    "pair_beside_take_back",
];

const SIZE: u64 = 16 * GIB;

const TENANTS: u64 = 16;

/// Timeout that covers the wait for the previous tenants' fences.
const PATIENCE: Duration = Duration::from_secs(1);

const BASELINE: &str = "the same while no tenant takes memory back";

/// An operation of a tenant on a stream, which returns its time. The number counts earlier runs.
type Operation = fn(&Tenant, &Stream, u64) -> anyhow::Result<f64>;

const OPERATIONS: [Operation; 3] = [lease, allocate, pair];

/// Measures a lease, an allocation of cached memory outside of stream caches, and that allocation
/// with its free, while another thread reclaims the cached memory of 16 tenants in extents of 2
/// MiB.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room(SIZE + 4 * PAGE)?;
    let device = stage.device.with_own_counters();
    let pool = Pool::builder(&device)
        .limit(Limit::Bytes(SIZE + 2 * PAGE))
        .scrub(Scrub::Never)
        .largest_extent(PAGE)
        .build()?;
    let own = pool.tenant("own").guarantee(2 * PAGE).register()?;
    let taker = pool.tenant("taker").register()?;
    let others = (0..TENANTS)
        .map(|number| Ok(pool.tenant(format!("{number}")).register()?))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let stream = Stream::new(&device)?;
    for (name, operation) in NAMES.into_iter().zip(OPERATIONS) {
        let (mut ours, mut baselines) = (Samples::default(), Samples::default());
        for number in 0..stage.times(20_000, 200) as u64 {
            baselines.add(operation(&own, &stream, number)?);
        }
        let mut number = 0;
        for _ in 0..stage.times(3, 1) {
            for tenant in &others {
                drop(tenant.allocate_on(&stream, SIZE / TENANTS)?);
            }
            stream.synchronize()?;
            let takes = AtomicBool::new(true);
            let wanted = taker.block(SIZE).home_stream(&stream).timeout(PATIENCE);
            let taken = std::thread::scope(|scope| {
                let taking = scope.spawn(|| {
                    let taken = wanted.allocate();
                    takes.store(false, Ordering::SeqCst);
                    taken
                });
                while takes.load(Ordering::SeqCst) {
                    number += 1;
                    ours.add(operation(&own, &stream, number)?);
                }
                let taken = taking.join();
                Ok::<_, anyhow::Error>(taken.map_err(|_| anyhow::anyhow!("the taker panicked"))??)
            })?;
            drop(taken);
            stream.synchronize()?;
        }
        let row = Row::new(name, &ours, BASELINE, &baselines);
        report.add(row.count("p999_ns", ours.per_mille(999)));
    }
    Ok(())
}

fn lease(tenant: &Tenant, stream: &Stream, _: u64) -> anyhow::Result<f64> {
    let block = tenant.allocate_on(stream, PAGE)?;
    Ok(wall_of(|| drop(block.lease())))
}

/// Times an allocation of memory that is cached in the pool and in no stream cache.
fn allocate(tenant: &Tenant, stream: &Stream, _: u64) -> anyhow::Result<f64> {
    drop(tenant.allocate_on(stream, PAGE)?);
    // Empties the stream caches into the pool.
    let _ = tenant.stats();
    let (took, block) = wall(|| anyhow::Ok(tenant.allocate_on(stream, PAGE)?))?;
    drop(block);
    Ok(took)
}

/// Times an allocation and a free of another size than before, which no stream cache holds.
fn pair(tenant: &Tenant, stream: &Stream, number: u64) -> anyhow::Result<f64> {
    let size = PAGE - number % (PAGE / 2);
    let (took, ()) = wall(|| {
        drop(tenant.allocate_on(stream, size)?);
        anyhow::Ok(())
    })?;
    Ok(took)
}
