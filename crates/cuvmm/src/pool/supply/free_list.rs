//! The free list: unmapped physical memory that the pool holds, by size and last writer.

use std::collections::BTreeMap;

use crate::extents::Unmapped;

#[derive(Debug, Default)]
pub(super) struct FreeList {
    by_size: BTreeMap<u64, Physicals>,
    bytes: u64,
}

/// Physicals of one size, by last writer. None of the lists is empty.
#[derive(Debug, Default)]
struct Physicals {
    by_writer: BTreeMap<Option<u64>, Vec<Unmapped>>,
    count: u64,
}

impl Physicals {
    fn add(&mut self, unmapped: Unmapped) {
        let writer = unmapped.last_writer.map(|last_writer| last_writer.by);
        self.by_writer.entry(writer).or_default().push(unmapped);
        self.count += 1;
    }

    /// Takes a physical that `own` wrote to last, else an unwritten one, else, with `foreign`, one
    /// of another tenant.
    fn take(&mut self, own: Option<u64>, foreign: bool) -> Option<Unmapped> {
        let has = |writer: &Option<u64>| self.by_writer.contains_key(writer);
        let as_it_is = [own, None].into_iter().find(has);
        let any = || self.by_writer.keys().next_back().copied();
        let writer = as_it_is.or_else(|| any().filter(|_| foreign))?;
        let list = self.by_writer.get_mut(&writer)?;
        let unmapped = list.pop();
        if list.is_empty() {
            self.by_writer.remove(&writer);
        }
        self.count -= u64::from(unmapped.is_some());
        unmapped
    }
}

impl FreeList {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn largest(&self) -> u64 {
        self.by_size.keys().next_back().copied().unwrap_or(0)
    }

    /// Adds a physical. Only [`Memory::keep`](crate::pool::memory::Memory::keep) calls this, which checks
    /// that it may be kept.
    pub(super) fn add(&mut self, mut unmapped: Unmapped) {
        unmapped.fresh = false;
        self.bytes += unmapped.size();
        let of_size = self.by_size.entry(unmapped.size()).or_default();
        of_size.add(unmapped);
    }

    /// Takes a physical of exactly `size`: one that `own` wrote to last, else an unwritten one.
    /// Only with `scrub`, for a scrub, takes another tenant's.
    pub(super) fn take(&mut self, size: u64, own: Option<u64>, scrub: bool) -> Option<Unmapped> {
        let physicals = self.by_size.get_mut(&size)?;
        let unmapped = physicals.take(own, scrub)?;
        if physicals.count == 0 {
            self.by_size.remove(&size);
        }
        self.bytes -= size;
        Some(unmapped)
    }

    /// Takes the largest physical of at most `size`, as [`Self::take`] does.
    pub(super) fn take_within(
        &mut self,
        size: u64,
        own: Option<u64>,
        scrub: bool,
    ) -> Option<Unmapped> {
        let mut below = size;
        loop {
            let (&size, _) = self.by_size.range(..=below).next_back()?;
            if let Some(unmapped) = self.take(size, own, scrub) {
                return Some(unmapped);
            }
            below = size.checked_sub(1)?;
        }
    }

    /// Returns how many physicals make up `bytes`, the largest that fit first, or `u64::MAX` if
    /// they do not suffice.
    pub(super) fn unmapped_for(&self, bytes: u64) -> u64 {
        let mut left = bytes;
        let mut count = 0;
        for (&size, physicals) in self.by_size.range(..=bytes).rev() {
            let fit = (left / size).min(physicals.count);
            count += fit;
            left -= fit * size;
        }
        if left == 0 { count } else { u64::MAX }
    }

    /// Takes the largest physical of any writer, to be released.
    pub(super) fn take_largest(&mut self) -> Option<Unmapped> {
        let size = self.largest();
        self.take(size, None, true)
    }

    pub(super) fn take_smallest(&mut self) -> Option<Unmapped> {
        let (&size, _) = self.by_size.first_key_value()?;
        self.take(size, None, true)
    }

    pub(super) fn take_below(&mut self, size: u64) -> Option<Unmapped> {
        let (&smallest, _) = self.by_size.first_key_value()?;
        (smallest < size).then(|| self.take(smallest, None, true))?
    }

    pub(super) fn take_smallest_above(&mut self, size: u64) -> Option<Unmapped> {
        let (&size, _) = self.by_size.range(size.checked_add(1)?..).next()?;
        self.take(size, None, true)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::extents::LastWriter;
    use crate::extents::rig::{G, Rig, rig};

    const A: Option<u64> = Some(1);
    const B: Option<u64> = Some(2);

    fn list(rig: &Rig, of: &[(u64, Option<u64>)]) -> FreeList {
        let mut list = FreeList::default();
        for &(granules, by) in of {
            let mut unmapped = rig.memory(granules);
            unmapped.last_writer = by.map(|by| LastWriter { by, blank: false });
            list.add(unmapped);
        }
        list
    }

    fn seen(unmapped: Option<Unmapped>) -> Option<(u64, Option<u64>)> {
        let unmapped = unmapped?;
        assert!(!unmapped.fresh, "no running operation created it");
        Some((unmapped.size() / G, unmapped.last_writer.map(|it| it.by)))
    }

    #[test]
    fn an_empty_list_gives_nothing() {
        let mut list = FreeList::default();
        assert_eq!((list.bytes(), list.largest()), (0, 0));
        assert!(list.take(G, A, true).is_none());
        assert!(list.take_within(u64::MAX, A, true).is_none());
        assert!(list.take_largest().is_none() && list.take_smallest().is_none());
        assert!(list.take_below(u64::MAX).is_none());
        assert!(list.take_smallest_above(0).is_none());
        assert_eq!((list.unmapped_for(0), list.unmapped_for(G)), (0, u64::MAX));
    }

    #[test]
    fn bytes_and_the_largest_are_those_of_what_is_there() {
        let rig = rig();
        let mut list = list(&rig, &[(1, A), (2, None), (2, B)]);
        assert_eq!((list.bytes(), list.largest()), (5 * G, 2 * G));
        assert_eq!(seen(list.take(2 * G, None, true)), Some((2, None)));
        assert_eq!((list.bytes(), list.largest()), (3 * G, 2 * G));
        assert_eq!(seen(list.take(2 * G, None, true)), Some((2, B)));
        assert_eq!((list.bytes(), list.largest()), (G, G));
        assert!(list.take(2 * G, None, true).is_none());
        assert_eq!(seen(list.take(G, None, true)), Some((1, A)));
        assert_eq!((list.bytes(), list.largest()), (0, 0));
    }

    #[test]
    fn own_memory_comes_first_then_untouched_memory_then_that_of_others() {
        let rig = rig();
        let mut list = list(&rig, &[(1, B), (1, A), (1, None), (1, A)]);
        let took = |list: &mut FreeList, foreign| seen(list.take(G, A, foreign));
        assert_eq!(took(&mut list, true), Some((1, A)));
        assert_eq!(took(&mut list, false), Some((1, A)));
        assert_eq!(took(&mut list, true), Some((1, None)));
        assert_eq!(took(&mut list, false), None, "it would have to be zeroed");
        assert_eq!(
            (list.bytes(), list.largest()),
            (G, G),
            "a refusal takes nothing"
        );
        assert_eq!(took(&mut list, true), Some((1, B)));
        assert_eq!(list.bytes(), 0);
    }

    #[test]
    fn the_largest_that_fits_and_may_be_had_is_taken() {
        let rig = rig();
        let mut list = list(&rig, &[(1, A), (2, B), (4, A), (8, A)]);
        let took = |list: &mut FreeList, granules, foreign| {
            seen(list.take_within(granules * G, A, foreign))
        };
        assert_eq!(took(&mut list, 7, true), Some((4, A)));
        assert_eq!(
            took(&mut list, 7, false),
            Some((1, A)),
            "not that of another"
        );
        assert_eq!(took(&mut list, 7, false), None);
        assert_eq!(took(&mut list, 1, true), None, "all are larger");
        assert_eq!(took(&mut list, 2, true), Some((2, B)));
        assert_eq!(took(&mut list, 8, false), Some((8, A)));
    }

    #[test]
    fn what_makes_up_a_size_is_counted_largest_first() {
        let rig = rig();
        let list = list(&rig, &[(1, A), (1, B), (1, None), (2, A), (4, B)]);
        let count = |granules| list.unmapped_for(granules * G);
        let counts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(count);
        assert_eq!(counts, [0, 1, 1, 2, 1, 2, 2, 3, 4, 5]);
        assert_eq!(count(10), u64::MAX, "there is less");
        assert_eq!(list.unmapped_for(G / 2), u64::MAX, "all are larger");
    }

    #[test]
    fn what_goes_back_to_the_driver_is_chosen_by_size_whoever_wrote_to_it() {
        let rig = rig();
        let mut list = list(&rig, &[(1, A), (2, B), (4, A), (8, None), (16, B)]);
        assert_eq!(seen(list.take_largest()), Some((16, B)));
        assert_eq!(seen(list.take_smallest()), Some((1, A)));
        assert_eq!(seen(list.take_below(2 * G)), None, "none is smaller");
        assert_eq!(seen(list.take_below(2 * G + 1)), Some((2, B)));
        assert_eq!(
            seen(list.take_smallest_above(8 * G)),
            None,
            "none is larger"
        );
        assert_eq!(seen(list.take_smallest_above(u64::MAX)), None);
        assert_eq!(seen(list.take_smallest_above(4 * G)), Some((8, None)));
        assert_eq!(seen(list.take_smallest_above(G)), Some((4, A)));
        assert_eq!(list.bytes(), 0);
    }
}
