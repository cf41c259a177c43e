//! Free ranges by their length.
//!
//! The ranges lie in *bins*: the longest of a bin is at most a sixteenth longer than the shortest.
//! A bit for each bin says whether it has a range, so the shortest range that suffices is found
//! without a search among all of them.

use super::sorted::Sorted;
use crate::size::aligned;

/// The most ranges tried for an alignment before only ranges that fit at any alignment are.
const TRIES: usize = 8;

/// All lengths are multiples of two to this power.
const UNIT: u32 = super::ALIGNMENT.trailing_zeros();

/// The bits of a length that tell its bin, beside the place of the highest bit.
const BITS: u32 = 4;

/// Words with a bit for each bin.
const WORDS: usize = 13;

#[derive(Debug, Default)]
pub(super) struct Lengths {
    bins: Vec<Sorted<(u64, u64), ()>>,
    filled: [u64; WORDS],
    bytes: u64,
}

impl Lengths {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn add(&mut self, length: u64, start: u64) {
        let index = bin(length);
        if self.bins.len() <= index {
            self.bins.resize_with(index + 1, Sorted::default);
        }
        if let Some(bin) = self.bins.get_mut(index) {
            bin.insert((length, start), ());
            self.set(index, true);
            self.bytes += length;
        }
    }

    pub(super) fn remove(&mut self, length: u64, start: u64) {
        let index = bin(length);
        if let Some(bin) = self.bins.get_mut(index)
            && bin.remove((length, start)).is_some()
        {
            let is_empty = bin.is_empty();
            self.bytes -= length;
            if is_empty {
                self.set(index, false);
            }
        }
    }

    pub(super) fn longest(&self) -> u64 {
        let words = self.filled.iter().enumerate().rev();
        let mut last =
            words.filter_map(|(word, &bits)| Some(word * 64 + bits.checked_ilog2()? as usize));
        let bin = last.next().and_then(|index| self.bins.get(index));
        bin.and_then(Sorted::last)
            .map_or(0, |((length, _), &())| length)
    }

    /// Returns the length and the first address of the shortest range that has `size` bytes at a
    /// multiple of `alignment`, the lowest of several.
    pub(super) fn fit(&self, size: u64, alignment: u64) -> Option<(u64, u64)> {
        let place = |(length, start)| {
            let at = aligned(start, alignment)?;
            (at - start + size <= length).then_some((length, start))
        };
        // Mostly the first fits.
        if let Some(found) = place(self.first_from(size)?) {
            return Some(found);
        }
        let near = self.from(size).take(TRIES).find_map(place);
        near.or_else(|| self.from(size.checked_add(alignment)?).find_map(place))
    }

    fn first_from(&self, least: u64) -> Option<(u64, u64)> {
        let index = bin(least);
        let here = self.bins.get(index)?.first_from((least, 0));
        let first = here.or_else(|| {
            let bin = self.bins.get(self.filled_from(index + 1)?)?;
            bin.first_from((least, 0))
        });
        first.map(|(range, &())| range)
    }

    fn from(&self, least: u64) -> impl Iterator<Item = (u64, u64)> {
        let mut next = bin(least);
        let bins = std::iter::from_fn(move || {
            let index = self.filled_from(next)?;
            next = index + 1;
            self.bins.get(index)
        });
        bins.flat_map(move |bin| bin.from((least, 0)).map(|(range, &())| range))
    }

    fn filled_from(&self, index: usize) -> Option<usize> {
        let (first, bit) = (index / 64, index % 64);
        let words = self.filled.iter().enumerate().skip(first);
        let mut bits = words.map(|(word, &bits)| match word == first {
            true => (word, bits >> bit << bit),
            false => (word, bits),
        });
        let (word, bits) = bits.find(|&(_, bits)| bits != 0)?;
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn set(&mut self, index: usize, filled: bool) {
        if let Some(word) = self.filled.get_mut(index / 64) {
            let bit = 1 << (index % 64);
            *word = match filled {
                true => *word | bit,
                false => *word & !bit,
            };
        }
    }
}

/// Returns the index of the bin for a length. A longer range is never in an earlier bin.
const fn bin(length: u64) -> usize {
    let units = length >> UNIT;
    if units >> BITS == 0 {
        return units as usize;
    }
    let shift = units.ilog2() - BITS;
    ((shift as usize + 1) << BITS) + (units >> shift) as usize - (1 << BITS)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Searches all ranges in the order of lengths and addresses.
    fn search(known: &BTreeSet<(u64, u64)>, size: u64, alignment: u64) -> Option<(u64, u64)> {
        let fits = |&&(length, start): &&(u64, u64)| {
            let at = start.next_multiple_of(alignment);
            at - start + size <= length
        };
        known.iter().find(fits).copied()
    }

    #[test]
    fn the_shortest_range_that_suffices_is_found_whatever_was_added_and_removed() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut lengths, mut known) = (Lengths::default(), BTreeSet::new());
        for step in 0..20_000 {
            // Every length up to the greatest, and few lengths often.
            let bits = random.u32(1..50);
            let length = match random.bool() {
                true => 512 * random.u64(1..12),
                false => random.u64(1..1 << bits) | 1 << (bits - 1),
            };
            let range = (length, 512 * random.u64(..1 << 20));
            if step % 3 != 2 {
                if known.insert(range) {
                    lengths.add(range.0, range.1);
                }
            } else if let Some(&range) = known.range(range..).next() {
                known.remove(&range);
                lengths.remove(range.0, range.1);
            }
            let size = random.u64(1..=length);
            assert_eq!(lengths.fit(size, 512), search(&known, size, 512));
            let longest = known.last().map_or(0, |&(length, _)| length);
            assert_eq!(lengths.longest(), longest);
            if known.len() > 300 {
                for (length, start) in std::mem::take(&mut known) {
                    lengths.remove(length, start);
                }
                assert_eq!((lengths.bytes(), lengths.longest()), (0, 0));
                assert_eq!(lengths.fit(1, 512), None);
            }
        }
    }

    #[test]
    fn an_aligned_range_is_found_even_behind_many_that_are_too_short_for_it() {
        let mut lengths = Lengths::default();
        // All begin 512 bytes behind a multiple of 4,096.
        (0..100).for_each(|number| lengths.add(4096, 4096 * 3 * number + 512));
        assert_eq!(lengths.fit(4096, 4096), None);
        lengths.add(8192, 1 << 30 | 512);
        assert_eq!(lengths.fit(4096, 4096), Some((8192, 1 << 30 | 512)));
        assert_eq!(lengths.fit(512, 4096), Some((4096, 512)));
    }

    #[test]
    fn a_longer_range_is_never_in_an_earlier_bin() {
        let mut last = 0;
        for bits in UNIT..64 {
            for part in 0..16 {
                let index = bin((16 + part) << (bits - 4));
                assert!(index >= last && index < WORDS * 64, "{bits}, {part}");
                last = index;
            }
        }
        assert_eq!(bin(u64::MAX), last);
    }
}
