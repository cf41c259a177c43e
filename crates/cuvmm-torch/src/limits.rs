//! A device's limit, and what can still be allocated.

use cuvmm::Limit;

use crate::error::Error;
use crate::{fork, heaps};

/// Sets the limit of a device to a fraction of its memory, at least a granule.
pub(crate) fn set_fraction(fraction: f64, device: i32) -> Result<(), Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    if !(0.0..=1.0).contains(&fraction) {
        return Err(Error::Fraction(fraction));
    }
    let of = heaps::of(device)?;
    let (total, granule) = (of.device.total_memory(), of.device.granularity());
    let bytes = (total as f64 * fraction) as u64;
    of.pool
        .set_limit(Limit::Bytes(bytes.clamp(granule, total)))?;
    Ok(())
}

/// Returns the limit of a device as a fraction of its memory.
pub(crate) fn fraction(device: i32) -> Result<f64, Error> {
    if fork::is_child() {
        return Err(Error::Forked);
    }
    let of = heaps::of(device)?;
    Ok(of.pool.stats().limit as f64 / of.device.total_memory() as f64)
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
    let creatable = of.device.memory_info()?.free;
    Ok((headroom.min(idle.saturating_add(creatable)), stats.limit))
}
