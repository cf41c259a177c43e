//! Aliases: the same memory at a second offset of a region.

use std::ops::Range;

use super::Region;
use crate::error::MemoryError;
use crate::extents::{Extent, PlaceError, Unmapped};

impl Region {
    /// Refuses an operation that would make two views of one memory differ.
    pub(super) fn check_unaliased(&self) -> Result<(), MemoryError> {
        match self.is_aliased() {
            true => Err(MemoryError::Aliased),
            false => Ok(()),
        }
    }

    /// Maps a committed range a second time at offset `to`, so that both ranges show the same bytes
    /// (`cuMemMap` and `cuMemSetAccess` for each extent). The second range is committed and can be
    /// decommitted by itself; the memory is released with the last of the two.
    ///
    /// # Coherence in kernels
    /// The device does not keep two addresses of one memory coherent within a kernel. A write
    /// through one address is visible through the other to the next operation that is ordered
    /// behind it: a launch on the same stream, or a launch that waits for an event. Within a
    /// kernel, `fence.proxy.alias` is required between the write and the read (PTX ISA 7.5, compute
    /// capability 7.0; CUDA C++ Programming Guide, "Virtual Aliasing Support").
    ///
    /// # Errors
    /// [`MemoryError`] when the range is not committed, cuts an extent or must be
    /// [unshared](Self::unshare) first, the second range is in use, or the driver refuses. Nothing
    /// has changed.
    pub fn alias(&mut self, range: Range<u64>, to: u64) -> Result<(), MemoryError> {
        self.check(&range)?;
        let (start, end) = (range.start, range.end);
        let second = to..to.saturating_add(end - start);
        self.check(&second)?;
        self.check_committed(&range)?;
        let extents: Vec<Extent> = self.space.extents_in(start, end).collect();
        self.check_whole(&range)?;
        // A writable alias would change the bytes that a fork shows.
        self.check_writable(&range)?;
        // What was withdrawn there counts as in use.
        let taken = self.with_withdrawn(|region| {
            let mut extents = region.space.extents_in(second.start, second.end);
            extents.next()
        });
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
        self.check_mapping_limit(extents.len() as u64, 0)?;
        let physicals: Vec<Unmapped> = extents
            .iter()
            .filter_map(|extent| self.space.physical_at(extent.offset))
            .map(Unmapped::fresh)
            .collect();
        let family = self.supply.family().cloned();
        if let Some(family) = &family {
            family.lend_mappings(physicals.len() as u64)?;
        }
        if let Err(failed) = self.space.place(second.start, physicals) {
            let PlaceError {
                error, physicals, ..
            } = failed;
            if let Some(family) = family {
                family.give_back(Vec::new(), physicals.len() as u64);
            }
            return Err(error);
        }
        if let Some(family) = family {
            let handles = extents.iter();
            let handles = handles.filter_map(|extent| self.space.handle_at(extent.offset));
            handles.for_each(|handle| family.shared.add_mapping(handle));
        }
        self.committed.insert(second);
        self.aliased = true;
        Ok(())
    }

    /// Returns `true` if some memory is mapped twice now.
    pub(super) fn is_aliased(&self) -> bool {
        self.memory() < self.mapped()
    }
}
