//! The figures that only a replay in real time has.

use serde::{Deserialize, Serialize};

/// A process of a replay in real time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) models: Vec<String>,
    pub(crate) pid: u32,
    /// How often a request was refused and waited for memory of other processes.
    pub(crate) waits: u64,
    /// How often a block could not grow, and how often of these because an older request of another
    /// process waited.
    pub(crate) growth_refused: u64,
    pub(crate) growth_refused_behind: u64,
    /// How long requests waited for memory of other processes, in real time. `None` without a ledger.
    pub(crate) ledger_stalled_ms: Option<f64>,
    /// How late the latest event was, in real time: a busy machine does not keep the pace.
    pub(crate) late_max_ms: f64,
}
