//! What an operation on a range of a region is refused for, before anything is done.

use std::ops::Range;

use super::fence::Fence;
use super::{Extent, Region};
use crate::error::{ArgumentError, MemoryError};
use crate::own::Stream;

impl Region {
    /// Refuses a range that is empty, not made of whole granules, or not within the region.
    pub(crate) fn check(&self, range: &Range<u64>) -> Result<(), ArgumentError> {
        let Range { start, end } = *range;
        if start >= end {
            let what = "bytes";
            return Err(ArgumentError::Empty { what, start, end });
        }
        let granularity = self.device().granularity();
        ArgumentError::aligned("the first byte of a range", start, granularity)?;
        ArgumentError::aligned("the end of a range in bytes", end, granularity)?;
        match end > self.size() {
            true => Err(ArgumentError::bytes(start, end - start, self.size())),
            false => Ok(()),
        }
    }

    /// Refuses a wrong range, and one that is not all committed.
    pub(crate) fn check_committed(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        self.check(range)?;
        match self.is_committed(range.clone()) {
            true => Ok(()),
            false => Err(MemoryError::not_committed(range)),
        }
    }

    /// Refuses a range that begins or ends within an extent.
    pub(crate) fn check_whole(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        let cut = |extent: &Extent| extent.offset < range.start || extent.end() > range.end;
        match self.space.extents_in(range.start, range.end).find(cut) {
            Some(Extent { offset, size, .. }) => Err(MemoryError::CutsExtent { offset, size }),
            None => Ok(()),
        }
    }

    /// Refuses a range with memory that this region may only read, as forks leave it.
    pub(crate) fn check_writable(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        match self.is_read_only(range.clone()) {
            true => Err(MemoryError::read_only(range)),
            false => Ok(()),
        }
    }

    /// Refuses an exported extent among those that the operation moves or shares.
    pub(super) fn check_unexported(&self, extents: &[Extent]) -> Result<(), MemoryError> {
        match self.space.exported().find(|kept| extents.contains(kept)) {
            Some(Extent { offset, size, .. }) => Err(MemoryError::Exported { offset, size }),
            None => Ok(()),
        }
    }

    /// Refuses a stream of another device than the region's own.
    pub(super) fn check_stream(&self, stream: &Stream) -> Result<(), ArgumentError> {
        match stream.device().is_same(self.device()) {
            true => Ok(()),
            false => Err(ArgumentError::STREAM),
        }
    }

    /// Refuses more mappings than the region may have, once some have gone.
    pub(super) fn afford(&self, more: u64, gone: u64) -> Result<(), MemoryError> {
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

    /// The work of these streams. Refuses one of a device without access.
    pub(super) fn fence_of(&self, streams: &[Stream]) -> Result<Fence, ArgumentError> {
        let known = |stream: &Stream| self.space.users().any(|user| user == stream.device());
        match streams.iter().all(known) {
            true => Ok(Fence::streams(streams.to_vec())),
            false => Err(ArgumentError::STREAM),
        }
    }
}
