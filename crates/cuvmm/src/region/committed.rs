//! Committed bytes and pending extents of a region. Totals are updated with each change, so that a
//! tile costs the same among many as among few.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use cuvmm_driver::PhysicalHandle;
use rangemap::RangeSet;

use super::Region;
use super::family::Family;
use super::holder::Use;
use crate::extents::Fence;

#[derive(Clone, Debug, Default)]
pub(crate) struct Committed {
    ranges: RangeSet<u64>,
    bytes: u64,
}

impl Committed {
    pub(crate) fn bytes(&self) -> u64 {
        debug_assert_eq!(self.bytes, sum(self.ranges.iter().cloned()));
        self.bytes
    }

    /// Returns `true` if a whole range is committed; an empty range is.
    pub(crate) fn covers(&self, range: &Range<u64>) -> bool {
        range.is_empty() || self.ranges.gaps(range).next().is_none()
    }

    /// Returns the end of the committed bytes from the first one on.
    pub(crate) fn prefix(&self) -> u64 {
        self.ranges.get(&0).map_or(0, |first| first.end)
    }

    /// Returns the start of the committed bytes that end at an offset or contain it, or else the
    /// offset.
    pub(super) fn start_before(&self, offset: u64) -> u64 {
        let last = offset.checked_sub(1);
        let before = last.and_then(|last| self.ranges.get(&last));
        before.map_or(offset, |range| range.start)
    }

    pub(crate) fn overlaps(&self, range: &Range<u64>) -> bool {
        self.ranges.overlaps(range)
    }

    pub(crate) fn parts(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let (start, end) = (range.start, range.end.max(range.start));
        self.ranges
            .overlapping(start..end)
            .map(move |part| part.start.max(start)..part.end.min(end))
            .filter(|part| !part.is_empty())
    }

    pub(crate) fn insert(&mut self, range: Range<u64>) {
        self.bytes += range.end - range.start - sum(self.parts(range.clone()));
        self.ranges.insert(range);
    }

    pub(crate) fn remove(&mut self, range: Range<u64>) {
        self.bytes -= sum(self.parts(range.clone()));
        self.ranges.remove(range);
    }
}

/// Mapped extents of a region without a committed byte: pending frees.
#[derive(Debug, Default)]
pub(super) struct PendingExtents {
    sizes: BTreeMap<u64, u64>,
    bytes: u64,
}

impl PendingExtents {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn meeting(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let start = range.start;
        let before = self.sizes.range(..start).next_back();
        // A range that ends before it begins overlaps none.
        let within = self.sizes.range(start..range.end.max(start));
        before
            .into_iter()
            .chain(within)
            .map(|(&offset, &size)| offset..offset + size)
            .filter(move |extent| extent.end > start)
    }

    pub(super) fn insert(&mut self, offset: u64, size: u64) {
        self.remove(offset);
        self.sizes.insert(offset, size);
        self.bytes += size;
    }

    pub(super) fn remove(&mut self, offset: u64) {
        self.bytes -= self.sizes.remove(&offset).unwrap_or(0);
    }
}

impl Region {
    /// Returns the bytes that are pending free.
    #[doc(alias = "limbo")]
    #[must_use]
    pub fn pending_free(&self) -> u64 {
        debug_assert!(self.pending_is_true());
        self.pending.bytes() + self.withdrawn_bytes(&(0..self.space.size()))
    }

    /// Updates which extents that overlap a range are pending, after its committed bytes have
    /// changed. In a tenant they are handed to its pool.
    pub(super) fn note_pending(&mut self, range: &Range<u64>) {
        self.note_pending_in(std::slice::from_ref(range));
    }

    /// Updates which extents that overlap some ranges are pending, after their committed bytes have
    /// changed. In a tenant they are handed to its pool, all at once.
    pub(super) fn note_pending_in(&mut self, ranges: &[Range<u64>]) {
        // Another thread may have held the lock at the fork: a child never gets it.
        if let Some(family) = self
            .supply
            .family()
            .filter(|_| !self.space.device().is_forked())
        {
            let family = Arc::clone(family);
            return self.hand_over(&family, ranges, Use::Used);
        }
        let extents = ranges.iter();
        for extent in extents.flat_map(|it| self.space.extents_in(it.start, it.end)) {
            match self.committed.overlaps(&(extent.offset..extent.end())) {
                true => self.pending.remove(extent.offset),
                false => {
                    // A commit in which the driver panicked has left memory without a fence: no work uses it.
                    let withdrawn = self.withdrawn.entry(extent.offset);
                    withdrawn.or_insert_with(Fence::complete);
                    self.pending.insert(extent.offset, extent.size);
                }
            }
        }
    }

    /// The addresses of a range.
    pub(super) fn addresses(&self, range: &Range<u64>) -> Range<u64> {
        let base = self.space.address().0;
        base + range.start..base + range.end
    }

    /// The physicals of withdrawn extents that the pool of the region's tenant may take, each with
    /// its bytes.
    pub(super) fn withdrawn_physicals(&self) -> Vec<(PhysicalHandle, u64)> {
        match self.supply.family() {
            Some(family) => family
                .shared
                .withdrawn_in(&self.addresses(&(0..self.space.size()))),
            None => Vec::new(),
        }
    }

    /// The bytes of withdrawn extents that overlap a range and that the pool may take.
    pub(super) fn withdrawn_bytes(&self, range: &Range<u64>) -> u64 {
        let family = self.supply.family().into_iter();
        let withdrawn =
            family.flat_map(|family| family.shared.withdrawn_in(&self.addresses(range)));
        withdrawn.map(|(_, size)| size).sum()
    }

    /// Hands the extents of some ranges without a committed byte to the pool of the region's tenant,
    /// behind their fences. Requests that wait for memory are woken once.
    pub(super) fn hand_over(&mut self, family: &Family, ranges: &[Range<u64>], known: Use) {
        let extents = ranges.iter();
        let extents = extents.flat_map(|it| self.space.extents_in(it.start, it.end));
        let unused = extents
            .filter(|extent| !self.committed.overlaps(&(extent.offset..extent.end())))
            .map(|extent| extent.offset);
        let unused: Vec<u64> = unused.collect();
        let mut withdrawn = Vec::with_capacity(unused.len());
        for offset in unused {
            let fence = self.withdrawn.remove(&offset);
            let placed = self.space.remove(offset);
            withdrawn.extend(placed.map(|it| (it, fence.unwrap_or_else(Fence::complete))));
        }
        family.withdraw(withdrawn, known);
    }

    /// Returns `true` if the pending extents are exactly those without a committed byte.
    fn pending_is_true(&self) -> bool {
        let extents = self.space.extents().map(|it| it.offset..it.end());
        extents
            .filter(|extent| !self.committed.overlaps(extent))
            .eq(self.pending.meeting(&(0..self.space.size())))
    }
}

fn sum(ranges: impl Iterator<Item = Range<u64>>) -> u64 {
    ranges.map(|range| range.end - range.start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_as_ranges_come_and_go() {
        let mut committed = Committed::default();
        let mut known = [false; 64];
        let mut random = fastrand::Rng::with_seed(21);
        for _ in 0..2_000 {
            let start = random.u64(0..64);
            let range = start..random.u64(start..64) + 1;
            let here = range.start as usize..range.end as usize;
            let yes = random.bool();
            known[here].fill(yes);
            match yes {
                true => committed.insert(range.clone()),
                false => committed.remove(range.clone()),
            }
            let count = known.iter().filter(|&&yes| yes).count() as u64;
            assert_eq!(committed.bytes(), count);
            assert_eq!(committed.covers(&range), yes);
            assert_eq!(committed.overlaps(&range), yes);
            let all: Vec<Range<u64>> = committed.parts(0..64).collect();
            assert!(all.iter().cloned().flatten().all(|at| known[at as usize]));
        }
    }

    #[test]
    fn pending_extents_that_meet_a_range() {
        let mut pending = PendingExtents::default();
        for (offset, size) in [(0, 4), (4, 2), (8, 8), (20, 1)] {
            pending.insert(offset, size);
        }
        let meeting = |range: Range<u64>| -> Vec<u64> {
            pending.meeting(&range).map(|extent| extent.start).collect()
        };
        assert_eq!(meeting(0..32), [0, 4, 8, 20]);
        assert_eq!(meeting(3..9), [0, 4, 8]);
        assert_eq!(meeting(6..8), [0; 0]);
        assert_eq!(meeting(15..20), [8]);
        assert_eq!(pending.bytes(), 15);
        pending.insert(8, 8);
        pending.remove(0);
        pending.remove(0);
        assert_eq!(pending.bytes(), 11);
    }
}
