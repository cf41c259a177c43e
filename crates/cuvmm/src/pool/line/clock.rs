//! The time, as requests that wait measure it: when hooks are called again. Unit tests can stop it and
//! let it pass.
//!
//! Keeps I-127.

use std::time::Instant;

use crate::wanted::HOOKS_AGAIN;

#[derive(Debug, Default)]
pub(super) struct Clock {
    /// The time at which a test has stopped the clock.
    #[cfg(test)]
    stopped: Option<Instant>,
}

impl Clock {
    pub(super) fn now(&self) -> Instant {
        #[cfg(test)]
        if let Some(now) = self.stopped {
            return now;
        }
        Instant::now()
    }

    /// Returns `true` if hooks that were called at a time are called again by now.
    pub(super) fn is_time_again(&self, called: Instant) -> bool {
        self.now().saturating_duration_since(called) >= HOOKS_AGAIN
    }

    /// Lets a time pass. Between two calls the clock stands still.
    #[cfg(test)]
    pub(super) fn pass(&mut self, time: std::time::Duration) {
        self.stopped = Some(self.now() + time);
    }
}
