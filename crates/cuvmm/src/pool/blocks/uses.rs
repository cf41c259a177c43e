//! The check that every use of a block's memory passes: copies, leases with an access,
//! registrations, dma-bufs, tensors and slices for other libraries, handles for other processes,
//! and publications.
//!
//! One locked section checks the use and counts the lease, so that the block cannot be put to
//! sleep, moved or exported in between. While the lease lives the check stays valid, with one
//! exception: a [fork](super::sharing::fork) made later shares the memory, and
//! [`Block::fork`](crate::pool::Block::fork) says who must not write then.
//!
//! Keeps I-45.

use std::ops::Range;

use super::Blocks;
use super::slots::{BlockPlace, Slot};
use crate::error::{ArgumentError, MemoryError};
use crate::own::Access;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// A copy with this access, which is waited for.
    Copy(Access),
    /// A use with this access through the block's addresses, while the lease lives.
    Lend(Access),
    /// The memory is given to another process or device, which can write to it without end.
    Export,
}

impl Use {
    fn writes(self) -> bool {
        match self {
            Self::Copy(access) | Self::Lend(access) => access == Access::ReadWrite,
            Self::Export => true,
        }
    }
}

impl Blocks {
    pub(super) fn admit(
        &mut self,
        place: &BlockPlace,
        wanted: Use,
        range: &Range<u64>,
        capturing: bool,
    ) -> Result<(), MemoryError> {
        self.check(place, wanted, range, capturing)?;
        self.take_lease(place.slot);
        if wanted == Use::Export
            && let Some(slot) = self.slots.get_mut(place.slot)
        {
            // If nothing is exported before the last lease ends, its end resets the mark.
            slot.exported = true;
        }
        Ok(())
    }

    pub(super) fn check(
        &self,
        place: &BlockPlace,
        wanted: Use,
        range: &Range<u64>,
        capturing: bool,
    ) -> Result<(), MemoryError> {
        if capturing && matches!(wanted, Use::Copy(_)) {
            return Err(MemoryError::Capturing);
        }

        let Some(slot) = self.slots.get(place.slot) else {
            return Err(MemoryError::NotCommitted(range.clone()));
        };
        slot.check_awake()?;
        if wanted == Use::Export && range.is_empty() {
            return Err(ArgumentError::Zero("bytes to be exported").into());
        }
        if !slot.has(range) {
            return Err(MemoryError::NotCommitted(range.clone()));
        }
        let bytes = slot.bound();
        if wanted.writes() && !range.is_empty() && range.start < bytes {
            return Err(MemoryError::ReadOnly(0..bytes));
        }
        Ok(())
    }

    /// Checks that a block has no leases besides the caller's `own`. Their holders may write.
    pub(super) fn check_unlent(&self, place: &BlockPlace, own: u64) -> Result<(), MemoryError> {
        let slot = self.slots.get(place.slot);
        match slot.map_or(0, |slot| slot.leases.saturating_sub(own)) {
            0 => Ok(()),
            leases => Err(MemoryError::Leased(leases)),
        }
    }

    /// Notes that exported memory of a leased block may be written up to the end of its extents: a
    /// zeroed block has to zero the memory that it grows over there.
    pub(super) fn note_export(&mut self, place: &BlockPlace) {
        let Some(slot) = self.slots.get_mut(place.slot) else {
            return;
        };
        let last = slot.space.exported().last();
        let end = last.map_or(0, |extent| extent.end());
        if let Some(block) = &mut slot.block {
            block.reach = block.reach.max(end);
            block.ever = block.ever.max(block.used);
        }
    }
}

impl Slot {
    /// Returns `true` if there is memory under all of a range.
    fn has(&self, range: &Range<u64>) -> bool {
        if range.is_empty() {
            return true;
        }
        // Memory is a prefix of a slot, unless a roll-back failed.
        if !self.broken {
            return range.end <= self.space.bytes();
        }
        let extents = self.space.extents_in(range.start, range.end);
        let end = extents.fold(range.start, |end, extent| match extent.offset <= end {
            true => end.max(extent.end()),
            false => end,
        });
        range.end <= end
    }
}
