//! Requests to give memory back, made to tenants when memory is short.

use std::sync::Arc;
use std::time::Instant;

/// A request to give memory back, passed to a tenant's hook. See
/// [`TenantBuilder::on_pressure`](crate::pool::TenantBuilder::on_pressure) for what a hook may call.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pressure {
    /// The name of the tenant that needs memory, or of the process if another process of a
    /// [ledger](crate::ledger) needs it.
    pub wanted_by: String,
    /// The missing bytes of memory when the hook is called: whole granules, beyond free memory and
    /// memory that can be reclaimed without a hook. Giving back less helps only together with other
    /// tenants. Memory counts as given back down to the tenant's guarantee, and once the work that
    /// uses it is complete. 0 if something else is missing.
    pub bytes: u64,
    /// The number of missing mappings: extents to be unmapped.
    pub mappings: u64,
    /// The bytes of addresses that are missing.
    pub addresses: u64,
    /// `true` if the request waits, so that memory that becomes free later helps too. Otherwise
    /// only memory helps that is free when the hook returns.
    pub waits: bool,
    /// The time until which the request waits; `None` if it does not wait, or waits without a limit
    /// as a [future](super::futures) does.
    pub deadline: Option<Instant>,
}

/// A function that a tenant installs to be called when memory is short.
pub type PressureHook = Arc<dyn Fn(&Pressure) + Send + Sync>;
