//! The virtual clock, which advances by the costs of calls and not by real time.

use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct Clock {
    now: Duration,
}

impl Clock {
    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    pub(crate) fn spend(&mut self, microseconds: f64) {
        self.advance(micros(microseconds));
    }

    /// The moment is not past.
    pub(crate) fn reach(&mut self, moment: Duration) {
        self.now = self.now.max(moment);
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.now = self.now.saturating_add(by);
    }
}

/// Converts microseconds to a duration; negative and non-finite values become zero.
pub(crate) fn micros(microseconds: f64) -> Duration {
    Duration::try_from_secs_f64(microseconds / 1e6).unwrap_or_default()
}
