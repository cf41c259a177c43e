//! Exports the memory of a region to other processes.
//!
//! An importer can write to the memory while it holds it. So exported memory is neither relocated
//! nor forked: it stays under its addresses until it is decommitted, and is then released like all
//! memory of a region.

use std::collections::BTreeSet;
use std::ops::Range;

use cuvmm_driver::{Exported, HandleTypes};

use super::Region;
use crate::error::MemoryError;
use crate::extents::Extent;
use crate::own::{Physical, one_type};

impl Region {
    /// Exports the memory of a committed range (`cuMemExportToShareableHandle`): one handle for
    /// each extent, for another process to import by [`Physical::import`] with the extent's size.
    ///
    /// Afterwards [`relocate`](Self::relocate) and [`fork`](Self::fork) refuse the range, since the
    /// importer keeps this memory and can write to it. The range may be decommitted: the importer
    /// keeps its own reference, and the driver frees the memory when the importer has released it
    /// too. Committing the range again while it is pending free maps the same memory, with the
    /// bytes that the importer has written meanwhile.
    ///
    /// The region must have been built [`shareable`](super::RegionBuilder::shareable) for the
    /// handle type.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, cuts an extent or must be
    /// [unshared](Self::unshare) first, or the driver refuses. Nothing has changed.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(
        &self,
        range: Range<u64>,
        handle_type: HandleTypes,
    ) -> Result<Vec<(Extent, Exported)>, MemoryError> {
        one_type(handle_type)?;
        if !self.props.handle_types.contains(handle_type) {
            return Err(MemoryError::NotShareable {
                what: "the memory",
                handle_type,
                shareable: self.props.handle_types,
            });
        }
        let parts = self.parts(range)?;
        let physicals: Vec<&Physical> = parts.iter().map(|&(_, physical)| physical).collect();
        let handles = Physical::export_all(&physicals, handle_type)?;
        self.note_exported(physicals.into_iter());
        let extents = parts.iter().map(|&(extent, _)| extent);
        Ok(extents.zip(handles).collect())
    }

    /// The extents of a committed range that cuts no extent, each with its physical. The physicals
    /// are borrowed, since a clone would count as a fork's share.
    pub(crate) fn parts(&self, range: Range<u64>) -> Result<Vec<(Extent, &Physical)>, MemoryError> {
        self.check_committed(&range)?;
        self.check_whole(&range)?;
        // So no exported memory ever belongs to a fork too, and unsharing need not refuse it.
        self.check_writable(&range)?;
        Ok(self.space.parts_in(range.start, range.end).collect())
    }

    /// The committed extents of a range, each with its physical, which is marked as exported.
    /// Extents that are pending free are left out, since the owner has given them up. `None` if the
    /// range must be [unshared](Self::unshare) first.
    pub(crate) fn promise(&self, range: Range<u64>) -> Option<Vec<(Extent, Physical)>> {
        if self.is_read_only(range.clone()) {
            return None;
        }
        let parts = self.space.parts_in(range.start, range.end);
        let in_use =
            parts.filter(|(extent, _)| self.committed.overlaps(&(extent.offset..extent.end())));
        let promised = in_use.map(|(extent, physical)| {
            physical.mark_exported();
            (extent, physical.clone())
        });
        let promised: Vec<_> = promised.collect();
        self.note_exported(promised.iter().map(|(_, physical)| physical));
        Some(promised)
    }

    /// Counts exported memory in the region's tenant, if any.
    fn note_exported<'a>(&self, physicals: impl Iterator<Item = &'a Physical>) {
        if let Some(family) = self.supply.family() {
            let physicals = physicals.map(|it| (it.as_raw(), it.size()));
            family.shared.add_exported(physicals);
        }
    }

    /// Returns the exported bytes that the region holds, pending frees included unless it is in a
    /// tenant. Memory that is mapped twice counts once.
    #[must_use]
    pub fn exported(&self) -> u64 {
        let mut seen = BTreeSet::new();
        self.space
            .parts_in(0, self.size())
            .filter(|(_, physical)| physical.is_exported() && seen.insert(physical.as_raw()))
            .map(|(extent, _)| extent.size)
            .sum()
    }
}
