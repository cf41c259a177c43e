//! The clock that times a plan's steps.

use std::time::{Duration, Instant};

use crate::sync::thread;

/// A clock that times steps: wall time for a run on a GPU; for a model driver, the clock that its
/// calls' costs advance.
pub trait Clock {
    /// Returns the time since a fixed instant.
    fn now(&self) -> Duration;

    /// Lets `time` pass.
    fn wait(&self, time: Duration);
}

/// A clock of wall time.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    begun: Instant,
}

impl WallClock {
    /// Creates a clock that starts now.
    #[must_use]
    pub fn new() -> Self {
        Self {
            begun: Instant::now(),
        }
    }
}

impl Default for WallClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for WallClock {
    fn now(&self) -> Duration {
        self.begun.elapsed()
    }

    fn wait(&self, time: Duration) {
        thread::sleep(time);
    }
}
