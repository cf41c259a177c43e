//! Allocation of ranges of numbers: addresses of the model, offsets in a file of the host.

use std::collections::BTreeMap;
use std::ops::Range;

/// The free parts of a range of numbers. Adjacent parts are always merged.
#[derive(Debug)]
pub(crate) struct Space {
    /// Start to end.
    free: BTreeMap<u64, u64>,
}

impl Space {
    pub(crate) fn new(whole: Range<u64>) -> Self {
        let mut free = BTreeMap::new();
        if whole.start < whole.end {
            free.insert(whole.start, whole.end);
        }
        Self { free }
    }

    /// Takes the lowest part that fits. `alignment` is a power of two.
    pub(crate) fn allocate(&mut self, size: u64, alignment: u64) -> Option<u64> {
        self.allocate_behind(0, size, alignment)
    }

    /// Takes the lowest part that fits, with `lead` numbers before it.
    pub(crate) fn allocate_behind(&mut self, lead: u64, size: u64, alignment: u64) -> Option<u64> {
        let place = self.free.iter().find_map(|(&start, &end)| {
            let place = start
                .checked_add(lead)?
                .checked_next_multiple_of(alignment)?;
            (place.checked_add(size)? <= end).then_some(place)
        })?;
        self.claim(place - lead, size + lead).then_some(place)
    }

    /// Returns `false` if a part of it is not free.
    pub(crate) fn claim(&mut self, start: u64, size: u64) -> bool {
        let Some(end) = start.checked_add(size) else {
            return false;
        };
        let Some((&free_start, &free_end)) = self.free.range(..=start).next_back() else {
            return false;
        };
        if end > free_end {
            return false;
        }
        self.free.remove(&free_start);
        if free_start < start {
            self.free.insert(free_start, start);
        }
        if end < free_end {
            self.free.insert(end, free_end);
        }
        true
    }

    pub(crate) fn give_back(&mut self, start: u64, size: u64) {
        let mut start = start;
        let mut end = start + size;
        if let Some((&before, &before_end)) = self.free.range(..start).next_back()
            && before_end == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(after_end) = self.free.remove(&end) {
            end = after_end;
        }
        self.free.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::Space;

    #[test]
    fn lowest_fit_alignment_and_merging() {
        let mut space = Space::new(0x1000..0x10_0000);
        assert_eq!(space.allocate(0x1000, 1), Some(0x1000));
        assert_eq!(space.allocate(0x1000, 0x4000), Some(0x4000));
        assert_eq!(
            space.allocate(0x2000, 0x1000),
            Some(0x2000),
            "the gap before an aligned one"
        );
        assert!(!space.claim(0x4800, 0x100), "taken");
        assert!(space.claim(0x8000, 0x1000));
        for (start, size) in [
            (0x1000, 0x1000),
            (0x4000, 0x1000),
            (0x8000, 0x1000),
            (0x2000, 0x2000),
        ] {
            space.give_back(start, size);
        }
        assert_eq!(
            space.allocate(0xf_f000, 1),
            Some(0x1000),
            "all merged again"
        );
        assert_eq!(space.allocate(1, 1), None);
    }

    #[test]
    fn what_stands_before_a_place_is_taken_with_it() {
        let mut space = Space::new(0x1000..0x10_0000);
        assert_eq!(space.allocate_behind(0x1000, 0x1000, 0x1000), Some(0x2000));
        assert_eq!(space.allocate_behind(0x1000, 0x1000, 0x1000), Some(0x4000));
        assert!(!space.claim(0x3000, 0x1000), "taken");
        space.give_back(0x3000, 0x2000);
        assert!(space.claim(0x3000, 0x1000));
        assert_eq!(space.allocate_behind(u64::MAX, 1, 1), None);
    }

    #[test]
    fn the_end_of_the_numbers_is_no_place() {
        let mut space = Space::new(0..u64::MAX);
        assert_eq!(space.allocate(u64::MAX, 1 << 63), Some(0));
        assert!(!space.claim(u64::MAX - 1, 4));
    }
}
