//! Handing the memory of a region to others.
//!
//! Whoever imports it can write to it for as long as it likes. So what was exported stays under its
//! addresses until it is decommitted, and is then released like all memory of a region: it is
//! neither moved nor shown by a fork.

use std::collections::BTreeSet;
use std::ops::Range;

use cuvmm_driver::{Exported, HandleTypes};

use super::Region;
use super::space::Extent;
use crate::error::MemoryError;
use crate::own::{Physical, one_type};

impl Region {
    /// Handles of the memory under a committed range, one for each extent
    /// (`cuMemExportToShareableHandle`), for another process to import: [`Physical::import`] with
    /// the extent's size.
    ///
    /// From then on [`relocate`](Self::relocate) and [`fork`](Self::fork) refuse the range, since
    /// whoever imported it keeps this memory and can write to it. It may be decommitted: the other
    /// side keeps its own reference, and the driver has the memory back when that is gone too.
    /// Committed again while it is pending free, the same memory is there again, with what the other
    /// side has written meanwhile.
    ///
    /// The region must have been built [`shareable`](super::RegionBuilder::shareable) for that
    /// type.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, cuts an extent or has to be
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
                handle_type,
                shareable: self.props.handle_types,
            });
        }
        let parts = self.parts(range)?;
        let physicals: Vec<&Physical> = parts.iter().map(|&(_, physical)| physical).collect();
        let handles = Physical::export_all(&physicals, handle_type)?;
        let extents = parts.iter().map(|&(extent, _)| extent);
        Ok(extents.zip(handles).collect())
    }

    /// The extents under a committed range that cuts none of them, each with its memory. Borrowed,
    /// so that a copy of somebody else's is not taken for a fork's.
    pub(crate) fn parts(&self, range: Range<u64>) -> Result<Vec<(Extent, &Physical)>, MemoryError> {
        self.check_committed(&range)?;
        self.check_whole(&range)?;
        // So nothing that is exported is ever a fork's too, and unsharing has nothing to refuse.
        self.check_writable(&range)?;
        Ok(self.space.parts_in(range.start, range.end).collect())
    }

    /// The extents that are committed in a range, each with its memory, which counts as exported
    /// from here on. Not what is pending free: its owner has given it up. Nothing if the range has to be [unshared](Self::unshare) first.
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
        Some(promised.collect())
    }

    /// Bytes of memory held that was exported, pending frees included; what is shown twice counts once.
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
