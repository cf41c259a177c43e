//! The time that a plan's steps are measured by.

use std::time::{Duration, Instant};

use crate::sync::thread;

/// A clock to time steps with: the wall's for a real run; for a stand-in, whatever it counts its
/// calls' costs on.
pub trait Clock {
    /// The time since some fixed moment.
    fn now(&self) -> Duration;

    /// Lets so much time pass.
    fn wait(&self, time: Duration);
}

/// Time as it passes here.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    begun: Instant,
}

impl WallClock {
    /// A clock that begins now.
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
