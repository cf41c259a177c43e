//! Growth rules: how far memory is committed ahead of its use, for regions and blocks.
//!
//! Pure arithmetic. Available memory and the charges of tenants are checked elsewhere.
//!
//! Keeps I-82.

use crate::extent_sizes::ExtentSizes;
use crate::size::Granularity;

/// The amount of memory that a block gets when it outgrows the memory it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Growth {
    /// Exactly as much as requested: one extent for each granule if a block grows by granules.
    Exact,
    /// Up to one nth of the block's size, rounded down to a power of two, if that is more than
    /// requested; 8 by default. With a mapper up to twice as much is committed ahead. Memory ahead
    /// of its use is precommitted: charged to the tenant, counted separately, never reclaimed from
    /// other tenants for this purpose, and given up before a request is refused.
    Part(u64),
}

impl Default for Growth {
    fn default() -> Self {
        Self::Part(8)
    }
}

/// The most bytes that any region adds by doubling: 16 MiB.
const DOUBLED: u64 = 16 << 20;

/// The part of a device's memory up to which a region doubles that has the device to itself: a
/// 512th, 279 MiB of an H200 (`docs/decisions/17-growth-moves-exchanges.md` has the figures).
const PART_OF_DEVICE: u64 = 512;

/// The steps in which memory grows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Steps {
    granule: Granularity,
    growth: Growth,
    /// The most bytes added by doubling.
    doubled: u64,
    /// The sizes of extents; the largest is the most bytes added at once.
    sizes: ExtentSizes,
}

impl Steps {
    /// The steps of a region. A region doubles while it is small, since each step costs as much as
    /// an extent, and no other user needs the memory that its owner has ahead. `memory` is that of
    /// the device, or 0 if the region shares a limit with other users.
    pub(crate) fn of_region(granule: Granularity, largest: u64, memory: u64) -> Self {
        Self {
            granule,
            growth: Growth::default(),
            doubled: DOUBLED.max(memory / PART_OF_DEVICE),
            sizes: ExtentSizes::up_to(largest),
        }
    }

    /// The steps of a block. A block never doubles: the memory that it has ahead is charged to its
    /// tenant, under a limit shared with other tenants, so it is bounded by part of its size.
    pub(crate) const fn of_block(granule: Granularity, growth: Growth, sizes: ExtentSizes) -> Self {
        Self {
            granule,
            growth,
            doubled: 0,
            sizes,
        }
    }

    /// The step of memory of `size` bytes: a power of two granules, or zero.
    const fn step(&self, size: u64) -> u64 {
        let Growth::Part(nth) = self.growth else {
            return 0;
        };
        let part = size / if nth > 0 { nth } else { 1 };
        let twice = if size < self.doubled {
            size
        } else {
            self.doubled
        };
        let step = if part > twice { part } else { twice };
        self.granule.step(step, self.sizes.largest())
    }

    /// The new end of memory that ends at `held` and must reach `need`: a step of memory of `size`
    /// bytes behind `held`, but not beyond `most`, or `need` if that is more.
    pub(crate) fn end(&self, size: u64, held: u64, need: u64, most: u64) -> u64 {
        held.saturating_add(self.step(size)).min(most).max(need)
    }

    /// The size of the one extent to commit behind `held` bytes, of which `used` are used: a step,
    /// at least a granule. `None` if growth is exact, `most` is reached, or nothing is used yet.
    pub(crate) fn extent(&self, used: u64, held: u64, most: u64) -> Option<u64> {
        if self.growth == Growth::Exact || held >= most || used == 0 {
            return None;
        }
        let step = self.step(used).max(self.granule.bytes());
        Some(step.min(self.granule.extent_within(most - held, self.sizes.at(held))))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const G: u64 = 2 << 20;
    const LARGEST: u64 = 64 * G;

    fn granule() -> Granularity {
        Granularity::new(G).unwrap()
    }

    fn block(growth: Growth) -> Steps {
        Steps::of_block(granule(), growth, ExtentSizes::up_to(LARGEST))
    }

    #[test]
    fn a_region_doubles_and_then_grows_by_an_eighth() {
        let steps = Steps::of_region(granule(), LARGEST, 0);
        let grown = |held: u64| steps.end(held * G, held * G, (held + 1) * G, u64::MAX) / G;
        assert_eq!([0, 1, 2, 3, 8].map(grown), [1, 2, 4, 5, 16]);
        assert_eq!([16, 64, 127, 128, 255].map(grown), [24, 72, 135, 144, 271]);
        assert_eq!(grown(512), 576);
        assert_eq!(grown(4096), 4096 + 64, "no more than the largest extent");
    }

    #[test]
    fn a_region_doubles_up_to_a_512th_of_the_device() {
        let grown = |memory: u64, held: u64| {
            let steps = Steps::of_region(granule(), 512 * G, memory);
            steps.end(held * G, held * G, (held + 1) * G, u64::MAX) / G
        };
        // A 512th of 4,096 granules is less than 16 MiB.
        assert_eq!(
            [8, 16, 127].map(|held| grown(4096 * G, held)),
            [16, 24, 135]
        );
        // That of 71,577 granules, an H200's, is 139, of which a step has the power of two below.
        let held = [1, 8, 64, 128, 256, 1023, 1024, 2048];
        let after = [2, 16, 128, 256, 384, 1151, 1152, 2304];
        assert_eq!(held.map(|held| grown(71_577 * G, held)), after);
    }

    #[test]
    fn a_block_grows_by_a_part_of_its_size_or_by_what_it_needs() {
        let grown = |growth, to: u64| {
            let steps = block(growth);
            steps.end(to * G, (to - 1) * G, to * G, 1000 * G) / G
        };
        assert_eq!(
            [1, 8, 16, 31].map(|to| grown(Growth::Part(8), to)),
            [1, 8, 17, 32]
        );
        assert_eq!([17, 33].map(|to| grown(Growth::Part(8), to)), [18, 36]);
        assert_eq!(
            [1, 16, 999].map(|to| grown(Growth::Exact, to)),
            [1, 16, 999]
        );
        assert_eq!(grown(Growth::Part(0), 4), 7, "no part is all of it");
        assert_eq!(
            grown(Growth::Part(1), 990),
            1000,
            "no more than it may have"
        );
    }

    #[test]
    fn growth_never_ends_before_what_is_needed_nor_overflows() {
        let steps = block(Growth::Part(1));
        assert_eq!(steps.end(G, 0, 4 * G, 2 * G), 4 * G);
        assert_eq!(steps.end(u64::MAX, u64::MAX - G, 1, u64::MAX), u64::MAX);
        assert_eq!(steps.end(0, 0, 0, 0), 0);
    }

    #[test]
    fn an_extent_ahead_fits_behind_what_is_held() {
        let steps = block(Growth::Part(8));
        assert_eq!(steps.extent(G, G, 100 * G), Some(G), "at least a granule");
        assert_eq!(steps.extent(0, 0, 100 * G), None, "addresses only");
        assert_eq!(steps.extent(40 * G, 40 * G, 100 * G), Some(4 * G));
        assert_eq!(steps.extent(40 * G, 97 * G, 100 * G), Some(2 * G));
        assert_eq!(steps.extent(40 * G, 100 * G, 100 * G), None);
        assert_eq!(steps.extent(4096 * G, 4096 * G, u64::MAX), Some(LARGEST));
        assert_eq!(block(Growth::Exact).extent(40 * G, 40 * G, 100 * G), None);
        let sizes = ExtentSizes::up_to(LARGEST).expect_shrink(true);
        let steps = Steps::of_block(granule(), Growth::Part(1), sizes);
        let sizes = [16, 32, 64].map(|held| steps.extent(held * G, held * G, 1000 * G));
        assert_eq!(sizes, [Some(8 * G), Some(8 * G), Some(16 * G)]);
    }
}
