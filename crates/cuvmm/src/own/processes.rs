//! Other processes that use memory, and the process that gave it.
//!
//! [`share`](crate::share) implements both: it knows the processes.

use std::fmt::Debug;

/// Processes that were given memory and may use it.
pub(crate) trait Recipients: Send + Sync + Debug {
    /// Returns `true` once no such process uses the memory, and none will.
    fn is_over(&self) -> bool;
}

/// The process that gave memory, and keeps it while this value lives.
pub(crate) trait GivingProcess: Send + Sync + Debug {
    /// Returns `false` once the process has ended or has freed the memory.
    fn keeps(&self) -> bool;
}
