//! Moving what is committed to another place under the same addresses: to host memory when the
//! device has to be cleared, to the device when it is needed there.

use std::ops::Range;

use super::Region;
use super::fence::Unused;
use super::layout::reachable;
use super::space::Extent;
use crate::error::MemoryError;
use crate::own::{Place, Stream};

impl Region {
    /// Moves a committed range to another place: same addresses, same bytes, other memory. Extents
    /// that lie there already stay. Returns the bytes moved.
    ///
    /// Waits for all work of the devices that have access, copies on `stream` and waits for that.
    /// Work that is launched meanwhile must keep off the range. Memory is there twice until all of it
    /// has moved. All or nothing, unless the driver cannot even say whether a copy to host memory has
    /// ended: what is copied by then lies in its new place, and other streams find other bytes there
    /// until it has ended.
    ///
    /// Per extent `cuMemCreate`, a copy, and unmapping and mapping twice, while the next extent is being
    /// copied. Host memory comes from the region's [`HostExtents`](super::HostExtents) as far as they
    /// reach, and goes there when it is moved away from. Without them finding, pinning and clearing it
    /// takes 200 to 340 ms for 1 GiB on an H200's machine, and copying it 20 ms.
    ///
    /// The host's processors have no access to what has moved to host memory before
    /// [`host_pointer`](Self::host_pointer) gives it to them.
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, cuts an extent or is
    /// [registered](Self::register), the region shows memory twice, part of the range was
    /// [exported](Self::export) and would move, the place cannot be reached or has no memory, or the
    /// driver refuses.
    pub fn relocate(
        &mut self,
        range: Range<u64>,
        place: &Place,
        stream: &Stream,
    ) -> Result<u64, MemoryError> {
        self.check_stream(stream)?;
        self.check_committed(&range)?;
        self.unregistered(&range)?;
        self.check_unaliased()?;
        for user in self.space.users() {
            reachable(user, place)?;
        }
        self.check_whole(&range)?;
        let location = place.location();
        let moving: Vec<Extent> = self
            .space
            .extents_in(range.start, range.end)
            .filter(|extent| extent.location != location)
            .collect();
        self.check_unexported(&moving)?;
        if moving.is_empty() {
            return Ok(0);
        }
        let bytes = moving.iter().map(|extent| extent.size).sum();
        let mut new = vec![];
        let proof = self
            .overwritten(&moving, place, &mut new)
            .and_then(|()| Ok(Unused::after_drain(self.space.users())?));
        match proof {
            Ok(proof) => self.replace(new, stream, proof)?,
            Err(error) => {
                let unused = new.into_iter().map(|(_, unmapped)| unmapped);
                unused.for_each(|unmapped| self.let_go(unmapped));
                return Err(error);
            }
        }
        Ok(bytes)
    }
}
