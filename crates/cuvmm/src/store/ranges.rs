//! Ranges of a block's bytes, whose contents lie one behind the other in host memory.

use std::ops::Range;

/// Ranges in order, none of which is empty or touches another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Sorts ranges and joins those that touch or overlap. Leaves empty ones out.
    pub(crate) fn of(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let ranges = ranges.into_iter().filter(|range| !range.is_empty());
        let mut ranges: Vec<Range<u64>> = ranges.collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, last| {
            let joined = next.start <= last.end;
            if joined {
                last.end = last.end.max(next.end);
            }
            joined
        });
        Self(ranges)
    }

    /// Returns the range of the first `bytes` bytes.
    pub(crate) fn all(bytes: u64) -> Self {
        Self::of(std::iter::once(0..bytes))
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    pub(crate) fn as_slice(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Returns what of the ranges lies before an offset.
    pub(crate) fn before(&self, end: u64) -> Self {
        Self::of(self.0.iter().map(|range| range.start..range.end.min(end)))
    }

    /// Returns where bytes at an offset begin, if the bytes of the ranges lie one behind the other and
    /// these are all in one of them.
    pub(super) fn position(&self, offset: u64, bytes: u64) -> Option<u64> {
        let end = offset.checked_add(bytes)?;
        let mut before = 0;
        for range in &self.0 {
            if range.start <= offset && end <= range.end {
                return Some(before + offset - range.start);
            }
            before += range.end - range.start;
        }
        (bytes == 0).then_some(before)
    }

    /// Cuts the ranges, in order, into groups of `size` bytes, more than zero. The last group may
    /// have less.
    pub(super) fn groups(&self, size: u64) -> impl Iterator<Item = Vec<Range<u64>>> {
        let mut ranges = self.0.iter().cloned();
        let mut rest = None;
        std::iter::from_fn(move || {
            let (mut group, mut room) = (Vec::new(), size);
            while room > 0 {
                let Some(Range { start, end }) = rest.take().or_else(|| ranges.next()) else {
                    break;
                };
                let cut = end.min(start.saturating_add(room));
                room -= cut - start;
                rest = (cut < end).then_some(cut..end);
                group.push(start..cut);
            }
            (!group.is_empty()).then_some(group)
        })
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
mod tests {
    use super::Ranges;

    #[test]
    fn ranges_are_sorted_and_joined() {
        let ranges = Ranges::of([40..50, 0..10, 20..20, 5..12, 12..14, 45..46]);
        assert_eq!(ranges.as_slice(), [0..14, 40..50]);
        assert_eq!(ranges.bytes(), 24);
        assert_eq!(ranges.before(45).as_slice(), [0..14, 40..45]);
        assert_eq!(ranges.before(40).as_slice(), [0..14]);
        assert_eq!(ranges.before(0), Ranges::default());
    }

    #[test]
    fn bytes_lie_one_behind_the_other() {
        let ranges = Ranges::of([10..20, 30..33]);
        for (offset, bytes, position) in [(10, 10, 0), (12, 3, 2), (30, 3, 10), (32, 1, 12)] {
            assert_eq!(ranges.position(offset, bytes), Some(position));
        }
        for (offset, bytes) in [(9, 2), (19, 2), (20, 1), (15, 18), (33, 1), (u64::MAX, 1)] {
            assert_eq!(ranges.position(offset, bytes), None);
        }
        assert!(ranges.position(20, 0).is_some() && Ranges::all(0).position(0, 0).is_some());
    }

    #[test]
    fn groups_have_all_bytes_once() {
        let groups = |ranges: Ranges| ranges.groups(8).collect::<Vec<_>>();
        let ranges = Ranges::of([0..3, 10..12, 20..40]);
        let expected = [
            vec![0..3, 10..12, 20..23],
            vec![23..31],
            vec![31..39],
            vec![39..40],
        ];
        assert_eq!(groups(ranges), expected);
        assert_eq!(groups(Ranges::of([0..8])), [vec![0..8]]);
        assert!(groups(Ranges::default()).is_empty());
        assert_eq!(groups(Ranges::of([u64::MAX - 3..u64::MAX])).len(), 1);
    }
}
