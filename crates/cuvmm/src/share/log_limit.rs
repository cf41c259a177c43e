//! How often the same kind of thing is logged, where a peer decides how often it happens.

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// The least time between two lines.
const BETWEEN: Duration = Duration::from_secs(10);

/// Lets one line through now and then, and counts the others.
#[derive(Debug, Default)]
pub(super) struct LogLimit(Mutex<Lines>);

#[derive(Debug, Default)]
struct Lines {
    last: Option<Instant>,
    untold: u64,
}

impl LogLimit {
    /// Whether something that happens at this time is to be logged; if so, how many things were not
    /// since the last that was.
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
