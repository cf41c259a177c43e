//! Moving what is committed to another place under the same addresses: to host memory when the
//! device has to be cleared, to the device when it is needed there.

use std::ops::Range;

use super::Region;
use super::fence::Unused;
use super::layout::reachable;
use super::place::Unmapped;
use super::space::Extent;
use crate::error::MemoryError;
use crate::own::{Place, Stream};

impl Region {
    /// Moves a committed range to another place: same addresses, same bytes, other memory. Extents
    /// that lie there already stay. Returns the bytes moved.
    ///
    /// Waits for all work of the devices that have access, copies on `stream` and waits for that.
    /// Work that is launched meanwhile must keep off the range. Per extent `cuMemCreate`, a copy,
    /// and unmapping and mapping twice. All or nothing.
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
        let mut new = vec![];
        for extent in moving {
            new.push((
                extent.offset,
                Unmapped::fresh(self.physical(extent.size, place)?),
            ));
        }
        let bytes = new.iter().map(|(_, unmapped)| unmapped.size()).sum();
        if bytes == 0 {
            return Ok(0);
        }
        let proof = Unused::after_drain(self.space.users())?;
        self.replace(new, stream, proof)?;
        Ok(bytes)
    }
}
