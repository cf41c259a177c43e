//! Holes of a region that are backed with zeros.

use std::ops::Range;

use super::Region;
use crate::error::MemoryError;
use crate::extents::{Failure, Fence, Unused, beside};
use crate::own::Stream;

impl Region {
    /// Refuses a change of the zeros that overlap a range unless a fence is complete; returns the
    /// proof.
    pub(super) fn zeros_are_unread(
        &self,
        range: &Range<u64>,
        mut fence: Fence,
    ) -> Result<Unused, MemoryError> {
        if self.zeros.meeting(range).is_empty() {
            return Ok(Unused::never_used());
        }
        let (start, end) = (range.start, range.end);
        fence
            .poll()
            .map_err(|cause| MemoryError::range(start, end - start, cause))?;
        let Some(proof) = fence.proof() else {
            return Err(MemoryError::PendingFree {
                range: start..end,
                bytes: end - start,
            });
        };
        Ok(proof)
    }

    /// Maps read-only zeros into the holes of a range, which are the parts without an extent. Parts
    /// that are pending free with a complete fence are purged first.
    ///
    /// Creates at most one physical for each power of two up to the largest alias
    /// ([`RegionBuilder::zero_extent`](super::RegionBuilder::zero_extent)), and makes `cuMemMap`
    /// and `cuMemSetAccess` for each alias. All or nothing.
    ///
    /// # Errors
    /// [`MemoryError`] when part of the range is pending free and its fence is incomplete, the
    /// mappings would exceed the region's limit, or the driver refuses. Nothing has changed.
    pub fn back_with_zeros(&mut self, range: Range<u64>) -> Result<(), MemoryError> {
        self.supply.check_no_tenant("backing holes with zeros")?;
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
        self.check_mapping_limit(needed, 0)?;
        self.zeros.put(&self.space, &holes)
    }

    /// Unmaps the zeros under a range if all work of the devices that can read them is complete.
    /// Returns the bytes of addresses that now have no memory.
    ///
    /// # Errors
    /// [`MemoryError`] while such work is running or queued, or when the driver refuses. Nothing
    /// has changed.
    pub fn remove_zeros(&mut self, range: Range<u64>) -> Result<u64, MemoryError> {
        let fence = self.fence_of_all();
        self.remove_zeros_behind(&range, fence)
    }

    /// Unmaps the zeros under a range, given that only `streams` read them. Otherwise like
    /// [`remove_zeros`](Self::remove_zeros).
    ///
    /// # Errors
    /// Those of [`Self::remove_zeros`], and when a stream's device has no access.
    pub fn remove_zeros_after(
        &mut self,
        range: Range<u64>,
        streams: &[Stream],
    ) -> Result<u64, MemoryError> {
        let fence = self.fence_of(streams)?;
        self.remove_zeros_behind(&range, fence)
    }

    /// Unmaps the zeros under a range behind the work of a fence, which covers all that may read
    /// them.
    pub(crate) fn remove_zeros_behind(
        &mut self,
        range: &Range<u64>,
        fence: Fence,
    ) -> Result<u64, MemoryError> {
        self.check(range)?;
        let proof = self.zeros_are_unread(range, fence)?;
        let taken = self.zeros.take(&self.space, range, proof)?;
        let beside = beside(&taken, range);
        if let Err(failure) = Failure::of(|| self.zeros.put(&self.space, &beside)) {
            self.restore_zeros(&taken);
            return Err(failure.into_error());
        }
        let bytes = |ranges: &[Range<u64>]| ranges.iter().map(|r| r.end - r.start).sum::<u64>();
        Ok(bytes(&taken) - bytes(&beside))
    }

    /// Backs the parts of ranges with zeros again, after a failed operation that had unmapped them,
    /// that have neither an extent nor zeros.
    pub(super) fn restore_zeros(&mut self, taken: &[Range<u64>]) {
        let holes = taken.iter().flat_map(|range| self.holes(range));
        let lacking = holes.flat_map(|hole| self.zeros.lacking(&hole));
        let lacking: Vec<Range<u64>> = lacking.collect();
        self.zeros.restore(&self.space, &lacking);
    }

    /// Returns the bytes of addresses that are backed with zeros.
    #[must_use]
    pub fn zero_backed(&self) -> u64 {
        self.zeros.backed()
    }
}
