//! Holes of a region that read as zero.

use std::ops::Range;

use super::Region;
use super::fence::Fence;
use super::zeros::beside;
use crate::error::MemoryError;
use crate::own::Stream;

impl Region {
    /// Backs the holes of a range with zeros that can be read and not written: parts that no extent
    /// lies in. Parts that are pending free and have passed are given back first.
    ///
    /// Creates at most one physical for each power of two up to the largest alias
    /// ([`RegionBuilder::zero_extent`](super::RegionBuilder::zero_extent)), and makes `cuMemMap` and
    /// `cuMemSetAccess` for each alias. All or nothing.
    ///
    /// # Errors
    /// [`MemoryError`] when part of the range is pending free and in use, the mappings would be more
    /// than the region may have, or the driver refuses. Nothing has changed.
    pub fn back_with_zeros(&mut self, range: Range<u64>) -> Result<(), MemoryError> {
        self.check(&range)?;
        self.purge_in(&range)?;
        let holes = self.holes(&range);
        let lacking = holes.iter().flat_map(|hole| self.zeros.lacking(hole));
        let holes: Vec<Range<u64>> = lacking.collect();
        let granule = self.device().granule();
        let needed = holes
            .iter()
            .map(|hole| self.zeros.needed(granule, hole))
            .sum();
        self.afford(needed, 0)?;
        self.zeros.put(&mut self.space, &holes)
    }

    /// Takes the zeros under a range away again, if all work of the devices that can read them has
    /// passed. Returns the bytes of addresses that have nothing behind them any more.
    ///
    /// # Errors
    /// [`MemoryError`] while such work is running or queued, or when the driver refuses. Nothing
    /// has changed.
    pub fn remove_zeros(&mut self, range: Range<u64>) -> Result<u64, MemoryError> {
        let fence = self.fence_of_all();
        self.remove_zeros_with(&range, fence)
    }

    /// The same where only these streams read the zeros.
    ///
    /// # Errors
    /// As [`Self::remove_zeros`], and when a stream's device has no access.
    pub fn remove_zeros_after(
        &mut self,
        range: Range<u64>,
        streams: &[Stream],
    ) -> Result<u64, MemoryError> {
        let fence = self.fence_of(streams)?;
        self.remove_zeros_with(&range, fence)
    }

    fn remove_zeros_with(&mut self, range: &Range<u64>, fence: Fence) -> Result<u64, MemoryError> {
        self.check(range)?;
        let proof = self.zeros_are_unread(range, fence)?;
        let taken = self.zeros.take(&mut self.space, range, proof)?;
        let beside = beside(&taken, range);
        if let Err(error) = self.zeros.put(&mut self.space, &beside) {
            self.zeros.restore(&mut self.space, &taken);
            return Err(error);
        }
        let bytes = |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
        Ok(bytes(&taken) - bytes(&beside))
    }

    /// Bytes of addresses whose holes read as zero.
    #[must_use]
    pub fn zero_backed(&self) -> u64 {
        self.zeros.backed()
    }
}
