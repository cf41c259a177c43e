//! Elements, bytes and tiles: which is where.

use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use super::SparseArray;
use crate::error::SparseError;
use crate::view::bytes_of;

/// A tile that is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tile {
    /// Its number, from 0.
    pub index: usize,
    /// Its elements; those of the last tile end where the array does.
    pub elements: Range<usize>,
    /// Its first address.
    pub address: DeviceAddress,
}

impl<T: Pod> SparseArray<T> {
    /// The tiles that are committed, in order.
    pub fn tiles(&self) -> impl Iterator<Item = Tile> + '_ {
        self.region
            .committed_in(0..self.region.size())
            .flat_map(|run| self.tiles_in(&run))
            .map(|index| {
                let first = self.tile_start(index);
                let next = self.tile_start(index.saturating_add(1));
                let base = self.region.address();
                let offset = bytes_of::<T>(first).unwrap_or_default();
                Tile {
                    index,
                    elements: first..next.min(self.len),
                    address: base.checked_add(offset).unwrap_or(base),
                }
            })
    }

    /// How many tiles there are addresses for.
    pub(super) fn tile_count(&self) -> usize {
        self.tiles_in(&(0..self.region.size())).len()
    }

    /// The tiles of a range of bytes that is made of whole ones.
    pub(super) fn tiles_in(&self, bytes: &Range<u64>) -> Range<usize> {
        let number = |at: u64| usize::try_from(self.tiling.number(at)).unwrap_or(usize::MAX);
        number(bytes.start)..number(bytes.end)
    }

    /// How many of them are committed.
    pub(super) fn committed_tiles_in(&self, bytes: &Range<u64>) -> usize {
        self.region
            .committed_in(bytes.clone())
            .map(|run| self.tiles_in(&run).len())
            .sum()
    }

    fn tile_start(&self, index: usize) -> usize {
        let per_tile = self.tiling.bytes().checked_div(size_of::<T>() as u64);
        let per_tile = per_tile.and_then(|count| usize::try_from(count).ok());
        index.saturating_mul(per_tile.unwrap_or_default())
    }

    /// The element that a byte belongs to.
    pub(super) fn element_at(&self, byte: u64) -> usize {
        let element = byte.checked_div(size_of::<T>() as u64);
        element
            .and_then(|element| usize::try_from(element).ok())
            .unwrap_or(self.len)
    }

    /// The bytes of a range of elements, which may be empty.
    pub(super) fn bytes(&self, range: &Range<usize>) -> Result<Range<u64>, SparseError> {
        let bytes = bytes_of::<T>(range.start).zip(bytes_of::<T>(range.end));
        match bytes {
            Some((start, end)) if range.start <= range.end && range.end <= self.len => {
                Ok(start..end)
            }
            _ => Err(SparseError::OutOfRange {
                range: range.clone(),
                len: self.len,
            }),
        }
    }

    /// The bytes of all tiles that a range touches, which is not empty.
    pub(super) fn touched(&self, range: &Range<usize>) -> Result<Range<u64>, SparseError> {
        let bytes = self.bytes(range)?;
        let end = self.tiling.above(bytes.end);
        match end {
            Some(end) if !bytes.is_empty() => Ok(self.tiling.below(bytes.start)..end),
            _ => Err(SparseError::OutOfRange {
                range: range.clone(),
                len: self.len,
            }),
        }
    }

    /// The bytes of all tiles that lie whole in a range; the last tile ends where the array does.
    pub(super) fn contained(&self, range: &Range<usize>) -> Result<Range<u64>, SparseError> {
        let bytes = self.bytes(range)?;
        let start = self.tiling.above(bytes.start);
        let start = start.unwrap_or(self.region.size());
        let end = if range.end == self.len {
            self.region.size()
        } else {
            self.tiling.below(bytes.end)
        };
        Ok(start..end.max(start))
    }
}
