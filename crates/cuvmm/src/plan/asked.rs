//! The bytes of a range that the steps of a plan have requested.

use std::ops::Range;

use rangemap::RangeSet;

use crate::size::Granularity;

/// Ranges with their total size, which is updated with each change, so that a plan of many steps
/// does not walk all ranges after each step.
#[derive(Clone, Debug, Default)]
pub(super) struct Counted {
    runs: RangeSet<u64>,
    bytes: u64,
}

impl Counted {
    pub(super) fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let gaps = self.runs.gaps(&range);
        self.bytes += gaps.map(|gap| gap.end - gap.start).sum::<u64>();
        self.runs.insert(range);
    }

    pub(super) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let met = self.runs.overlapping(&range);
        let within = met.map(|run| run.end.min(range.end) - run.start.max(range.start));
        self.bytes -= within.sum::<u64>();
        self.runs.remove(range);
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The requested bytes. Every run of them begins at a granule, so that no two runs share a granule.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    granule: Granularity,
    exact: Counted,
    /// The whole granules of those bytes.
    whole: Counted,
}

impl Asked {
    pub(super) fn new(granule: Granularity) -> Self {
        Self {
            granule,
            exact: Counted::default(),
            whole: Counted::default(),
        }
    }

    pub(super) fn add(&mut self, range: Range<u64>) {
        let end = self.granule.round_up(range.end).unwrap_or(range.end);
        self.whole.add(range.start..end);
        self.exact.add(range);
    }

    /// Removes whole granules.
    pub(super) fn remove(&mut self, range: Range<u64>) {
        self.exact.remove(range.clone());
        self.whole.remove(range);
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.exact.bytes()
    }

    /// Returns the offset after the last byte.
    pub(super) fn end(&self) -> u64 {
        self.exact.runs.last().map_or(0, |run| run.end)
    }

    /// Returns the number of bytes from the first byte on without a hole.
    pub(super) fn prefix(&self) -> u64 {
        let first = self.exact.runs.first().filter(|run| run.start == 0);
        first.map_or(0, |run| run.end)
    }

    /// Returns the bytes of all granules that contain requested bytes.
    pub(super) const fn covered(&self) -> u64 {
        self.whole.bytes()
    }

    /// Returns `true` if all granules of a range contain requested bytes.
    pub(super) fn covers(&self, range: &Range<u64>) -> bool {
        self.whole.runs.gaps(range).next().is_none()
    }
}
