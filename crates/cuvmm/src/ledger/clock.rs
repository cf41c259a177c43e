//! The time, as the ledger measures it. Unit tests can set it.

use std::time::{Duration, Instant};

pub(crate) fn now() -> Instant {
    #[cfg(test)]
    if let Some(now) = super::probe::ask(|probe| probe.now()) {
        return now;
    }
    Instant::now()
}

pub(crate) fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

pub(crate) fn sleep(duration: Duration) {
    #[cfg(test)]
    if super::probe::ask(|probe| probe.sleep(duration)).is_some() {
        return;
    }
    std::thread::sleep(duration);
}
