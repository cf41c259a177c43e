//! Access of the host's processors to a region. It is given only on request, since it takes several
//! times as long as access for the device alone.

use std::ops::Range;

use cuvmm_driver::{Location, LocationKind};

use super::Region;
use crate::error::MemoryError;
use crate::extents::Extent;

impl Region {
    /// Returns a host pointer to a committed range in host memory. Gives the host's processors
    /// access to extents where they have none (`cuMemSetAccess` for each, 18 to 26 ms for 1 GiB on
    /// the host of an H200). The processors have no access to an extent that is later relocated,
    /// unshared or newly created. Waits for a copy that a failed relocation left running, and for
    /// the fences of withdrawn parts of the extents.
    ///
    /// Having the pointer is harmless. Before using it, the caller must ensure that the range stays
    /// committed and in place, and that no work writes to it meanwhile.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, part of it is on a device, or the driver
    /// refuses access.
    pub fn host_pointer(&mut self, range: Range<u64>) -> Result<*mut u8, MemoryError> {
        let (offset, size) = (range.start, range.end.saturating_sub(range.start));
        self.check_copy(offset, size)?;
        let elsewhere = |extent: &Extent| extent.location.kind != LocationKind::HOST_NUMA;
        if let Some(extent) = self
            .space
            .extents_in(range.start, range.end)
            .find(elsewhere)
        {
            return Err(MemoryError::Elsewhere {
                offset: extent.offset,
                found: extent.location,
                wanted: Location::HOST,
            });
        }
        let extents: Vec<u64> = self
            .space
            .extents_in(range.start, range.end)
            .map(|extent| extent.offset)
            .collect();
        for offset in extents {
            if let Some(withdrawn) = self.withdrawn.get_mut(&offset) {
                withdrawn.wait()?;
            }
        }
        self.space.grant_host(range.start, range.end)?;
        let address = self.address().checked_add(offset);
        let address = address.and_then(|address| usize::try_from(address.0).ok());
        Ok(std::ptr::with_exposed_provenance_mut(
            address.unwrap_or_default(),
        ))
    }
}
