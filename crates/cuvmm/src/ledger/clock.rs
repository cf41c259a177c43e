//! The time, as the ledger measures it. Unit tests can set it.

use std::time::{Duration, Instant};

pub(super) fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = super::probe::ask(|probe| probe.now()) {
        return now;
    }
    Instant::now()
}

/// Returns how long ago an instant was.
pub(super) fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

/// Makes the calling thread sleep.
pub(super) fn sleep(duration: Duration) {
    #[cfg(test)]
    if super::probe::ask(|probe| probe.sleep(duration)).is_some() {
        return;
    }
    std::thread::sleep(duration);
}
