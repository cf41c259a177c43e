//! Allocation of cached memory by many threads on one pool.

use std::sync::Barrier;
use std::time::Instant;

use anyhow::anyhow;
use cuvmm::{Scrub, Stream, Tenant};

use super::commit::PAGE;
use super::pairs::alternate;
use super::report::Report;
use super::row::Row;
use super::stage::Stage;
use super::wanted::Wanted;
use cuvmm_command::watch::nanos;

pub(super) const NAME: &str = "threads_8";
pub(super) const TENANT_EACH: &str = "threads_8_tenant_each";
pub(super) const OTHER_SIZES: &str = "threads_8_other_sizes";

const THREADS: usize = 8;

const BASELINE: &str = "1 thread; time by operations of all threads; the ratio is the gain";

/// Measures threads that share a tenant, threads with a tenant each, and the latter with a size
/// that changes with each operation, so that no stream cache serves it. Every thread has its own
/// home stream.
pub(super) fn measure(stage: &Stage, wanted: &Wanted, report: &mut Report) -> anyhow::Result<()> {
    stage.room(THREADS as u64 * PAGE)?;
    let cores = std::thread::available_parallelism()?.get();
    for (name, tenants, sizes) in [
        (NAME, 1, 1),
        (TENANT_EACH, THREADS, 1),
        (OTHER_SIZES, THREADS, PAGE / 2),
    ] {
        if !wanted.has(name) {
            continue;
        }
        let pool = stage.pool(THREADS as u64 * PAGE, Scrub::default())?;
        let tenants = (0..tenants)
            .map(|number| Ok(pool.tenant(format!("tenant {number}")).register()?))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let workers = tenants
            .iter()
            .cycle()
            .take(THREADS)
            .map(|tenant| Ok((tenant.clone(), Stream::new(&stage.device)?)))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let each = (stage.times(50_000, 5_000), sizes);
        let (ours, baselines) = alternate(
            stage.times(20, 3),
            || round(&workers, each),
            || round(&workers[..1], each),
        )?;
        let row = Row::new(name, &ours, BASELINE, &baselines).turned_over();
        report.add(row.count("cores", cores as f64));
    }
    Ok(())
}

/// Returns the nanoseconds per operation (allocate and free), from the start of the first thread to
/// the end of the last.
fn round(workers: &[(Tenant, Stream)], (each, sizes): (usize, u64)) -> anyhow::Result<f64> {
    let start = Barrier::new(workers.len());
    let times = std::thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter()
            .map(|(tenant, stream)| scope.spawn(|| work(&start, (tenant, stream), each, sizes)))
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                let outcome = thread.join();
                outcome.map_err(|_| anyhow!("a thread that allocates has died"))?
            })
            .collect::<anyhow::Result<Vec<_>>>()
    })?;
    let begun = times.iter().map(|(begun, _)| *begun).min();
    let ended = times.iter().map(|(_, ended)| *ended).max();
    let took = begun.zip(ended).map(|(begun, ended)| ended - begun);
    Ok(nanos(took.unwrap_or_default()) / (workers.len() * each) as f64)
}

/// Runs one thread's operations, of `sizes` sizes in turn, and returns its begin and end.
fn work(
    start: &Barrier,
    (tenant, stream): (&Tenant, &Stream),
    each: usize,
    sizes: u64,
) -> anyhow::Result<(Instant, Instant)> {
    start.wait();
    let begun = Instant::now();
    for number in 0..each as u64 {
        let block = tenant.block(PAGE - number % sizes).home_stream(stream);
        drop(block.try_allocate()?);
    }
    Ok((begun, Instant::now()))
}
