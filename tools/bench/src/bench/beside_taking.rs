//! Leases and allocations of one tenant while another tenant reclaims 16 GiB from all the others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuvmm::{Limit, Pool, Scrub, Stream, Tenant};

use super::commit::{GIB, PAGE};
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use cuvmm_cli::watch::wall;

pub(super) const LEASE: &str = "lease_beside_take_back";
pub(super) const ALLOCATE: &str = "alloc_beside_take_back";

const SIZE: u64 = 16 * GIB;

/// The number of tenants whose memory is reclaimed.
const TENANTS: u64 = 16;

/// Timeout that covers the wait for the previous tenants' fences.
const PATIENCE: Duration = Duration::from_secs(1);

const BASELINE: &str = "the same while no tenant takes memory back";

/// Measures taking and ending a lease, and allocating cached memory that no stream cache holds,
/// while another thread reclaims the cached memory of 16 tenants in extents of 2 MiB.
///
/// # Errors
/// When an operation fails.
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
    let (mut leases, mut allocations) = (Samples::default(), Samples::default());
    let (mut lease_baselines, mut allocation_baselines) = (Samples::default(), Samples::default());
    for _ in 0..stage.times(20_000, 200) {
        lease_baselines.add(lease(&own, &stream)?);
        allocation_baselines.add(allocate(&own, &stream)?);
    }
    for turn in 0..stage.times(6, 2) {
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
                if turn % 2 == 0 {
                    leases.add(lease(&own, &stream)?);
                } else {
                    allocations.add(allocate(&own, &stream)?);
                }
            }
            let taken = taking.join();
            Ok::<_, anyhow::Error>(taken.map_err(|_| anyhow::anyhow!("the taker panicked"))??)
        })?;
        drop(taken);
        stream.synchronize()?;
    }
    for (name, ours, baselines) in [
        (LEASE, &leases, &lease_baselines),
        (ALLOCATE, &allocations, &allocation_baselines),
    ] {
        report.add(Row::new(name, ours, BASELINE, baselines).count("p999_ns", ours.per_mille(999)));
    }
    Ok(())
}

/// Takes a lease on a block and ends it, and returns the time.
fn lease(tenant: &Tenant, stream: &Stream) -> anyhow::Result<f64> {
    let block = tenant.allocate_on(stream, PAGE)?;
    let (took, ()) = wall(|| {
        drop(block.lease());
        anyhow::Ok(())
    })?;
    Ok(took)
}

/// Allocates a block from memory that is cached in the pool and in no stream cache, and returns the
/// time.
fn allocate(tenant: &Tenant, stream: &Stream) -> anyhow::Result<f64> {
    drop(tenant.allocate_on(stream, PAGE)?);
    // Empties the stream caches into the pool.
    let _ = tenant.stats();
    let (took, block) = wall(|| anyhow::Ok(tenant.allocate_on(stream, PAGE)?))?;
    drop(block);
    Ok(took)
}
