//! Checks of an operation on a range of a region, made before anything is changed.

use std::ops::Range;

use super::{Extent, Region};
use crate::error::{ArgumentError, MemoryError};
use crate::extents::Fence;
use crate::own::Stream;

impl Region {
    /// Refuses a range that is empty, not in whole granules, or not within the region.
    pub(crate) fn check(&self, range: &Range<u64>) -> Result<(), ArgumentError> {
        let covering = self.covering(range)?;
        if covering == *range {
            return Ok(());
        }
        Err(ArgumentError::MisalignedRange {
            start: range.start,
            end: range.end,
            granule: self.device().granularity(),
            covering_start: covering.start,
            covering_end: covering.end,
        })
    }

    /// Returns the range of all granules that a range of bytes touches. Refuses a range that is
    /// empty or leaves the region.
    pub(super) fn covering(&self, range: &Range<u64>) -> Result<Range<u64>, ArgumentError> {
        let Range { start, end } = *range;
        if start >= end {
            let what = "bytes";
            return Err(ArgumentError::Empty { what, start, end });
        }
        if end > self.size() {
            return Err(ArgumentError::bytes(start, end - start, self.size()));
        }
        let granule = self.device().granule();
        // The region's size is in whole granules.
        let end = granule.round_up(end).unwrap_or(self.size());
        Ok(granule.round_down(start)..end)
    }

    /// Refuses an invalid range, and a range that is not wholly committed.
    pub(super) fn check_committed(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        self.check(range)?;
        match self.is_committed(range.clone()) {
            true => Ok(()),
            false => Err(MemoryError::NotCommitted(range.clone())),
        }
    }

    pub(crate) fn check_whole(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        let cut = |extent: &Extent| extent.offset < range.start || extent.end() > range.end;
        match self.space.extents_in(range.start, range.end).find(cut) {
            Some(cut) => Err(MemoryError::CutsExtent(cut.offset..cut.end())),
            None => Ok(()),
        }
    }

    /// Refuses a range with read-only memory, such as forks share.
    pub(crate) fn check_writable(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        match self.is_read_only(range.clone()) {
            true => Err(MemoryError::ReadOnly(range.clone())),
            false => Ok(()),
        }
    }

    /// Refuses an operation that would move or share an exported extent.
    pub(super) fn check_unexported(&self, extents: &[Extent]) -> Result<(), MemoryError> {
        match self.space.exported().find(|kept| extents.contains(kept)) {
            Some(kept) => Err(MemoryError::Exported(kept.offset..kept.end())),
            None => Ok(()),
        }
    }

    /// Refuses `more` mappings beyond the region's limit, after `gone` others are unmapped.
    pub(super) fn check_mapping_limit(&self, more: u64, gone: u64) -> Result<(), MemoryError> {
        let held = self.mappings();
        let limit = self.mapping_limit;
        match (held + more).saturating_sub(gone) > limit {
            true => Err(MemoryError::Mappings {
                needed: more,
                held,
                limit,
            }),
            false => Ok(()),
        }
    }

    /// Refuses a range with quarantined memory.
    pub(crate) fn check_not_stuck(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        match self.space.stuck_in(range.start, range.end) {
            0 => Ok(()),
            bytes => Err(MemoryError::Quarantined {
                range: range.clone(),
                bytes,
            }),
        }
    }

    /// A fence over the work of these streams. Refuses a stream of a device without access.
    pub(super) fn fence_of(&self, streams: &[Stream]) -> Result<Fence, ArgumentError> {
        let known = |stream: &Stream| self.space.users().any(|user| user == stream.device());
        match streams.iter().all(known) {
            true => Ok(Fence::streams(streams.to_vec())),
            false => Err(ArgumentError::STREAM),
        }
    }

    /// A fence over the work of these streams and the work that the region has noted. Refuses a
    /// stream of a device without access.
    pub(super) fn fence_after(&self, streams: &[Stream]) -> Result<Fence, ArgumentError> {
        Ok(self.and_noted(self.fence_of(streams)?))
    }

    /// A fence extended to the work that the region has noted.
    pub(super) fn and_noted(&self, mut fence: Fence) -> Fence {
        // Another thread may have held the lock at the fork: a child never gets it.
        if !self.device().is_forked() {
            fence.merge(self.register.noted().fence());
        }
        fence
    }
}
