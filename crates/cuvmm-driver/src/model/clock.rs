//! Time that passes by what calls cost, not by what they take here.

use std::time::Duration;

/// A clock that stands still unless something is spent.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    now: Duration,
}

impl Clock {
    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    /// Spends microseconds.
    pub(crate) fn spend(&mut self, microseconds: f64) {
        self.advance(micros(microseconds));
    }

    /// Lets time pass until a moment, unless that is past.
    pub(crate) fn reach(&mut self, moment: Duration) {
        self.now = self.now.max(moment);
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.now = self.now.saturating_add(by);
    }
}

/// Microseconds as a duration; what is not a time is nothing.
pub(crate) fn micros(microseconds: f64) -> Duration {
    Duration::try_from_secs_f64(microseconds / 1e6).unwrap_or_default()
}
