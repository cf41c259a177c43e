//! A device's limit, what can still be allocated, and room for what is published.

use std::sync::{MutexGuard, PoisonError};

use cuvmm::{Limit, PoolError};

use crate::error::Error;
use crate::fork;
use crate::heaps::{self, DeviceHeap, SharedLimit};

fn lock(of: &DeviceHeap) -> MutexGuard<'_, SharedLimit> {
    of.limit.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the limit of a device to a fraction of its memory. The pool may hold at least a granule.
pub(crate) fn set_fraction(fraction: f64, device: i32) -> Result<(), Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    if !(0.0..=1.0).contains(&fraction) {
        return Err(Error::Fraction(fraction));
    }
    let of = heaps::of(device)?;
    let total = of.device.total_memory();
    let bytes = (total as f64 * fraction) as u64;
    let mut limit = lock(of);
    let before = limit.set.replace(bytes.min(total));
    let outcome = apply(of, &limit);
    if outcome.is_err() {
        limit.set = before;
    }
    outcome?;
    Ok(())
}

/// Returns the limit of a device as a fraction of its memory.
pub(crate) fn fraction(device: i32) -> Result<f64, Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let of = heaps::of(device)?;
    let limit = lock(of).set;
    let limit = limit.unwrap_or_else(|| of.pool.stats().limit);
    Ok(limit as f64 / of.device.total_memory() as f64)
}

/// Returns the bytes that can still be allocated on a device, and its limit. Other processes may
/// take the first.
pub(crate) fn info(device: i32) -> Result<(u64, u64), Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let of = heaps::of(device)?;
    let headroom = of.tenant().headroom()?.taking_back;
    let stats = of.pool.stats();
    let idle = stats.free + stats.precommitted + stats.cached + stats.pending_free;
    let is_set = lock(of).set.is_some();
    // By default the pool leaves memory free for libraries.
    let kept = match is_set {
        true => 0,
        false => of.device.total_memory().saturating_sub(stats.limit),
    };
    let creatable = of.device.memory_info()?.free.saturating_sub(kept);
    Ok((headroom.min(idle.saturating_add(creatable)), stats.limit))
}

/// Room for a publication under a device's limit: the pool of the heap may hold less by it. Dropped when
/// the memory of the publication is charged, or was not to be had.
pub(crate) struct Promise<'a> {
    of: &'a DeviceHeap,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        lock(self.of).promised = 0;
        // A heap that is short of memory asks again.
        let _ = settle(self.of);
    }
}

/// Makes room for a publication under a device's limit: the heap gives free memory back. One thread at
/// a time may do this.
///
/// # Errors
/// What is in use leaves too little. The limit of the heap's pool is as before then.
pub(crate) fn make_room(of: &DeviceHeap, bytes: u64) -> Result<Promise<'_>, Error> {
    of.trim()?;
    let promise = Promise { of };
    let mut shared = lock(of);
    let granule = of.device.granularity();
    let wanted = bytes.div_ceil(granule).saturating_mul(granule);
    let published = of.published().map_or(0, heaps::held);
    shared.promised = published.saturating_add(wanted);
    let outcome = apply(of, &shared);
    let (limit, promised) = (shared.set, shared.promised);
    drop(shared);
    let excess = outcome?;
    match limit {
        Some(limit) if excess > 0 || promised.saturating_add(granule) > limit => {
            Err(Error::NoRoom {
                wanted,
                limit,
                held: of.held(),
                published,
                granule,
            })
        }
        _ => Ok(promise),
    }
}

/// Lets the pool of a device's heap hold what is left of the limit by publications.
pub(crate) fn settle(of: &DeviceHeap) -> Result<(), Error> {
    if let Some(pool) = of.published() {
        pool.trim(0)?;
    }
    apply(of, &lock(of))?;
    Ok(())
}

/// Lets the pool of a device's heap hold what publications, with the one that is being made, leave of a
/// limit: at least a granule. Returns the bytes that it holds beyond that.
fn apply(of: &DeviceHeap, shared: &SharedLimit) -> Result<u64, PoolError> {
    let Some(limit) = shared.set else {
        return Ok(0);
    };
    let published = of.published().map_or(0, heaps::held);
    let left = limit.saturating_sub(published.max(shared.promised));
    let left = left.max(of.device.granularity());
    Ok(of.pool.set_limit(Limit::Bytes(left))?.excess)
}
