//! Which bytes of a range the steps of a plan have asked for.

use std::ops::Range;

use rangemap::RangeSet;

use crate::size::Granularity;

/// Bytes asked for. Every run of them begins at a granule, so that the granules they lie in are
/// theirs alone.
#[derive(Clone, Debug, Default)]
pub(super) struct Asked(RangeSet<u64>);

impl Asked {
    pub(super) fn add(&mut self, range: Range<u64>) {
        self.0.insert(range);
    }

    /// Takes whole granules out.
    pub(super) fn remove(&mut self, range: Range<u64>) {
        self.0.remove(range);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|run| run.end - run.start).sum()
    }

    /// One past the last byte.
    pub(super) fn end(&self) -> u64 {
        self.0.last().map_or(0, |run| run.end)
    }

    /// How many bytes there are from the first on without a hole.
    pub(super) fn prefix(&self) -> u64 {
        let first = self.0.first().filter(|run| run.start == 0);
        first.map_or(0, |run| run.end)
    }

    /// The bytes of the granules that it lies in.
    pub(super) fn covered(&self, granule: Granularity) -> u64 {
        let whole = |run: &Range<u64>| granule.round_up(run.end).unwrap_or(run.end) - run.start;
        self.0.iter().map(whole).sum()
    }

    /// Whether all granules of a range are its own.
    pub(super) fn covers(&self, granule: Granularity, range: &Range<u64>) -> bool {
        let mut at = range.start;
        for run in self.0.overlapping(range) {
            if run.start > at {
                return false;
            }
            at = granule.round_up(run.end).unwrap_or(run.end);
        }
        at >= range.end
    }
}
