//! The same memory at a second place of the range.

use std::ops::Range;

use super::Region;
use super::place::{PlaceError, Unmapped};
use super::space::Extent;
use crate::error::MemoryError;

impl Region {
    /// Refuses what would make two views of one memory differ.
    pub(super) fn check_unaliased(&self) -> Result<(), MemoryError> {
        match self.is_aliased() {
            true => Err(MemoryError::Aliased),
            false => Ok(()),
        }
    }

    /// Shows a committed range a second time, from `to` on: both show the same bytes from now on
    /// (`cuMemMap` and `cuMemSetAccess` for each extent). The second showing is committed then, and
    /// decommitted for itself; the memory goes with the last.
    ///
    /// # What a kernel has to do
    /// The device does not keep two addresses of one memory coherent within a kernel: what is
    /// written through one is seen through the other by the next operation that is ordered behind
    /// it, a launch on the same stream or one that waits for an event. Within a kernel it takes
    /// `fence.proxy.alias` between the write and the read (PTX ISA 7.5, compute capability 7.0;
    /// CUDA C++ Programming Guide, "Virtual Aliasing Support").
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, cuts an extent or has to be
    /// [unshared](Self::unshare) first, something is at the second place, or the driver refuses.
    /// Nothing has changed.
    pub fn alias(&mut self, range: Range<u64>, to: u64) -> Result<(), MemoryError> {
        self.check(&range)?;
        let (start, end) = (range.start, range.end);
        let second = to..to.saturating_add(end - start);
        self.check(&second)?;
        self.check_committed(&range)?;
        let extents: Vec<Extent> = self.space.extents_in(start, end).collect();
        self.check_whole(&range)?;
        // A second showing that could be written would change what a fork has.
        self.check_writable(&range)?;
        let taken = self.space.extents_in(second.start, second.end).next();
        let zeros = self.zeros.meeting(&second).first().map(|zeros| zeros.start);
        let stuck = self.space.stuck_in(second.start, second.end) > 0;
        if let Some(taken) = taken
            .map(|extent| extent.offset)
            .or(zeros)
            .or(stuck.then_some(second.start))
        {
            return Err(MemoryError::Overlap {
                offset: to,
                size: end - start,
                taken,
            });
        }
        self.afford(extents.len() as u64, 0)?;
        let physicals: Vec<Unmapped> = extents
            .iter()
            .filter_map(|extent| self.space.physical_at(extent.offset))
            .map(Unmapped::fresh)
            .collect();
        self.space
            .place(second.start, physicals)
            .map_err(|PlaceError { error, .. }| error)?;
        self.committed.insert(second);
        self.aliased = true;
        Ok(())
    }

    /// Whether some memory is shown twice now.
    pub(super) fn is_aliased(&self) -> bool {
        self.memory() < self.space.bytes()
    }
}
