//! A device's limit, its free memory, and room for shareable memory.

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

/// Room for shareable memory: the heap's pool may hold that much less. Dropped once the memory is
/// charged or could not be had.
pub(crate) struct Promise<'a> {
    of: &'a DeviceHeap,
    /// Released after the room.
    _turn: MutexGuard<'a, ()>,
}

impl Drop for Promise<'_> {
    fn drop(&mut self) {
        lock(self.of).promised = 0;
        // A heap that is short of memory tries again.
        let _ = settle(self.of);
    }
}

/// Makes room for shareable memory under a device's limit. If there is too little, or no limit is
/// set and `trims`, the heap gives free memory back. Waits while another thread uses its room.
///
/// # Errors
/// Memory in use leaves too little. The limit of the heap's pool is then unchanged.
pub(crate) fn make_room(of: &DeviceHeap, bytes: u64, trims: bool) -> Result<Promise<'_>, Error> {
    let turn = of.room.lock().unwrap_or_else(PoisonError::into_inner);
    let promise = Promise { of, _turn: turn };
    let granule = of.device.granularity();
    let wanted = bytes.div_ceil(granule).saturating_mul(granule);
    let promise_it = || {
        let mut shared = lock(of);
        shared.promised = of.shareable().map_or(0, heaps::held).saturating_add(wanted);
        apply(of, &shared).map(|excess| (excess, shared.set, shared.promised))
    };
    let mut promised = promise_it()?;
    if trims || promised.0 > 0 {
        of.trim()?;
        promised = promise_it()?;
    }
    let (excess, limit, promised) = promised;
    match limit {
        Some(limit) if excess > 0 || promised.saturating_add(granule) > limit => {
            Err(Error::NoRoom {
                wanted,
                limit,
                held: heaps::held(&of.pool),
                shareable: promised.saturating_sub(wanted),
                granule,
            })
        }
        _ => Ok(promise),
    }
}

/// Limits the heap's pool to the memory that shareable memory leaves of the device's limit.
pub(crate) fn settle(of: &DeviceHeap) -> Result<(), Error> {
    if let Some(pool) = of.shareable() {
        pool.trim(0)?;
    }
    apply(of, &lock(of))?;
    Ok(())
}

/// Limits the heap's pool to what shareable memory, including what is being allocated, leaves of the
/// limit, at least a granule. Returns the bytes that the pool holds beyond that.
fn apply(of: &DeviceHeap, shared: &SharedLimit) -> Result<u64, PoolError> {
    let Some(limit) = shared.set else {
        return Ok(0);
    };
    let shareable = of.shareable().map_or(0, heaps::held);
    let left = limit.saturating_sub(shareable.max(shared.promised));
    let left = left.max(of.device.granularity());
    Ok(of.pool.set_limit(Limit::Bytes(left))?.excess)
}
