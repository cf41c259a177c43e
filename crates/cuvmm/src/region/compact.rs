//! Compaction: gives the withdrawn parts of extents back that are committed in part.

use super::Region;
use super::kept::Kept;
use super::supply::Planned;
use crate::error::MemoryError;
use crate::extents::{Extent, New, Unused};
use crate::own::Stream;

/// The result of a compaction of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Compacted {
    /// Extents that were replaced by smaller ones.
    pub steps: u64,
    /// Mappings when the compaction began.
    pub extents_before: u64,
    /// Mappings now.
    pub extents_after: u64,
    /// Bytes copied to new extents.
    pub copied: u64,
    /// Bytes given back: to the driver, or to the pool of the region's tenant.
    pub given_back: u64,
    /// The memory that stays although it is not committed.
    pub kept: Kept,
}

impl Region {
    /// Gives back all memory that is not committed, also the withdrawn part of an extent: committed
    /// bytes of such an extent are copied to smaller extents at the same addresses. Afterwards the
    /// region holds what is committed, in whole granules, and what the result's
    /// [`kept`](Compacted::kept) says, with the reasons. In a tenant, the pool gets the memory.
    ///
    /// Waits for all work of the devices with access, copies on `stream` and waits for the copies.
    /// Work launched meanwhile must not use the region. Extents of which the least is copied come
    /// first; there must be memory for the copy of one at a time.
    ///
    /// Makes `cuMemCreate`, a copy, and two mappings for each new extent, and `cuMemUnmap` and
    /// `cuMemRelease` for the old.
    ///
    /// # Errors
    /// [`MemoryError`] when `stream` belongs to another device or captures, or the driver refuses.
    /// Steps before the failure stay done.
    pub fn compact(&mut self, stream: &Stream) -> Result<Compacted, MemoryError> {
        stream.check_on(self.device())?;
        let mut report = Compacted {
            extents_before: self.mappings(),
            ..Compacted::default()
        };
        let proof = Unused::after_drain(self.space.users())?;
        report.given_back += self.give_back_pending()?;
        let aliased = self.is_aliased();
        for extent in self.partly_committed() {
            if self.stays(&extent, aliased).is_some() {
                continue;
            }
            match self.cut(&extent, stream, proof) {
                Ok(copied) => {
                    report.steps += 1;
                    report.copied += copied;
                    report.given_back += extent.size - copied;
                }
                // The extent stays, and others may need less.
                Err(error) if error.is_out_of_memory() => {}
                Err(error) => return Err(error),
            }
        }
        report.extents_after = self.mappings();
        report.kept = self.kept();
        Ok(report)
    }

    /// Returns the extents that are committed in part, those first of which the least is.
    fn partly_committed(&self) -> Vec<Extent> {
        let parts = |extent: &Extent| self.committed.parts(extent.offset..extent.end());
        let live = |extent: &Extent| parts(extent).map(|part| part.end - part.start).sum::<u64>();
        let partly = |extent: &Extent| (1..extent.size).contains(&live(extent));
        let mut found: Vec<Extent> = self.space.extents().filter(partly).collect();
        found.sort_by_key(live);
        found
    }

    /// Copies the committed parts of an extent to smaller extents, which replace it. Returns the
    /// bytes copied.
    fn cut(&mut self, extent: &Extent, stream: &Stream, proof: Unused) -> Result<u64, MemoryError> {
        let parts = self.committed.parts(extent.offset..extent.end());
        let pieces = parts.flat_map(|part| self.extents_for(&part.clone(), part));
        let pieces: Vec<(u64, u64)> = pieces.collect();
        self.check_mapping_limit(pieces.len() as u64, 1)?;
        let new = self.memory_for_parts(extent, &pieces)?;
        self.replace(new, stream, proof)?;
        self.withdrawn.remove(&extent.offset);
        Ok(pieces.iter().map(|&(_, size)| size).sum())
    }

    /// Obtains memory of these offsets and sizes, at the place of an extent.
    fn memory_for_parts(&self, of: &Extent, pieces: &[(u64, u64)]) -> Result<New, MemoryError> {
        if let Some(family) = self.supply.family() {
            let sizes: Vec<u64> = pieces.iter().map(|&(_, size)| size).collect();
            let offsets = pieces.iter().map(|&(offset, _)| offset);
            return Ok(offsets.zip(family.lend_exactly(&sizes)?).collect());
        }
        let place = self.place_at(of.offset);
        let planned = pieces.iter().map(|&(offset, size)| Planned {
            offset,
            size,
            place: place.clone(),
        });
        self.create(&planned.collect::<Vec<_>>())
    }
}
