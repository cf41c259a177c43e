//! A device's limit, its free memory, and room for publications.

use std::sync::{MutexGuard, PoisonError};

use cuvmm::{Limit, PoolError};

use crate::error::Error;
use crate::fork;
use crate::heaps::{self, DeviceHeap, SharedLimit};

fn lock(of: &DeviceHeap) -> MutexGuard<'_, SharedLimit> {
    of.limit.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the limit of a device to a fraction of its memory, at least a granule.
pub(crate) fn set_fraction(fraction: f64, device: i32) -> Result<(), Error> {
    fork::check()?;
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

pub(crate) fn fraction(device: i32) -> Result<f64, Error> {
    fork::check()?;
    let of = heaps::of(device)?;
    let limit = lock(of).set;
    let limit = limit.unwrap_or_else(|| of.pool.stats().limit);
    Ok(limit as f64 / of.device.total_memory() as f64)
}

/// Returns the bytes that can still be allocated on a device, which other processes may take first,
/// and its limit.
pub(crate) fn info(device: i32) -> Result<(u64, u64), Error> {
    fork::check()?;
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

/// Room for a publication: the heap's pool may hold that much less. Dropped once the publication's
/// memory is charged or could not be had.
pub(crate) struct Promise<'a> {
    of: &'a DeviceHeap,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        lock(self.of).promised = 0;
        // A heap that is short of memory tries again.
        let _ = settle(self.of);
    }
}

/// Makes room for a publication under a device's limit: the heap gives free memory back. Only one
/// thread at a time may call this.
///
/// # Errors
/// Memory in use leaves too little. The limit of the heap's pool is then unchanged.
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

/// Limits the heap's pool to the memory that publications leave of the device's limit.
pub(crate) fn settle(of: &DeviceHeap) -> Result<(), Error> {
    if let Some(pool) = of.published() {
        pool.trim(0)?;
    }
    apply(of, &lock(of))?;
    Ok(())
}

/// Limits the heap's pool to what publications, including the one being made, leave of the limit,
/// at least a granule. Returns the bytes that the pool holds beyond that.
fn apply(of: &DeviceHeap, shared: &SharedLimit) -> Result<u64, PoolError> {
    let Some(limit) = shared.set else {
        return Ok(0);
    };
    let published = of.published().map_or(0, heaps::held);
    let left = limit.saturating_sub(published.max(shared.promised));
    let left = left.max(of.device.granularity());
    Ok(of.pool.set_limit(Limit::Bytes(left))?.excess)
}
