//! Counts of the blocks in use that touch each extent.
//!
//! A *plane* is a set of tensors whose blocks have equal bytes. They grow and shrink together, so
//! they have one count for the extents at the same place of each. In interleaved layouts there is
//! one tensor of whole blocks; in layer-major layout there is one for each layer and part.

use std::collections::BTreeMap;
use std::ops::Range;

/// Tensors with equal bytes a block.
#[derive(Debug)]
pub(super) struct Plane {
    /// The bytes of a block in each tensor.
    stride: u64,
    /// The bytes of each tensor, in whole granules.
    length: u64,
    /// The offsets of the tensors in the addresses of the cache.
    bases: Vec<u64>,
    /// For each extent of a tensor, the uses of blocks that touch it.
    counts: Vec<u32>,
}

/// The extents of a cache.
#[derive(Debug)]
pub(super) struct Planes {
    /// The bytes of an extent, a power of two.
    extent: u64,
    planes: Vec<Plane>,
    in_use: u64,
}

/// The extents at one place of all tensors of a plane, which are empty together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) bytes: u64,
    pub(super) uses: u32,
    /// The blocks that touch them.
    pub(super) blocks: Range<u32>,
}

impl Plane {
    /// The extents that a block touches.
    const fn touched(&self, extent: u64, number: u32) -> Range<usize> {
        // A power of two, by which no division is needed.
        let shift = extent.trailing_zeros();
        let start = number as u64 * self.stride;
        let last = (start + self.stride - 1) >> shift;
        (start >> shift) as usize..last as usize + 1
    }

    /// The bytes of the extent at an index, from the start of a tensor.
    fn bytes_of(&self, extent: u64, at: usize) -> Range<u64> {
        let start = at as u64 * extent;
        start..(start + extent).min(self.length)
    }

    /// Adds the ranges of the extents at an index in all tensors.
    fn push(&self, extent: u64, at: usize, ranges: &mut Vec<Range<u64>>) {
        let Range { start, end } = self.bytes_of(extent, at);
        ranges.extend(self.bases.iter().map(|base| base + start..base + end));
    }

    fn held(&self, extent: u64, at: usize) -> u64 {
        let Range { start, end } = self.bytes_of(extent, at);
        (end - start) * self.bases.len() as u64
    }
}

impl Planes {
    /// Returns the extents of tensors, each with its offset, the bytes of a block and all its bytes.
    pub(super) fn new(extent: u64, tensors: impl IntoIterator<Item = (u64, u64, u64)>) -> Self {
        let mut planes = BTreeMap::new();
        for (base, stride, length) in tensors {
            let plane = planes.entry(stride).or_insert_with(|| Plane {
                stride,
                length,
                bases: Vec::new(),
                counts: vec![0; length.div_ceil(extent) as usize],
            });
            plane.bases.push(base);
        }
        Self {
            extent,
            planes: planes.into_values().collect(),
            in_use: 0,
        }
    }

    /// The bytes of extents that blocks in use touch.
    pub(super) const fn in_use(&self) -> u64 {
        self.in_use
    }

    /// Counts a use of a block. Adds the ranges of the extents that had none.
    pub(super) fn enter(&mut self, number: u32, entered: &mut Vec<Range<u64>>) {
        for plane in &mut self.planes {
            for at in plane.touched(self.extent, number) {
                if let Some(count) = plane.counts.get_mut(at) {
                    *count += 1;
                    if *count == 1 {
                        self.in_use += plane.held(self.extent, at);
                        plane.push(self.extent, at, entered);
                    }
                }
            }
        }
    }

    /// Ends a use of a block. Adds the ranges of the extents that have none any more.
    pub(super) fn leave(&mut self, number: u32, emptied: &mut Vec<Range<u64>>) {
        for plane in &mut self.planes {
            for at in plane.touched(self.extent, number) {
                if let Some(count) = plane.counts.get_mut(at) {
                    *count -= 1;
                    if *count == 0 {
                        self.in_use -= plane.held(self.extent, at);
                        plane.push(self.extent, at, emptied);
                    }
                }
            }
        }
    }

    /// The extents that these blocks touch, those whose count `chosen` accepts: for each plane their
    /// indices.
    fn touched(
        &self,
        numbers: impl Iterator<Item = u32> + Clone,
        chosen: fn(u32) -> bool,
    ) -> impl Iterator<Item = (&Plane, Vec<usize>)> {
        self.planes.iter().map(move |plane| {
            let touched = numbers
                .clone()
                .flat_map(|it| plane.touched(self.extent, it));
            let chosen = touched.filter(|&at| plane.counts.get(at).is_some_and(|&it| chosen(it)));
            let mut chosen: Vec<usize> = chosen.collect();
            chosen.sort_unstable();
            chosen.dedup();
            (plane, chosen)
        })
    }

    fn bytes_of<'a>(&self, extents: impl Iterator<Item = (&'a Plane, Vec<usize>)>) -> u64 {
        let held = |plane: &Plane, at: &usize| plane.held(self.extent, *at);
        let of_plane = |(plane, indices): (&Plane, Vec<usize>)| -> u64 {
            indices.iter().map(|at| held(plane, at)).sum()
        };
        extents.map(of_plane).sum()
    }

    /// The bytes of the extents that no block in use touches, and that these blocks touch.
    pub(super) fn missing(&self, numbers: impl Iterator<Item = u32> + Clone) -> u64 {
        self.bytes_of(self.touched(numbers, |uses| uses == 0))
    }

    /// The bytes of the extents that these blocks touch, in use or not.
    pub(super) fn under(&self, numbers: impl Iterator<Item = u32> + Clone) -> u64 {
        self.bytes_of(self.touched(numbers, |_| true))
    }

    /// The bytes of the extents that have these uses of blocks and no other.
    pub(super) fn used_by(&self, uses: impl Iterator<Item = u32> + Clone) -> u64 {
        let alone = self.planes.iter().map(|plane| {
            let touched = uses.clone().flat_map(|it| plane.touched(self.extent, it));
            let mut touched: Vec<usize> = touched.collect();
            touched.sort_unstable();
            let alone = touched
                .chunk_by(|one, other| one == other)
                .filter_map(|same| {
                    let (&at, uses) = (same.first()?, same.len());
                    (plane.counts.get(at).copied() == u32::try_from(uses).ok()).then_some(at)
                });
            (plane, alone.collect())
        });
        self.bytes_of(alone)
    }

    /// The ranges of the extents that no block in use touches, and that these blocks touch, those that
    /// are entered together as one, in order.
    pub(super) fn unused(&self, numbers: &[u32]) -> Vec<Vec<Range<u64>>> {
        let planes = self.touched(numbers.iter().copied(), |uses| uses == 0);
        let columns = planes.flat_map(|(plane, unused)| {
            unused.into_iter().map(move |at| {
                let mut ranges = Vec::new();
                plane.push(self.extent, at, &mut ranges);
                ranges
            })
        });
        columns.collect()
    }

    /// The extents that blocks in use touch, those that are empty together as one.
    pub(super) fn columns(&self, blocks: u32) -> impl Iterator<Item = Column> {
        self.planes.iter().flat_map(move |plane| {
            let used = plane.counts.iter().enumerate();
            used.filter(|&(_, &uses)| uses > 0).map(move |(at, &uses)| {
                let Range { start, end } = plane.bytes_of(self.extent, at);
                let last = ((end - 1) / plane.stride).min(u64::from(blocks) - 1);
                Column {
                    bytes: plane.held(self.extent, at),
                    uses,
                    blocks: (start / plane.stride) as u32..last as u32 + 1,
                }
            })
        })
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_is_entered_by_the_first_block_that_touches_it_and_emptied_by_the_last() {
        // Blocks of 6 bytes in extents of 4; the last extent has 2 bytes.
        let mut planes = Planes::new(4, [(100, 6, 18)]);
        let (mut entered, mut emptied) = (Vec::new(), Vec::new());
        planes.enter(0, &mut entered);
        assert_eq!(entered, [100..104, 104..108]);
        planes.enter(2, &mut entered);
        assert_eq!(entered.split_off(2), [112..116, 116..118]);
        assert_eq!(planes.missing([1, 1].into_iter()), 4);
        assert_eq!(planes.under([1, 1, 2].into_iter()), 14);
        assert_eq!(planes.unused(&[1, 1]), [[108..112]]);
        assert_eq!(planes.used_by([0].into_iter()), 8);
        assert_eq!(planes.used_by([2, 2].into_iter()), 0);
        planes.enter(1, &mut entered);
        assert_eq!(entered.split_off(2), [108..112]);
        assert_eq!(planes.in_use(), 18);
        assert_eq!(planes.used_by([0].into_iter()), 4);
        assert_eq!(planes.used_by([1, 0].into_iter()), 12);
        planes.leave(1, &mut emptied);
        assert_eq!(emptied, [108..112]);
        planes.leave(0, &mut emptied);
        assert_eq!(emptied.split_off(1), [100..104, 104..108]);
        let columns: Vec<Column> = planes.columns(3).collect();
        assert_eq!(columns[0].blocks, 2..3);
        assert_eq!((columns.len(), planes.in_use()), (2, 6));
    }

    #[test]
    fn tensors_with_equal_bytes_are_counted_once() {
        let tensors = [(0, 2, 16), (16, 2, 16), (48, 1, 8), (32, 2, 16)];
        let mut planes = Planes::new(8, tensors);
        let mut ranges = Vec::new();
        planes.enter(1, &mut ranges);
        assert_eq!(ranges, [48..56, 0..8, 16..24, 32..40]);
        planes.enter(4, &mut ranges);
        assert_eq!(ranges.split_off(4), [8..16, 24..32, 40..48]);
        assert_eq!(planes.in_use(), 56);
        let columns: Vec<Column> = planes.columns(8).collect();
        let known = [(8, 2, 0..8), (24, 1, 0..4), (24, 1, 4..8)];
        let known = known.map(|(bytes, uses, blocks)| Column {
            bytes,
            uses,
            blocks,
        });
        assert_eq!(columns, known);
    }
}
