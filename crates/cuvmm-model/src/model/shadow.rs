//! The record of written bytes, byte by byte, if the options ask for it.

use std::collections::BTreeMap;

use super::backing::{MemoryKey, Place};
use cuvmm_driver::{DeviceAddress, Ordinal};

/// The most reads kept with their details until they are taken.
const KEPT: usize = 64;

/// A read of bytes that were never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unwritten {
    /// The first byte that was never written.
    pub address: DeviceAddress,
    /// The size of the whole read in bytes.
    pub size: u64,
    /// The number of bytes of the read that were never written.
    pub unwritten: u64,
    /// The device that read.
    pub device: Ordinal,
    /// The kind of work that read.
    pub work: &'static str,
}

#[derive(Debug, Default)]
pub(crate) struct Shadow {
    memories: BTreeMap<MemoryKey, Ranges>,
    /// By address, for memory outside virtual memory management.
    allocations: Ranges,
    found: Vec<Unwritten>,
}

/// Disjoint ranges that do not touch: start to end.
#[derive(Debug, Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn within(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let before = self.0.range(..start).next_back();
        let before = before.filter(|&(_, &stop)| stop > start);
        let parts = before.into_iter().chain(self.0.range(start..end));
        parts
            .map(|(&from, &to)| (from.max(start), to.min(end)))
            .collect()
    }

    fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        if let Some((&first, &stop)) = self.0.range(..start).next_back()
            && stop > start
        {
            self.0.insert(first, start);
            if stop > end {
                self.0.insert(end, stop);
            }
        }
        let inside: Vec<_> = self
            .0
            .range(start..end)
            .map(|(&from, &to)| (from, to))
            .collect();
        for (from, to) in inside {
            self.0.remove(&from);
            if to > end {
                self.0.insert(end, to);
            }
        }
    }

    fn add(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        if let Some((&first, &stop)) = self.0.range(..start).next_back()
            && stop >= start
        {
            start = first;
            end = end.max(stop);
        }
        let met: Vec<_> = self
            .0
            .range(start..=end)
            .map(|(&from, &to)| (from, to))
            .collect();
        for (from, to) in met {
            self.0.remove(&from);
            end = end.max(to);
        }
        self.0.insert(start, end);
    }
}

impl Shadow {
    fn of(&mut self, place: Place) -> (&mut Ranges, u64) {
        match place {
            Place::Memory(key, offset) => (self.memories.entry(key).or_default(), offset),
            Place::Allocation(address) => (&mut self.allocations, address),
        }
    }

    pub(crate) fn record(&mut self, read: Unwritten) {
        if self.found.len() < KEPT {
            self.found.push(read);
        }
    }

    pub(crate) fn take(&mut self) -> Vec<Unwritten> {
        std::mem::take(&mut self.found)
    }

    /// Removes an allocation, whose addresses another may get.
    pub(crate) fn end_allocation(&mut self, address: u64, size: u64) {
        self.allocations
            .remove(address, address.saturating_add(size));
    }

    pub(crate) fn end_memory(&mut self, key: MemoryKey) {
        self.memories.remove(&key);
    }

    pub(crate) fn write(&mut self, place: Place, size: u64) {
        let (ranges, at) = self.of(place);
        ranges.add(at, at + size);
    }

    pub(crate) fn copy(&mut self, to: Place, from: Place, size: u64) {
        let (ranges, start) = self.of(from);
        let parts = ranges.within(start, start + size);
        let (ranges, at) = self.of(to);
        ranges.remove(at, at + size);
        for (from, to) in parts {
            ranges.add(at + (from - start), at + (to - start));
        }
    }

    /// Returns the offset of the first byte of a range that was never written, and the number of
    /// such bytes.
    pub(crate) fn unwritten(&mut self, place: Place, size: u64) -> Option<(u64, u64)> {
        let (ranges, start) = self.of(place);
        let (mut first, mut missing, mut at) = (None, 0, start);
        let parts = ranges.within(start, start + size);
        for (from, to) in parts.into_iter().chain([(start + size, start + size)]) {
            if from > at {
                first = first.or(Some(at - start));
                missing += from - at;
            }
            at = to;
        }
        Some((first?, missing))
    }
}

#[cfg(test)]
mod tests {
    use super::Ranges;

    #[test]
    fn ranges_are_joined_and_split() {
        let mut ranges = Ranges::default();
        ranges.add(10, 20);
        ranges.add(30, 40);
        ranges.add(20, 25);
        assert_eq!(ranges.within(0, 100), [(10, 25), (30, 40)]);
        assert_eq!(ranges.within(12, 33), [(12, 25), (30, 33)]);
        ranges.add(5, 50);
        assert_eq!(ranges.within(0, 100), [(5, 50)]);
        ranges.remove(10, 20);
        assert_eq!(ranges.within(0, 100), [(5, 10), (20, 50)]);
        ranges.remove(0, 100);
        assert_eq!(ranges.within(0, 100), []);
        ranges.add(7, 7);
        assert_eq!(ranges.within(0, 100), []);
    }
}
