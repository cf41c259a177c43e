//! The addresses of a heap at which nothing is mapped.

use std::collections::{BTreeMap, BTreeSet};

/// Free ranges of addresses. Each lies in one *part*, the addresses of one reservation, and none is
/// adjacent to another of its part.
#[derive(Debug, Default)]
pub(super) struct Gaps {
    /// The first address and the end of each part.
    parts: BTreeMap<u64, u64>,
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
    bytes: u64,
}

impl Gaps {
    pub(super) fn used(&self) -> u64 {
        let parts = self.parts.iter().map(|(start, end)| end - start);
        parts.sum::<u64>() - self.bytes
    }

    pub(super) fn add_part(&mut self, start: u64, size: u64) {
        self.parts.insert(start, start + size);
        self.insert(start, size);
    }

    /// Returns the first address of each removed part.
    pub(super) fn take_free_parts(&mut self) -> Vec<u64> {
        let parts = self.parts.iter();
        let free = parts.filter(|&(start, end)| self.by_start.get(start) == Some(&(end - start)));
        let free: Vec<u64> = free.map(|(&start, _)| start).collect();
        for &start in &free {
            if let Some(end) = self.parts.remove(&start) {
                self.remove(start, end - start);
            }
        }
        free
    }

    /// Takes `size` bytes, with `margin` unused bytes on either side, from the smallest gap that
    /// has them, and the lowest of these.
    pub(super) fn take(&mut self, size: u64, margin: u64) -> Option<u64> {
        let least = size.checked_add(2 * margin)?;
        let &(_, first) = self.by_size.range((least, 0)..).next()?;
        let start = first + margin;
        self.take_at(start, size).then_some(start)
    }

    /// Returns the `count` largest gaps, each with its first address and size.
    pub(super) fn largest(&self, count: usize) -> impl Iterator<Item = (u64, u64)> {
        let largest = self.by_size.iter().rev().take(count);
        largest.map(|&(size, start)| (start, size))
    }

    pub(super) fn has(&self, start: u64, size: u64) -> bool {
        let gap = self.by_start.range(..=start).next_back();
        gap.is_some_and(|(&first, &length)| start - first + size <= length)
    }

    /// Takes `size` bytes from `start` on, if they are free.
    pub(super) fn take_at(&mut self, start: u64, size: u64) -> bool {
        if !self.has(start, size) {
            return false;
        }
        let Some((&first, &length)) = self.by_start.range(..=start).next_back() else {
            return false;
        };
        self.remove(first, length);
        self.insert(first, start - first);
        self.insert(start + size, first + length - start - size);
        true
    }

    pub(super) fn give(&mut self, start: u64, size: u64) {
        let (mut from, mut to) = (start, start + size);
        if let Some((&first, &length)) = self.by_start.range(..start).next_back()
            && first + length == start
            && !self.parts.contains_key(&start)
        {
            self.remove(first, length);
            from = first;
        }
        if let Some(&length) = self.by_start.get(&to)
            && !self.parts.contains_key(&to)
        {
            self.remove(to, length);
            to += length;
        }
        self.insert(from, to - from);
    }

    fn insert(&mut self, start: u64, size: u64) {
        if size > 0 {
            self.by_start.insert(start, size);
            self.by_size.insert((size, start));
            self.bytes += size;
        }
    }

    fn remove(&mut self, start: u64, size: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(size, start));
        self.bytes -= size;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_gap_that_suffices_is_used_and_what_is_freed_joins_its_neighbors() {
        let mut gaps = Gaps::default();
        gaps.add_part(0, 100);
        let taken = [10, 10, 10].map(|size| gaps.take(size, 0));
        assert_eq!(taken, [Some(0), Some(10), Some(20)]);
        gaps.give(10, 10);
        assert_eq!(gaps.take(5, 0), Some(10), "not from the large gap");
        assert_eq!(gaps.take(6, 0), Some(30));
        gaps.give(0, 10);
        gaps.give(10, 5);
        assert!(gaps.has(0, 20) && !gaps.has(0, 21) && gaps.has(5, 15));
        assert!(gaps.take_at(5, 10) && !gaps.take_at(5, 1));
        assert!(gaps.has(0, 5) && gaps.has(15, 5));
        gaps.give(5, 10);
        gaps.give(20, 16);
        let taken = [101, 100, 1].map(|size| gaps.take(size, 0));
        assert_eq!((taken, gaps.bytes), ([None, Some(0), None], 0));
    }

    #[test]
    fn a_margin_stays_unused_on_either_side() {
        let mut gaps = Gaps::default();
        gaps.add_part(0, 20);
        assert_eq!((gaps.take(17, 2), gaps.take(16, 2)), (None, Some(2)));
        assert!(gaps.has(0, 2) && gaps.has(18, 2) && !gaps.has(0, 3));
        assert_eq!(gaps.largest(9).count(), 2);
    }

    #[test]
    fn no_gap_crosses_two_parts_and_those_that_are_free_can_be_taken() {
        let mut gaps = Gaps::default();
        for start in [10, 0, 20] {
            gaps.add_part(start, 10);
        }
        assert_eq!((gaps.bytes, gaps.take(11, 0)), (30, None));
        for start in [0, 10, 20] {
            assert!(gaps.take_at(start, 10));
        }
        assert!(gaps.take_free_parts().is_empty());
        gaps.give(5, 5);
        gaps.give(20, 10);
        gaps.give(10, 10);
        assert_eq!((gaps.has(5, 6), gaps.bytes), (false, 25));
        assert_eq!(gaps.take_free_parts(), [10, 20]);
        assert_eq!((gaps.used(), gaps.bytes), (5, 5));
        gaps.give(0, 5);
        assert_eq!(gaps.take_free_parts(), [0]);
        assert_eq!(
            (gaps.used(), gaps.bytes, gaps.largest(1).count()),
            (0, 0, 0)
        );
    }
}
