//! The recent charge of a process, as a row of bars.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The time that one bar covers, and the most bars.
const BAR: Duration = Duration::from_secs(10);
const BARS: usize = 30;

/// Bars from the lowest on. A charge of 0 is a space.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The greatest charge of a process in each of the last intervals, the newest last.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// The time at which the newest bar begins.
    since: Instant,
    /// `None` for an interval without a look.
    bars: VecDeque<Option<u64>>,
}

impl History {
    pub(super) fn new(since: Instant) -> Self {
        Self {
            since,
            bars: VecDeque::from([None]),
        }
    }

    pub(super) fn note(&mut self, at: Instant, charged: u64) {
        let passed = at.saturating_duration_since(self.since).as_secs() / BAR.as_secs();
        // More bars than are kept would all be empty.
        let new = u32::try_from(passed).unwrap_or(u32::MAX);
        self.since += BAR.saturating_mul(new);
        for _ in 0..passed.min(BARS as u64) {
            self.bars.push_back(None);
        }
        while self.bars.len() > BARS {
            self.bars.pop_front();
        }
        if let Some(newest) = self.bars.back_mut() {
            *newest = Some(newest.unwrap_or_default().max(charged));
        }
    }

    /// Returns the bars as text, or `None` while there is only one. A full block is `full` bytes.
    pub(super) fn text(&self, full: u64) -> Option<String> {
        let bar = |charged: Option<u64>| match charged {
            None | Some(0) => ' ',
            Some(charged) => {
                let parts = HEIGHTS.len() as u128;
                let height = (u128::from(charged) * parts).div_ceil(u128::from(full.max(1)));
                HEIGHTS[(height.clamp(1, parts) - 1) as usize]
            }
        };
        let bars = self.bars.iter().map(|&charged| bar(charged));
        (self.bars.len() > 1).then(|| format!("last 5 min: {}|", bars.collect::<String>()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_the_most_of_ten_seconds() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut history = History::new(begin);
        history.note(at(0), 800);
        history.note(at(9), 100);
        assert_eq!(history.text(800), None);
        history.note(at(10), 0);
        history.note(at(41), 1);
        history.note(at(49), 401);
        history.note(at(50), u64::MAX);
        assert_eq!(history.text(800).unwrap(), "last 5 min: █   ▅█|");
        history.note(at(340), 100);
        assert_eq!(
            history.text(800).unwrap(),
            format!("last 5 min: █{}▁|", " ".repeat(28))
        );
        history.note(at(100_000), 100);
        assert_eq!(
            history.text(0).unwrap(),
            format!("last 5 min: {}█|", " ".repeat(29))
        );
    }
}
