//! Figures of a replay in real time only.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) models: Vec<String>,
    pub(crate) pid: u32,
    /// Refused requests that waited for memory of other processes.
    pub(crate) waits: u64,
    /// The time from refusal to the memory, in all and at most.
    pub(crate) waited_ms: f64,
    pub(crate) waited_max_ms: f64,
    /// Blocks that could not grow and waited a moment for memory of other processes; those that
    /// this served; and the time of these waits in all.
    pub(crate) growth_waits: u64,
    pub(crate) growth_served: u64,
    pub(crate) growth_waited_ms: f64,
    /// Blocks that could not grow; and those that could not because an older request of another
    /// process waited.
    pub(crate) growth_refused: u64,
    pub(crate) growth_refused_behind: u64,
    /// Counts for each reason: the ledger's, or `Pool`.
    pub(crate) growth_refused_why: BTreeMap<String, u64>,
    /// The count, bytes and time of memory given back because other processes lacked it.
    pub(crate) gave: u64,
    pub(crate) gave_bytes: u64,
    pub(crate) gave_ms: f64,
    /// Driver calls by kind, without those that stamp and verify.
    pub(crate) calls: BTreeMap<String, Made>,
    /// Real time for which requests waited for memory of other processes. `None` without a ledger.
    pub(crate) ledger_stalled_ms: Option<f64>,
    /// The greatest lateness of an event in real time: a busy machine does not keep the pace.
    pub(crate) late_max_ms: f64,
}

impl Process {
    /// Counts the wait of a request that has its memory now.
    pub(crate) fn waited(&mut self, since: Instant) {
        let waited = ms(since.elapsed());
        self.waited_ms += waited;
        self.waited_max_ms = self.waited_max_ms.max(waited);
    }
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Made {
    pub(crate) count: u64,
    pub(crate) ms: f64,
}

/// Converts a time to milliseconds.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
