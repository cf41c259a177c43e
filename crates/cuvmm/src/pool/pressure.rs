//! What a tenant is asked when memory is short.

use std::sync::Arc;
use std::time::Instant;

/// A request to give memory back, made to a tenant under pressure.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pressure {
    /// The tenant that needs memory.
    pub wanted_by: String,
    /// How much it lacks, in bytes.
    pub bytes: u64,
    /// Until when giving back helps; `None` when the one who asks will not wait.
    pub deadline: Option<Instant>,
}

/// What a tenant installs to be asked for memory.
pub type PressureHook = Arc<dyn Fn(&Pressure) + Send + Sync>;
