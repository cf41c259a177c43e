//! The sizes of the extents under memory that grows and shrinks at its end.
//!
//! An extent is released whole, so memory that shrinks strands what lies between its end and the
//! end of the extent there. Few large extents cost the fewest driver calls. Memory that is expected
//! to shrink has extents that are small in proportion to what lies before them, which bounds what
//! any shrink strands (`docs/decisions/04-regions.md` has the figures).
//!
//! Keeps I-84 and I-88.

use std::ops::Range;

use crate::size::Granularity;

/// The part of the bytes before an extent that its size is at most, if memory is expected to shrink:
/// a quarter.
const PART: u64 = 4;

/// The size of the extents at the start of memory that is expected to shrink: 16 MiB.
const FIRST: u64 = 16 << 20;

/// A bound on the sizes of extents, by their offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ExtentSizes {
    /// In bytes, a power of two granules.
    largest: u64,
    shrinks: bool,
}

impl ExtentSizes {
    /// Allows extents of up to `largest` bytes everywhere.
    pub(crate) const fn up_to(largest: u64) -> Self {
        Self {
            largest,
            shrinks: false,
        }
    }

    /// Sets whether the memory is expected to shrink. If so, an extent has at most a quarter of the
    /// bytes that lie before it, but may have 16 MiB.
    pub(crate) const fn expect_shrink(mut self, yes: bool) -> Self {
        self.shrinks = yes;
        self
    }

    /// Returns `true` if the memory is expected to shrink; otherwise offsets make no difference.
    pub(crate) const fn shrinks(self) -> bool {
        self.shrinks
    }

    /// Returns the largest size of any extent in bytes.
    pub(crate) const fn largest(self) -> u64 {
        self.largest
    }

    /// Returns a copy with another bound on all extents.
    pub(crate) const fn with_largest(mut self, bytes: u64) -> Self {
        self.largest = bytes;
        self
    }

    /// Returns the largest size in bytes of an extent that begins at an offset.
    pub(crate) fn at(self, offset: u64) -> u64 {
        match self.shrinks {
            true => self.largest.min(FIRST.max(offset / PART)),
            false => self.largest,
        }
    }

    /// Returns the sizes of the fewest extents that cover a range of whole granules, in their
    /// order.
    pub(crate) fn cover(
        self,
        granule: Granularity,
        range: Range<u64>,
    ) -> impl Iterator<Item = u64> {
        let Range { mut start, end } = range;
        std::iter::from_fn(move || {
            let left = end.checked_sub(start).filter(|&left| left > 0)?;
            let size = granule.extent_within(left, self.at(start));
            start = start.saturating_add(size);
            Some(size)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const G: u64 = 2 * MIB;

    fn cover(sizes: ExtentSizes, mib: u64) -> Vec<u64> {
        let granule = Granularity::new(G).unwrap();
        let covering = sizes.cover(granule, 0..mib * MIB);
        covering.map(|size| size / MIB).collect()
    }

    #[test]
    fn memory_that_is_not_expected_to_shrink_has_the_fewest_extents() {
        let sizes = ExtentSizes::up_to(1024 * MIB);
        assert_eq!(cover(sizes, 1024), [1024]);
        assert_eq!(cover(sizes, 3 * 1024 + 6), [1024, 1024, 1024, 4, 2]);
        assert_eq!(cover(sizes, 0), [0; 0]);
        assert_eq!(cover(ExtentSizes::up_to(256 * MIB), 514), [256, 256, 2]);
    }

    #[test]
    fn a_gibibyte_that_is_expected_to_shrink_has_twenty_extents() {
        let sizes = ExtentSizes::up_to(1024 * MIB).expect_shrink(true);
        let all = [[16; 4], [16; 4], [32; 4], [64; 4], [128; 4]].concat();
        assert_eq!(cover(sizes, 1024), all);
        assert_eq!(cover(sizes, 40), [16, 16, 8]);
        assert_eq!(cover(sizes.with_largest(8 * MIB), 20), [8, 8, 4]);
        assert_eq!(cover(sizes.with_largest(64 * MIB), 1024).len(), 24);
        assert_eq!(cover(sizes.expect_shrink(false), 1024), [1024]);
    }

    #[test]
    fn offsets_near_the_end_of_64_bits_are_covered() {
        let granule = Granularity::new(G).unwrap();
        let sizes = ExtentSizes::up_to(1024 * MIB).expect_shrink(true);
        let end = granule.round_down(u64::MAX);
        let covering = sizes.cover(granule, end - 6 * MIB..end);
        assert_eq!(covering.collect::<Vec<_>>(), [4 * MIB, 2 * MIB]);
        let backward = Range { start: G, end: 0 };
        assert_eq!(sizes.cover(granule, backward).count(), 0);
    }

    proptest! {
        #[test]
        fn a_cover_is_powers_of_two_that_add_up(granules in 1u64..5000, most_log in 0u32..12) {
            let (granule, most) = (Granularity::new(G).unwrap(), G << most_log);
            let sizes = ExtentSizes::up_to(most).cover(granule, 0..granules * G);
            let sizes: Vec<u64> = sizes.collect();
            prop_assert_eq!(sizes.iter().sum::<u64>(), granules * G);
            for size in &sizes {
                prop_assert!((size / G).is_power_of_two() && granule.divides(*size) && *size <= most);
            }
            // No shorter cover exists: each whole `most`, then one extent for each set bit.
            let whole = granules >> most_log;
            let rest = (granules & ((1 << most_log) - 1)).count_ones();
            prop_assert_eq!(sizes.len() as u64, whole + u64::from(rest));
        }

        // I-88
        #[test]
        fn a_shrink_strands_a_quarter_or_16_mib(granules in 1u64..9000, kept in 1u64..9000, log in 0u32..12) {
            let sizes = ExtentSizes::up_to(G << log).expect_shrink(true);
            let granule = Granularity::new(G).unwrap();
            let kept = kept.min(granules) * G;
            let mut held = 0;
            for size in sizes.cover(granule, 0..granules * G) {
                if held >= kept {
                    break;
                }
                held += size;
            }
            prop_assert!(held - kept < FIRST.max(kept / PART));
        }
    }
}
