//! Sizes: the only file that rounds.
//!
//! The driver accepts only multiples of the granularity; users specify bytes. Every conversion
//! between the two is here, checked, in 64 bits.
//!
//! Keeps I-81.

use std::ops::Range;

use crate::error::ArgumentError;

/// The end of a range of addresses, and the test whether an address is in it, for a type that has a
/// first address and a size in bytes.
macro_rules! bounds {
    ($range:ty) => {
        impl $range {
            /// Returns the address behind the last byte: that of `address()` plus `size()`.
            #[must_use]
            pub fn end(&self) -> cuvmm_driver::DeviceAddress {
                self.address() + self.size()
            }

            /// Returns `true` if the address is one of the `size()` bytes from `address()` on, with
            /// memory there or without.
            #[must_use]
            pub fn contains(&self, address: cuvmm_driver::DeviceAddress) -> bool {
                address - self.address() < self.size()
            }
        }
    };
}
pub(crate) use bounds;

/// The allocation granularity of a device: the granule in bytes, a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granularity(u64);

impl Granularity {
    /// Converts the granularity that the driver reported; `None` if it is not a power of two.
    #[must_use]
    pub(crate) const fn new(bytes: u64) -> Option<Self> {
        if bytes.is_power_of_two() {
            Some(Self(bytes))
        } else {
            None
        }
    }

    #[must_use]
    pub(crate) const fn bytes(self) -> u64 {
        self.0
    }

    /// The least whole number of granules that holds `bytes`, in bytes; `None` on overflow.
    #[must_use]
    pub(crate) const fn round_up(self, bytes: u64) -> Option<u64> {
        bytes.checked_next_multiple_of(self.0)
    }

    /// Rounds the argument `what` up to whole granules, in bytes.
    pub(crate) fn whole(self, what: &'static str, value: u64) -> Result<u64, ArgumentError> {
        let too_large = ArgumentError::Overflow { what, value };
        self.round_up(value).ok_or(too_large)
    }

    /// The most whole granules that fit in `bytes`, in bytes.
    #[must_use]
    pub(crate) const fn round_down(self, bytes: u64) -> u64 {
        bytes & !(self.0 - 1)
    }

    #[must_use]
    pub(crate) const fn divides(self, bytes: u64) -> bool {
        bytes & (self.0 - 1) == 0
    }

    /// The largest extent size that a commit of `bytes` may use: a power of two granules, at most
    /// `bytes` and at most `most`. `bytes` is at least a granule.
    #[must_use]
    pub(crate) const fn extent_within(self, bytes: u64, most: u64) -> u64 {
        let bound = if bytes < most { bytes } else { most };
        if bound < self.0 {
            self.0
        } else {
            1 << bound.ilog2()
        }
    }

    /// The largest power of two granules that is at most `bytes` and at most `most`; zero if that
    /// is less than a granule.
    #[must_use]
    pub(crate) const fn step(self, bytes: u64, most: u64) -> u64 {
        if bytes < self.0 || most < self.0 {
            0
        } else {
            self.extent_within(bytes, most)
        }
    }

    /// The least whole number of granules that holds `bytes` and a whole number of elements of
    /// `element` bytes, in bytes; `None` on overflow or if `element` is zero.
    #[must_use]
    pub(crate) const fn round_up_for(self, bytes: u64, element: u64) -> Option<u64> {
        if element == 0 {
            return None;
        }
        let (granule, odd) = (self.0.trailing_zeros(), element.trailing_zeros());
        let common = if granule < odd { granule } else { odd };
        match self.0.checked_mul(element >> common) {
            Some(unit) => match if bytes == 0 { 1 } else { bytes }.checked_next_multiple_of(unit) {
                Some(whole) => Some(whole),
                None => None,
            },
            None => None,
        }
    }

    /// The class of blocks that may exchange slots with one of `bytes`: the next power of two of
    /// granules; `None` on overflow.
    #[must_use]
    pub(crate) const fn class(self, bytes: u64) -> Option<u64> {
        match self.round_up(bytes) {
            Some(0) => Some(self.0),
            Some(whole) => whole.checked_next_power_of_two(),
            None => None,
        }
    }

    /// The class of adjacent blocks with `between` bytes (whole granules) from the end of one to
    /// the start of the next, such that the distance from start to start is a whole number of
    /// elements of `element` bytes: the usual class if it satisfies that, or else a power of two of
    /// the least possible distances. `None` on overflow or if `element` is zero.
    #[must_use]
    pub(crate) fn class_apart(self, bytes: u64, between: u64, element: u64) -> Option<u64> {
        let class = self.class(bytes)?;
        if class.checked_add(between)?.checked_rem(element)? == 0 {
            return Some(class);
        }
        let least = self.round_up_for(1, element)?;
        let wanted = self.round_up(bytes.max(1))?.checked_add(between)?;
        let distances = wanted.div_ceil(least).checked_next_power_of_two()?;
        least.checked_mul(distances)?.checked_sub(between)
    }
}

/// The size of a sparse array's tiles: whole granules and whole elements, at least one of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling(u64);

impl Tiling {
    /// The least tile of at least `bytes`; `None` on overflow.
    #[must_use]
    pub(crate) const fn new(granule: Granularity, bytes: u64, element: u64) -> Option<Self> {
        match granule.round_up_for(bytes, element) {
            Some(bytes) => Some(Self(bytes)),
            None => None,
        }
    }

    #[must_use]
    pub(crate) const fn bytes(self) -> u64 {
        self.0
    }

    /// The start of the tile that contains a byte.
    #[must_use]
    pub(crate) const fn below(self, byte: u64) -> u64 {
        byte - byte % self.0
    }

    /// The start of the first tile that begins at a byte or behind it; `None` on overflow.
    #[must_use]
    pub(crate) const fn above(self, byte: u64) -> Option<u64> {
        byte.checked_next_multiple_of(self.0)
    }

    /// The number of the tile that contains a byte.
    #[must_use]
    pub(crate) const fn number(self, byte: u64) -> u64 {
        byte / self.0
    }
}

/// The least multiple of a power of two that is at least `offset`; `None` on overflow.
#[must_use]
pub(crate) const fn aligned(offset: u64, alignment: u64) -> Option<u64> {
    offset.checked_next_multiple_of(alignment)
}

/// The range of `size` bytes from `offset`; `None` if it is empty, overflows or does not fit in
/// `0..within`.
#[must_use]
pub(crate) fn range_within(offset: u64, size: u64, within: u64) -> Option<Range<u64>> {
    let end = offset.checked_add(size)?;
    (size > 0 && end <= within).then_some(offset..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const G: Granularity = Granularity(2 << 20);

    #[test]
    fn whole_granules_of_whole_elements() {
        const MIB: u64 = 1 << 20;
        assert_eq!(G.round_up_for(1, 4), Some(2 * MIB));
        assert_eq!(G.round_up_for(2 * MIB + 1, 8), Some(4 * MIB));
        assert_eq!(G.round_up_for(1, 12), Some(6 * MIB));
        assert_eq!(G.round_up_for(7 * MIB, 12), Some(12 * MIB));
        assert_eq!(G.round_up_for(1, 8 * MIB), Some(8 * MIB));
        assert_eq!(
            (G.round_up_for(0, 1), G.round_up_for(1, 0)),
            (Some(2 * MIB), None)
        );
        assert_eq!(G.round_up_for(u64::MAX, 4), None);
        assert_eq!(G.round_up_for(1, u64::MAX), None);
    }

    #[test]
    fn a_granule_is_a_power_of_two() {
        assert_eq!(Granularity::new(0), None);
        assert_eq!(Granularity::new(3), None);
        assert_eq!(Granularity::new(4096).map(Granularity::bytes), Some(4096));
    }

    #[test]
    fn rounding_near_the_end_of_64_bits_is_refused() {
        assert_eq!(G.round_up(u64::MAX), None);
        assert_eq!(G.round_up(u64::MAX - G.0 + 1), Some(u64::MAX - G.0 + 1));
        assert_eq!(G.class(u64::MAX / 2 + 2), None);
        assert_eq!(G.class(0), Some(G.0));
        assert_eq!(G.class(3 * G.0), Some(4 * G.0));
        assert_eq!(G.class(4 * G.0 + 1), Some(8 * G.0));
    }

    #[test]
    fn blocks_side_by_side_are_whole_elements_apart() {
        let granules = |class: Option<u64>| class.map(|bytes| bytes / G.0);
        let apart =
            |bytes, between, element| granules(G.class_apart(bytes * G.0, between, element));
        // A class that divides is left as it is, even if only because of the bytes between.
        assert_eq!(apart(5, 0, 256), Some(8));
        assert_eq!(apart(7, 4 * G.0, 3 * G.0), Some(8));
        // Heads of 96 and of 80 elements of two bytes.
        assert_eq!((apart(1, 0, 192), apart(4, 0, 192)), (Some(3), Some(6)));
        assert_eq!((apart(5, 0, 160), apart(11, 0, 160)), (Some(5), Some(20)));
        assert_eq!(apart(8, 2 * G.0, 192), Some(10));
        assert_eq!(apart(0, 0, 3), Some(3));
        assert_eq!(
            (apart(1, 0, 0), G.class_apart(1, 0, u64::MAX)),
            (None, None)
        );
        assert_eq!(G.class_apart(u64::MAX / 2 + 2, 0, 3), None);
        assert_eq!(G.class_apart(1, u64::MAX, 1), None);
    }

    #[test]
    fn ranges_that_leave_their_bounds_are_refused() {
        assert_eq!(range_within(0, 0, 8), None);
        assert_eq!(range_within(1, 7, 8), Some(1..8));
        assert_eq!(range_within(1, 8, 8), None);
        assert_eq!(range_within(u64::MAX, 2, u64::MAX), None);
    }

    proptest! {
        // I-81
        #[test]
        fn rounding_holds_its_bytes_and_wastes_less_than_a_granule(bytes in 0u64..1 << 62) {
            let up = G.round_up(bytes).unwrap();
            prop_assert!(G.divides(up) && up >= bytes && up - bytes < G.0);
            let down = G.round_down(bytes);
            prop_assert!(G.divides(down) && down <= bytes && bytes - down < G.0);
        }
    }
}
