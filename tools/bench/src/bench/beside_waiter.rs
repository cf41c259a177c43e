//! Leases while another thread waits for memory that the device still uses.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cuvmm::{Scrub, Stream};

use super::busy::Busy;
use super::commit::PAGE;
use super::report::Report;
use super::row::Row;
use super::samples::Samples;
use super::stage::Stage;
use cuvmm_command::watch::wall_of;

pub(super) const NAME: &str = "lease_beside_waiter";

/// Freed blocks whose fences are incomplete.
const PENDING: u64 = 512;

const BASELINE: &str = "the same while no thread waits";

/// Time that the waiter waits. The device uses the freed blocks for twice as long.
const WHILE: Duration = Duration::from_millis(200);

/// Measures a lease while another thread waits for memory and 512 freed blocks are pending, and
/// while no thread waits.
///
/// # Errors
/// Memory becomes free while it is in use.
pub(super) fn measure(stage: &Stage, report: &mut Report) -> anyhow::Result<()> {
    stage.room((PENDING + 1) * PAGE)?;
    let busy = Busy::new(stage)?;
    let pool = stage.pool((PENDING + 1) * PAGE, Scrub::Never)?;
    let tenant = pool.tenant("A").register()?;
    let other = pool.tenant("B").register()?;
    let stream = Stream::new(&stage.device)?;
    let leased = other.block(PAGE).try_allocate()?;
    let mut baselines = Samples::default();
    for _ in 0..stage.times(20_000, 500) {
        baselines.add(wall_of(|| drop(leased.lease())));
    }
    let blocks = (0..PENDING)
        .map(|_| Ok(tenant.block(PAGE).home_stream(&stream).try_allocate()?))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let calls = stage.device.calls().total();
    let ours = busy.meanwhile(&stream, 2 * WHILE, || {
        drop(blocks);
        let waits = AtomicBool::new(true);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let waited = other.block(PAGE).timeout(WHILE).allocate();
                waits.store(false, Ordering::SeqCst);
                waited.map(drop)
            });
            let mut ours = Samples::default();
            while waits.load(Ordering::SeqCst) {
                ours.add(wall_of(|| drop(leased.lease())));
            }
            let early = waiter.join().is_ok_and(|waited| waited.is_ok());
            anyhow::ensure!(!early, "the waiter got memory that is in use");
            Ok(ours)
        })
    })?;
    let calls = stage.device.calls().total() - calls;
    stage.device.synchronize()?;
    report.add(
        Row::new(NAME, &ours, BASELINE, &baselines)
            .count("pending_blocks", PENDING as f64)
            .count("driver_calls", calls as f64)
            .note(busy.said()),
    );
    Ok(())
}
