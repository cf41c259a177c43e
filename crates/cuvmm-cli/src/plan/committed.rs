//! Addresses in which a plan commits and grows, with the bytes that its steps requested.

use std::ops::Range;

use cuvmm::error::ArgumentError;
use cuvmm::{CloseRefusal, Device, Error, Region};
use rangemap::RangeSet;

use super::held::Held;

/// A region, and the ranges requested in it. Every request begins at a granule.
pub(super) struct Committed {
    region: Region,
    asked: Ranges,
    /// The requested bytes, rounded out to whole granules.
    whole: Ranges,
    committed: Ranges,
    /// The end of the memory that growth has committed, from the first byte on.
    grown: u64,
}

impl Committed {
    pub(super) fn new(region: Region) -> Self {
        Self {
            region,
            asked: Ranges::default(),
            whole: Ranges::default(),
            committed: Ranges::default(),
            grown: 0,
        }
    }

    fn rounded(&self, bytes: u64) -> u64 {
        rounded(bytes, self.region.device())
    }

    fn add(&mut self, range: Range<u64>) {
        self.whole.add(range.start..self.rounded(range.end));
        self.asked.add(range);
    }

    /// Commits memory to a range, by default after everything requested so far.
    pub(super) fn commit(&mut self, at: Option<u64>, size: u64) -> Result<(), Error> {
        let at = at.unwrap_or_else(|| self.rounded(self.asked.end()));
        let end = at.saturating_add(size);
        let whole = at..self.rounded(end);
        self.region.commit(whole.clone())?;
        self.committed.add(whole);
        self.add(at..end);
        Ok(())
    }

    /// Grows as a container does that requests `by` bytes at a time.
    pub(super) fn grow(&mut self, to: u64, by: u64) -> Result<(), Error> {
        let (has, len) = (self.asked.prefix(), self.region.size());
        if by == 0 {
            return Err(ArgumentError::Zero("bytes of each request").into());
        }
        if to <= has {
            let (what, least) = ("bytes to grow to", has + 1);
            let value = to;
            return Err(ArgumentError::TooSmall { what, value, least }.into());
        }
        if to > len {
            let (what, start, end) = ("bytes", 0, to);
            return Err(ArgumentError::OutOfRange {
                what,
                start,
                end,
                len,
            }
            .into());
        }
        let mut held = self.rounded(has);
        if self.region.is_committed(0..self.grown) {
            held = held.max(self.grown);
        }
        while held < to {
            // Counts the requests that fit in the memory already committed.
            let fits = (held - has) / by;
            let need = by.saturating_mul(fits + 1).saturating_add(has).min(to);
            held = self.region.grow_to(self.rounded(need))?;
            self.grown = held;
            self.committed.add(0..held);
            self.add(0..held.min(to));
        }
        self.add(0..to);
        Ok(())
    }

    /// Decommits whole granules. With the last requested byte, also decommits the precommitted
    /// memory after it.
    pub(super) fn decommit(&mut self, at: u64, size: u64) -> Result<(), Error> {
        let mut end = self.rounded(at.saturating_add(size));
        let ahead = self.asked.end() <= end;
        if ahead {
            end = end.max(self.grown);
        }
        self.region.decommit_after(at..end, &[])?;
        if ahead {
            self.grown = self.grown.min(at);
        }
        self.asked.remove(at..end);
        self.whole.remove(at..end);
        self.committed.remove(at..end);
        self.region.purge()?;
        Ok(())
    }

    pub(super) fn held(&self) -> Held {
        let (asked, whole) = (self.asked.bytes, self.whole.bytes);
        let (region, committed) = (&self.region, self.committed.bytes);
        Held {
            asked,
            padding: whole - asked,
            precommitted: committed - whole,
            kept: region.held() - committed,
            memory: region.held(),
            mappings: region.mappings(),
            addresses: region.size(),
        }
    }

    pub(super) fn close(self) -> Result<(), CloseRefusal> {
        self.region.close().map_err(|failed| failed.reason)
    }
}

/// Rounds up to whole granules of a device. A size whose rounding overflows 64 bits is returned as
/// it is: the library refuses it.
pub(super) fn rounded(bytes: u64, device: &Device) -> u64 {
    let whole = bytes.checked_next_multiple_of(device.granularity());
    whole.unwrap_or(bytes)
}

/// Ranges and their total size. Each change updates the total, so a plan of many steps does not
/// walk all ranges after each step.
#[derive(Default)]
struct Ranges {
    runs: RangeSet<u64>,
    bytes: u64,
}

impl Ranges {
    fn add(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            let gaps = self.runs.gaps(&range);
            self.bytes += gaps.map(|gap| gap.end - gap.start).sum::<u64>();
            self.runs.insert(range);
        }
    }

    fn remove(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            let met = self.runs.overlapping(&range);
            let within = met.map(|run| run.end.min(range.end) - run.start.max(range.start));
            self.bytes -= within.sum::<u64>();
            self.runs.remove(range);
        }
    }

    fn end(&self) -> u64 {
        self.runs.last().map_or(0, |run| run.end)
    }

    /// Returns the number of bytes from the first byte to the first hole.
    fn prefix(&self) -> u64 {
        let first = self.runs.first().filter(|run| run.start == 0);
        first.map_or(0, |run| run.end)
    }
}
