//! A limit on log lines about events whose rate a peer determines.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// The least time between two lines.
const BETWEEN: Duration = Duration::from_secs(10);

/// Admits one line per interval and counts the suppressed ones.
#[derive(Debug, Default)]
pub(super) struct LogLimit(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    last: Option<Instant>,
    untold: u64,
}

impl LogLimit {
    /// Returns the number of events suppressed since the last line, if an event at `now` is to be
    /// logged.
    pub(super) fn admit(&self, now: Instant) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let soon = |last| now.saturating_duration_since(last) < BETWEEN;
        if lines.last.is_some_and(soon) {
            lines.untold += 1;
            return None;
        }
        lines.last = Some(now);
        Some(std::mem::take(&mut lines.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line_now_and_then_which_counts_the_rest() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        let after = |share: u32| start + BETWEEN / 10 * share;
        let told: Vec<_> = (0..=30).map(|share| limit.admit(after(share))).collect();
        for (share, told) in told.iter().enumerate() {
            let expected = match share {
                0 => Some(0),
                10 | 20 | 30 => Some(9),
                _ => None,
            };
            assert_eq!(*told, expected, "{share}");
        }
    }
}
