//! A device's limit, what can still be allocated, and room for what is published.

use std::sync::PoisonError;

use cuvmm::Limit;

use crate::error::Error;
use crate::fork;
use crate::heaps::{self, DeviceHeap};

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
    let mut limit = of.limit.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes = bytes.min(total);
    of.pool.set_limit(Limit::Bytes(left(of, bytes)))?;
    *limit = Some(bytes);
    Ok(())
}

/// Returns the limit of a device as a fraction of its memory.
pub(crate) fn fraction(device: i32) -> Result<f64, Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let of = heaps::of(device)?;
    let limit = of.limit.lock().unwrap_or_else(PoisonError::into_inner);
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
    let is_set = of
        .limit
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .is_some();
    // By default the pool leaves memory free for libraries.
    let kept = match is_set {
        true => 0,
        false => of.device.total_memory().saturating_sub(stats.limit),
    };
    let creatable = of.device.memory_info()?.free.saturating_sub(kept);
    Ok((headroom.min(idle.saturating_add(creatable)), stats.limit))
}

/// Makes room for a publication under a device's limit: the heap gives free memory back, and its pool
/// may hold less by that. [`settle`] ends it.
///
/// # Errors
/// What is in use leaves too little. The limit of the heap's pool is as before then.
pub(crate) fn make_room(of: &DeviceHeap, bytes: u64) -> Result<(), Error> {
    of.trim()?;
    let limit = of.limit.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(limit) = *limit else {
        return Ok(());
    };
    let granule = of.device.granularity();
    let wanted = bytes.div_ceil(granule).saturating_mul(granule);
    let before = left(of, limit);
    let refused = |held| {
        Err(Error::NoRoom {
            wanted,
            limit,
            held,
            published: of.published().map_or(0, heaps::held),
            granule,
        })
    };
    let Some(after) = before.checked_sub(wanted).filter(|&it| it >= granule) else {
        return refused(of.held());
    };
    if of.pool.set_limit(Limit::Bytes(after))?.excess > 0 {
        let held = of.held();
        of.pool.set_limit(Limit::Bytes(before))?;
        return refused(held);
    }
    Ok(())
}

/// Lets the pool of a device's heap hold what is left of the limit by what is published now.
pub(crate) fn settle(of: &DeviceHeap) -> Result<(), Error> {
    if let Some(pool) = of.published() {
        pool.trim(0)?;
    }
    let limit = of.limit.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(limit) = *limit {
        of.pool.set_limit(Limit::Bytes(left(of, limit)))?;
    }
    Ok(())
}

/// Returns what publications leave of a limit, at least a granule.
fn left(of: &DeviceHeap, limit: u64) -> u64 {
    let published = of.published().map_or(0, heaps::held);
    limit.saturating_sub(published).max(of.device.granularity())
}
