//! The values that are summed: every sum is known, and a value at the wrong place is detected.

use std::ops::Range;

/// The period of the values: a prime, so that they do not repeat at a power of two of elements.
const PERIOD: u64 = 65_521;

/// The number of elements that are checked in each place.
pub(super) const LOOKED_AT: u64 = 256;

/// Returns an element of a rank. The sum over eight ranks is an integer below 2^24, which an `f32`
/// holds exactly, whatever the order of the additions.
pub(super) fn element(rank: usize, index: u64) -> f32 {
    (index % PERIOD) as f32 * (rank as f32 + 1.0)
}

/// Returns the sum of an element over the ranks.
pub(super) fn sum(ranks: usize, index: u64) -> f32 {
    (0..ranks).map(|rank| element(rank, index)).sum()
}

/// Returns the ranges that are checked in a buffer of `elements` elements: at its start and end,
/// around each seam, and around each quarter.
pub(super) fn places(elements: u64, seams: &[u64]) -> Vec<Range<u64>> {
    let looked_at = LOOKED_AT.min(elements);
    let around = |middle: u64| {
        let start = middle.saturating_sub(looked_at / 2);
        let start = start.min(elements - looked_at);
        start..start + looked_at
    };
    let quarters = (0..=4).map(|quarter| elements / 4 * quarter);
    let seams = seams.iter().copied().filter(|&seam| seam < elements);
    let mut middles: Vec<u64> = quarters.chain(seams).chain([elements]).collect();
    middles.sort_unstable();
    middles.dedup();
    let mut places: Vec<Range<u64>> = middles.into_iter().map(around).collect();
    places.dedup();
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sums_are_exact() {
        for ranks in 1..=8 {
            let most = sum(ranks, PERIOD - 1);
            assert!(most < 16_777_216.0, "{most}");
            let whole = (1..=ranks as u64).sum::<u64>() * (PERIOD - 1);
            assert_eq!(most as u64, whole);
        }
        assert_ne!(element(0, 1 << 20), element(0, 1 << 21));
        assert_eq!(sum(4, 7), 70.0);
    }

    #[test]
    fn the_ends_and_the_seams_are_looked_at() {
        let places = places(1 << 20, &[1 << 19, 3 << 17, 1 << 21]);
        assert_eq!(places.first(), Some(&(0..256)));
        assert_eq!(places.last(), Some(&((1 << 20) - 256..1 << 20)));
        for seam in [1 << 19, 3 << 17] {
            let across = |place: &&Range<u64>| place.start < seam && seam < place.end;
            assert!(places.iter().any(|place| across(&place)), "{seam}");
        }
        let few = super::places(4, &[2]);
        assert!(few.iter().all(|place| *place == (0..4)), "{few:?}");
    }

    proptest! {
        #[test]
        fn no_place_leaves_the_buffer(elements in 1u64..1 << 30, seam in 0u64..1 << 30) {
            for place in places(elements, &[seam]) {
                prop_assert!(place.start < place.end && place.end <= elements);
            }
        }
    }
}
