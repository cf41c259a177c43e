//! The figures that only a replay in real time has.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A process of a replay in real time.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) models: Vec<String>,
    pub(crate) pid: u32,
    /// How often a request was refused and waited for memory of other processes.
    pub(crate) waits: u64,
    /// How long requests that waited were refused until they had their memory, in all and at most.
    pub(crate) waited_ms: f64,
    pub(crate) waited_max_ms: f64,
    /// How often a block that could not grow waited a moment for memory of other processes, how often
    /// that served it, and how long that took in all.
    pub(crate) growth_waits: u64,
    pub(crate) growth_served: u64,
    pub(crate) growth_waited_ms: f64,
    /// How often a block could not grow, and how often of these because an older request of another
    /// process waited.
    pub(crate) growth_refused: u64,
    pub(crate) growth_refused_behind: u64,
    /// How often for each reason: that of the ledger, or `Pool`.
    pub(crate) growth_refused_why: BTreeMap<String, u64>,
    /// How often, how much and for how long memory was given back because other processes lacked it.
    pub(crate) gave: u64,
    pub(crate) gave_bytes: u64,
    pub(crate) gave_ms: f64,
    /// The driver calls by kind, without those that stamp and verify.
    pub(crate) calls: BTreeMap<String, Made>,
    /// How long requests waited for memory of other processes, in real time. `None` without a ledger.
    pub(crate) ledger_stalled_ms: Option<f64>,
    /// How late the latest event was, in real time: a busy machine does not keep the pace.
    pub(crate) late_max_ms: f64,
}

/// Driver calls of a kind.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Made {
    pub(crate) count: u64,
    pub(crate) ms: f64,
}
