//! What keeps the memory of a block in place.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::core::Core;
use super::gate::Use;
use super::ids::BlockPlace;
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::own::{Access, ExportMark, Stream};
use crate::region::{Extent, Keeper, Registration};

/// While a lease lives, nothing under its block is unmapped or handed on, whatever becomes of the
/// block: a batch that is still being prepared, or another library that has registered the memory,
/// holds one. A block that [sleeps](crate::sleep) has nothing that a lease could keep: one that was
/// taken then keeps the memory from when the block is awake. [`Block::lease_for`](super::Block::lease_for) is an error there.
///
/// When the last lease ends, memory that was freed meanwhile becomes pending free. A lease that was used
/// on streams other than the block's home stream says so by [`record_use`](Self::record_use)
/// before it ends.
pub struct Lease {
    core: Arc<Core>,
    place: BlockPlace,
    size: u64,
}

impl Lease {
    pub(super) fn new(core: Arc<Core>, place: BlockPlace, size: u64) -> Self {
        core.lock_with(place.slot).take_lease(place.slot);
        Self { core, place, size }
    }

    /// A lease that has been counted already.
    pub(super) const fn counted(core: Arc<Core>, place: BlockPlace, size: u64) -> Self {
        Self { core, place, size }
    }

    /// The device that the memory lies on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// The block's size in bytes when the lease was taken.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    pub(super) const fn core(&self) -> &Arc<Core> {
        &self.core
    }

    pub(super) const fn place(&self) -> &BlockPlace {
        &self.place
    }

    /// The block's first address.
    #[must_use]
    pub const fn address(&self) -> cuvmm_driver::DeviceAddress {
        self.place.address
    }

    /// Notes that a stream uses the memory: it is handed on only after that stream's work.
    ///
    /// # Errors
    /// [`CallError::WrongDriver`] when the stream is another driver's.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        self.core
            .lock_with(self.place.slot)
            .record_use(self.place.slot, stream)
    }

    /// The lease as a [`Registration`], for registering the memory with a NIC or with NCCL: the list
    /// of the extents that are there now. What the block grows by later needs another.
    ///
    /// # Errors
    /// [`MemoryError`] when the block sleeps or has lost memory, when the context is lost, and in a
    /// forked child. The lease ends then.
    pub fn register(self) -> Result<Registration, MemoryError> {
        let kept = self.admit(Use::Lend(Access::Read), 0..self.size)?;
        Ok(kept.registered())
    }

    /// The extents under a lease that the gate has let through, as a registration.
    pub(super) fn registered(self) -> Registration {
        let extents = self.core.marked_extents(&self.place);
        let device = self.core.device.clone();
        Registration::new(device, extents, Arc::new(self))
    }

    /// Notes that work which is on no stream of this library uses the memory: it is handed on only
    /// after all work of the device that is queued when the last lease ends.
    pub fn record_use_anywhere(&self) {
        let mut state = self.core.lock_with(self.place.slot);
        state.record_use_anywhere(self.place.slot);
    }

    /// The streams whose work may use the memory, the block's home first; nothing where that is all
    /// work of the device, or the block has been freed.
    #[must_use]
    pub fn streams(&self) -> Option<Vec<Stream>> {
        self.core
            .lock_with(self.place.slot)
            .streams(self.place.slot)
    }

    /// Whether a capture guard of its pool lives.
    #[cfg(feature = "dlpack")]
    pub(crate) fn is_capturing(&self) -> bool {
        self.core.is_capturing()
    }

    /// Every extent that the lease keeps in place, in order.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.core.extents(&self.place)
    }
}

impl Core {
    /// A lease for a use of a range of a block, or of what an earlier lease kept of one.
    pub(super) fn admit(
        self: &Arc<Self>,
        (place, size): (BlockPlace, u64),
        wanted: Use,
        range: Range<u64>,
    ) -> Result<Lease, MemoryError> {
        self.device.usable()?;
        self.lock_with(place.slot).admit(&place, wanted, &range)?;
        Ok(Lease::counted(Arc::clone(self), place, size))
    }

    /// Every extent of the slot that a block is or was in, in order.
    pub(crate) fn extents(&self, place: &BlockPlace) -> Vec<Extent> {
        let state = self.lock_with(place.slot);
        let slot = state.slot(place.slot);
        slot.map_or_else(Vec::new, |slot| slot.space.extents().collect())
    }

    /// The same, each with what marks its memory as exported.
    pub(crate) fn marked_extents(&self, place: &BlockPlace) -> Vec<(Extent, ExportMark)> {
        let state = self.lock_with(place.slot);
        let slot = state.slot(place.slot);
        slot.map_or_else(Vec::new, |slot| {
            slot.space.marked_in(0, slot.space.size()).collect()
        })
    }
}

impl Lease {
    /// Another lease, for a use of a range of the memory.
    pub(crate) fn admit(&self, wanted: Use, range: Range<u64>) -> Result<Self, MemoryError> {
        let of = (*self.place(), self.size());
        self.core().admit(of, wanted, range)
    }
}

impl Keeper for Lease {
    fn close(&self) -> Result<(), CallError> {
        // It ends when it is dropped, and nothing is given back to the driver by that.
        Ok(())
    }

    fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        Self::record_use(self, stream)
    }

    fn may_export(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        // This lease keeps the mark that the gate makes.
        drop(self.admit(Use::Export, range.clone())?);
        Ok(())
    }

    fn exported(&self) {
        let mut state = self.core.lock_with(self.place.slot);
        state.note_export(&self.place);
    }
}

impl Clone for Lease {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.core), self.place, self.size)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.core.device.forked().is_none() {
            self.core.end_lease(&self.place);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}
