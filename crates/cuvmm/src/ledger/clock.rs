//! The time, as the ledger measures it. Unit tests can set it.

use std::time::{Duration, Instant};

pub(super) fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = super::probe::ask(|probe| probe.now()) {
        return now;
    }
    Instant::now()
}

pub(super) fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

pub(super) fn sleep(duration: Duration) {
    #[cfg(test)]
    if super::probe::ask(|probe| probe.sleep(duration)).is_some() {
        return;
    }
    std::thread::sleep(duration);
}
