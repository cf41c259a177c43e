//! What a tenant is asked when memory is short.

use std::sync::Arc;
use std::time::Instant;

/// A request to give memory back, made to a tenant under pressure.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pressure {
    /// The tenant that needs memory.
    pub wanted_by: String,
    /// Bytes of memory that are missing when the hook is called: whole granules, beyond what is
    /// free and what can be taken back without a hook. Giving back less helps only together with
    /// other tenants; memory counts as far as the tenant then holds its guarantee, and once the
    /// work that uses it has passed. 0 where something else is missing.
    pub bytes: u64,
    /// Mappings that are missing: extents to be unmapped.
    pub mappings: u64,
    /// Bytes of addresses that are missing.
    pub addresses: u64,
    /// Until when giving back helps; `None` when the one who asks will not wait.
    pub deadline: Option<Instant>,
}

/// What a tenant installs to be asked for memory.
pub type PressureHook = Arc<dyn Fn(&Pressure) + Send + Sync>;
