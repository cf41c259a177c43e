//! Conversions between elements, bytes and tiles.

use std::ops::Range;

use bytemuck::Pod;
use cuvmm_driver::DeviceAddress;

use super::SparseArray;
use crate::elements::Elements;
use crate::error::{ArgumentError, ContainerError};

/// A tile of a sparse array.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tile {
    /// Its number, from 0.
    pub index: usize,
    /// Its elements; those of the last tile end at the array's end.
    pub elements: Range<usize>,
    /// Its first address.
    pub address: DeviceAddress,
}

impl<T: Pod> SparseArray<T> {
    /// Returns the committed tiles, in order.
    pub fn tiles(&self) -> impl Iterator<Item = Tile> + '_ {
        let region = &self.elements.region;
        region
            .committed_in(0..region.size())
            .flat_map(|run| self.tiles_in(&run))
            .map(|index| self.tile_at(index))
    }

    /// Returns the tile with a number, whether it is committed or not.
    ///
    /// # Errors
    /// [`ArgumentError::OutOfRange`] when there are not as many tiles.
    pub fn tile(&self, index: usize) -> Result<Tile, ArgumentError> {
        let len = self.tile_count();
        if index >= len {
            let range = index..index.saturating_add(1);
            return Err(ArgumentError::outside("tiles", &range, len));
        }
        Ok(self.tile_at(index))
    }

    fn tile_at(&self, index: usize) -> Tile {
        let first = self.tile_start(index);
        let next = self.tile_start(index.saturating_add(1));
        Tile {
            index,
            elements: first..next.min(self.len()),
            address: self.elements.address_of(first),
        }
    }

    pub(super) const fn tile_bytes(&self, index: usize) -> Range<u64> {
        let start = index as u64 * self.tiling.bytes();
        start..start + self.tiling.bytes()
    }

    pub(super) fn tile_count(&self) -> usize {
        self.tiles_in(&(0..self.elements.region.size())).len()
    }

    /// The tiles of a range of bytes that consists of whole tiles.
    pub(super) fn tiles_in(&self, bytes: &Range<u64>) -> Range<usize> {
        let number = |at: u64| usize::try_from(self.tiling.number(at)).unwrap_or(usize::MAX);
        number(bytes.start)..number(bytes.end)
    }

    pub(super) fn committed_tiles_in(&self, bytes: &Range<u64>) -> usize {
        self.elements
            .region
            .committed_in(bytes.clone())
            .map(|run| self.tiles_in(&run).len())
            .sum()
    }

    fn tile_start(&self, index: usize) -> usize {
        index.saturating_mul(Elements::<T>::count(self.tiling.bytes()))
    }

    /// The bytes of all tiles that a non-empty range touches.
    pub(super) fn touched(&self, range: &Range<usize>) -> Result<Range<u64>, ContainerError> {
        let bytes = self.elements.bytes(range)?;
        let end = self.tiling.above(bytes.end);
        match end {
            Some(end) if !bytes.is_empty() => Ok(self.tiling.below(bytes.start)..end),
            _ => Err(self.elements.outside(range).into()),
        }
    }

    /// The bytes of all tiles that are wholly in a range; the last tile ends at the array's end.
    pub(super) fn contained(&self, range: &Range<usize>) -> Result<Range<u64>, ContainerError> {
        let bytes = self.elements.bytes(range)?;
        let start = self.tiling.above(bytes.start);
        let start = start.unwrap_or(self.elements.region.size());
        let end = if range.end == self.len() {
            self.elements.region.size()
        } else {
            self.tiling.below(bytes.end)
        };
        Ok(start..end.max(start))
    }
}
