//! Leases, which keep the memory of a block in place.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::slots::{BlockPlace, SlotId};
use super::uses::Use;
use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::extents::{Extent, Registration, RegistrationOwner};
use crate::own::{Access, ExportMark, Stream};
use crate::pool::core::Core;

/// Keeps the memory of a block in place. While a lease lives, no memory under its block is unmapped
/// or reused, even if the block is dropped. Take one for a batch that is still being prepared, or
/// for memory that another library has registered.
///
/// When the last lease ends, memory that was freed meanwhile becomes pending free. If a lease was
/// used on streams other than the block's home stream, record them with
/// [`record_use`](Self::record_use) before it ends.
///
/// A lease on a [sleeping](crate::sleep) block, under which nothing is mapped, keeps the memory
/// from the moment the block is awake; [`Block::lease_for`](crate::pool::Block::lease_for) fails for such
/// a block.
///
/// # Examples
/// ```rust
/// # use cuvmm::{Device, Limit, Pool, Stream};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let opened = cuvmm::driver::auto::open(cuvmm::driver::auto::OpenOptions::new())?;
/// # let device = Device::open(opened.driver, 0)?;
/// # let pool = Pool::builder(&device).limit(Limit::Bytes(64 << 20)).build()?;
/// # let tenant = pool.tenant("model").register()?;
/// let stream = Stream::new(&device)?;
/// let block = tenant.allocate_on(&stream, 8 << 20)?;
/// let lease = block.lease();
/// drop(block); // freed, but kept mapped and charged
/// assert_eq!(tenant.stats().leased, 8 << 20);
///
/// let other = Stream::new(&device)?;
/// lease.record_use(&other)?; // launch kernels that use `lease.address()` on `other`
/// drop(lease); // the memory is reused after the work of both streams
/// assert_eq!(tenant.stats().leased, 0);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "pin")]
pub struct Lease {
    core: Arc<Core>,
    place: BlockPlace,
    size: u64,
}

impl Lease {
    pub(super) fn new(core: Arc<Core>, place: BlockPlace, size: u64) -> Self {
        core.lock_with(place.slot).blocks.take_lease(place.slot);
        Self { core, place, size }
    }

    /// Makes a lease that has been counted already.
    pub(super) const fn counted(core: Arc<Core>, place: BlockPlace, size: u64) -> Self {
        Self { core, place, size }
    }

    /// Returns the device of the memory.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Returns the size in bytes that the block had when the lease was taken.
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

    /// Returns the block's first address.
    #[must_use]
    pub const fn address(&self) -> cuvmm_driver::DeviceAddress {
        self.place.address
    }

    /// Records that a stream uses the memory: it is reused only after that stream's work.
    ///
    /// # Errors
    /// [`CallError::WrongDriver`] when the stream belongs to another driver.
    pub fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        self.core.record_use(self.place.slot, stream)
    }

    /// Turns the lease into a [`Registration`] for registering the memory with a NIC or with NCCL:
    /// the list of the extents under the block now. Memory that the block grows by later needs
    /// another registration.
    ///
    /// # Errors
    /// [`MemoryError`] when the block sleeps or has lost memory, when the context is lost, and in a
    /// forked child. The lease then ends.
    pub fn register(self) -> Result<Registration, MemoryError> {
        let kept = self.admit(Use::Lend(Access::Read), 0..self.size)?;
        Ok(kept.registered())
    }

    /// Makes a registration of the extents under an [admitted](super::uses) lease.
    pub(super) fn registered(self) -> Registration {
        let extents = self.core.marked_extents(&self.place);
        let device = self.core.device.clone();
        Registration::new(device, extents, Arc::new(self))
    }

    /// Records that work which is on no stream of this library uses the memory, which is then
    /// reused only after all work queued on the device when the last lease ends.
    pub fn record_use_anywhere(&self) {
        self.core.record_use_anywhere(self.place.slot);
    }

    /// Returns the streams whose work may use the memory, the block's home stream first. Returns
    /// `None` if any work of the devices with access may use the memory, or the block has been
    /// freed.
    #[must_use]
    pub fn streams(&self) -> Option<Vec<Stream>> {
        self.core.streams(self.place.slot)
    }

    #[cfg(feature = "dlpack")]
    pub(crate) fn users(&self) -> Vec<Device> {
        self.core.users().cloned().collect()
    }

    /// Returns every extent that the lease keeps in place, in order.
    #[must_use]
    pub fn extents(&self) -> Vec<Extent> {
        self.core.extents(&self.place)
    }
}

impl Core {
    /// Takes a lease for a use of a range of a block, or of memory that an earlier lease keeps.
    pub(super) fn admit(
        self: &Arc<Self>,
        (place, size): (BlockPlace, u64),
        wanted: Use,
        range: Range<u64>,
    ) -> Result<Lease, MemoryError> {
        self.device.usable()?;
        let mut state = self.lock_with(place.slot);
        let capturing = state.memory.gate.is_capturing();
        state.blocks.admit(&place, wanted, &range, capturing)?;
        drop(state);
        Ok(Lease::counted(Arc::clone(self), place, size))
    }

    pub(super) fn record_use(&self, id: SlotId, stream: &Stream) -> Result<(), CallError> {
        self.device.own_process()?;
        stream.check_driver(&self.device)?;
        let mut state = self.lock_with(id);
        let capturing = state.memory.gate.is_capturing();
        if let Some(slot) = state.blocks.slots.get_mut(id) {
            slot.record_use(stream, capturing);
        }
        Ok(())
    }

    /// Records that work on unknown streams uses the block, or memory that a lease keeps.
    pub(super) fn record_use_anywhere(&self, id: SlotId) {
        if let Some(slot) = self.lock_with(id).blocks.slots.get_mut(id) {
            slot.record_use_anywhere();
        }
    }

    pub(super) fn streams(&self, id: SlotId) -> Option<Vec<Stream>> {
        let state = self.lock_with(id);
        state.blocks.slots.get(id)?.block.as_ref()?.streams()
    }

    pub(super) fn extents(&self, place: &BlockPlace) -> Vec<Extent> {
        let state = self.lock_with(place.slot);
        let slot = state.blocks.slots.get(place.slot);
        slot.map_or_else(Vec::new, |slot| slot.space.extents().collect())
    }

    /// Returns every extent of a slot in order, with its export mark.
    fn marked_extents(&self, place: &BlockPlace) -> Vec<(Extent, ExportMark)> {
        let state = self.lock_with(place.slot);
        let slot = state.blocks.slots.get(place.slot);
        slot.map_or_else(Vec::new, |slot| {
            slot.space.marked_in(0, slot.space.size()).collect()
        })
    }
}

impl Lease {
    pub(crate) fn admit(&self, wanted: Use, range: Range<u64>) -> Result<Self, MemoryError> {
        let of = (*self.place(), self.size());
        self.core().admit(of, wanted, range)
    }
}

impl RegistrationOwner for Lease {
    fn close(&self) -> Result<(), CallError> {
        // A lease ends when it is dropped, and gives nothing back to the driver.
        Ok(())
    }

    fn record_use(&self, stream: &Stream) -> Result<(), CallError> {
        Self::record_use(self, stream)
    }

    fn may_export(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        // This lease keeps the export mark that the admission sets.
        drop(self.admit(Use::Export, range.clone())?);
        Ok(())
    }

    fn exported(&self, _: &Range<u64>) {
        let mut state = self.core.lock_with(self.place.slot);
        state.blocks.note_export(&self.place);
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
