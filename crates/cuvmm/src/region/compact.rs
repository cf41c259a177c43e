//! Compaction: gives the withdrawn parts of extents back that are committed in part.

use super::Region;
use super::supply::Planned;
use crate::error::MemoryError;
use crate::extents::{Extent, New, Unused};
use crate::own::Stream;
use crate::pool::Compaction;

impl Region {
    /// Gives back all memory that is not committed, also the withdrawn part of an extent: committed
    /// bytes of such an extent are copied to smaller extents at the same addresses. Afterwards the
    /// region holds what is committed, in whole granules, except for the extents that
    /// [`Compaction`] counts as left in place: [registered](Self::register) ones as
    /// [`in_use`](Compaction::in_use), [exported](Self::export) ones, and those that a
    /// [fork](Self::fork) or an [alias](Self::alias) shows too. In a tenant, the pool gets the
    /// memory.
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
    pub fn compact(&mut self, stream: &Stream) -> Result<Compaction, MemoryError> {
        stream.check_on(self.device())?;
        let mut report = Compaction {
            extents_before: self.mappings(),
            ..Compaction::default()
        };
        let proof = Unused::after_drain(self.space.users())?;
        report.given_back += self.purge()?;
        for extent in self.partly_committed() {
            match self.stays(&extent) {
                Some(Stays::Registered) => report.in_use += 1,
                Some(Stays::Exported) => report.exported += 1,
                Some(Stays::Shared) => report.shared += 1,
                None => match self.cut(&extent, stream, proof) {
                    Ok(copied) => {
                        report.steps += 1;
                        report.copied += copied;
                        report.given_back += extent.size - copied;
                    }
                    Err(error) if error.is_out_of_memory() => report.no_space += 1,
                    Err(error) => return Err(error),
                },
            }
        }
        report.extents_after = self.mappings();
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

    fn stays(&self, extent: &Extent) -> Option<Stays> {
        let range = extent.offset..extent.end();
        if self.unregistered(&range).is_err() {
            Some(Stays::Registered)
        } else if self.check_unexported(std::slice::from_ref(extent)).is_err() {
            Some(Stays::Exported)
        } else if self.is_aliased() || !self.space.is_own(extent.offset) {
            Some(Stays::Shared)
        } else {
            None
        }
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

/// Why an extent stays in place.
enum Stays {
    Registered,
    Exported,
    Shared,
}
