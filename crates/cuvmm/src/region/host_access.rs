//! What the host's processors reach of a region: nothing before they ask, since access for them takes
//! several times as long to give as access for the device alone.

use std::ops::Range;

use cuvmm_driver::{Location, LocationKind};

use super::Region;
use super::space::{Extent, Space};
use crate::error::MemoryError;

impl Space {
    /// Lets the host's processors in to extents of host memory that meet a range, where they may do what
    /// devices may.
    pub(super) fn let_host_in(&mut self, start: u64, end: u64) -> Result<(), MemoryError> {
        let range = self.covering(start, end);
        for (_, placed) in self.extents.range_mut(range) {
            let host = placed.host_grant().filter(|_| !placed.host);
            if let Some(host) = host {
                placed.mapping.set_access(&[host.at_most(placed.most)])?;
                placed.host = true;
            }
        }
        Ok(())
    }
}

impl Region {
    /// Where the host finds a committed range that lies in host memory. Lets the host's processors in to
    /// extents where they have no access yet (`cuMemSetAccess` for each, 18 to 26 ms for 1 GiB on an
    /// H200's machine); an extent that was moved, unshared or newly made since then is closed to them again. Waits for
    /// a copy that a failed move left on its way, and for what parts of the extents were withdrawn after.
    ///
    /// Having the pointer is harmless. Before it is used, the caller sees to it that the range stays
    /// committed and where it is, and that no work writes there meanwhile.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, part of it lies on a device, or the driver
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
        self.space.let_host_in(range.start, range.end)?;
        let address = self.address().checked_add(offset);
        let address = address.and_then(|address| usize::try_from(address.0).ok());
        Ok(std::ptr::with_exposed_provenance_mut(
            address.unwrap_or_default(),
        ))
    }
}
