//! What can be exported: memory with an owner that keeps it in place for as long as it lives.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use cuvmm_driver::{DeviceAddress, DeviceMemory, LocationKind};
use dlpark::ffi::DLDevice;

use crate::device::Device;
use crate::error::{MemoryError, TensorError};
use crate::own::{Access, Stream};
use crate::pool::{Block, Lease, Use};
use crate::region::{Extent, Region};
use crate::vec::DeviceVec;

/// An owner of memory that a tensor can be exported over, and an [`Arc`] of one. Which bytes there
/// are:
/// - a [`Block`]: those it was asked to have;
/// - a [`Lease`]: those its block had when the lease was taken;
/// - a [`DeviceVec`]: its elements;
/// - a [`Region`]: what is committed of it.
///
/// It cannot be implemented outside this crate.
pub trait Memory: Held + Send + 'static {}

impl<M: Held + Send + 'static> Memory for M {}

/// What the rest of this room asks of an owner.
///
/// While it lives, and nobody has it alone to change it, its bytes stay where they are.
#[allow(private_interfaces, reason = "nobody outside can name this trait")]
pub trait Held {
    fn device(&self) -> &Device;

    fn address(&self) -> DeviceAddress;

    /// How far its bytes reach from its address.
    fn reach(&self) -> u64;

    /// Every extent under it, in order.
    fn extents(&self) -> Vec<Extent>;

    /// The streams whose work may use it; nothing where that is all work of the device.
    fn streams(&self) -> Option<Vec<Stream>>;

    /// Whether a range within its reach has its memory and may be used with a right; and what keeps
    /// it in place besides the owner.
    fn admit(&self, range: Range<u64>, access: Access) -> Result<Option<Lease>, TensorError>;

    /// Whether nobody may mark all work of the device now.
    fn is_capturing(&self) -> bool {
        false
    }

    /// Notes that others than its streams have used it.
    fn record_use_anywhere(&self);
}

#[allow(private_interfaces)]
impl Held for Block {
    fn device(&self) -> &Device {
        self.device()
    }

    fn address(&self) -> DeviceAddress {
        self.address()
    }

    fn reach(&self) -> u64 {
        self.size()
    }

    fn extents(&self) -> Vec<Extent> {
        self.extents()
    }

    fn streams(&self) -> Option<Vec<Stream>> {
        self.streams()
    }

    fn admit(&self, range: Range<u64>, access: Access) -> Result<Option<Lease>, TensorError> {
        // Without a lease a compaction could move the block while no work of ours uses it.
        Ok(Some(self.admit(Use::Lend(access), range)?))
    }

    fn is_capturing(&self) -> bool {
        self.is_capturing()
    }

    fn record_use_anywhere(&self) {
        self.record_use_anywhere();
    }
}

impl Held for Lease {
    fn device(&self) -> &Device {
        self.device()
    }

    fn address(&self) -> DeviceAddress {
        self.address()
    }

    fn reach(&self) -> u64 {
        self.size()
    }

    fn extents(&self) -> Vec<Extent> {
        self.extents()
    }

    fn streams(&self) -> Option<Vec<Stream>> {
        self.streams()
    }

    fn admit(&self, range: Range<u64>, access: Access) -> Result<Option<Lease>, TensorError> {
        Ok(Some(self.admit(Use::Lend(access), range)?))
    }

    fn is_capturing(&self) -> bool {
        self.is_capturing()
    }

    fn record_use_anywhere(&self) {
        self.record_use_anywhere();
    }
}

impl<T: Pod> Held for DeviceVec<T> {
    fn device(&self) -> &Device {
        self.device()
    }

    fn address(&self) -> DeviceAddress {
        self.address()
    }

    fn reach(&self) -> u64 {
        self.bytes()
    }

    fn extents(&self) -> Vec<Extent> {
        self.extents()
    }

    fn streams(&self) -> Option<Vec<Stream>> {
        self.streams()
    }

    fn admit(&self, _: Range<u64>, _: Access) -> Result<Option<Lease>, TensorError> {
        // Its elements have memory of their own, which goes to no fork.
        Ok(None)
    }

    fn record_use_anywhere(&self) {
        self.record_use_anywhere();
    }
}

impl Held for Region {
    fn device(&self) -> &Device {
        self.device()
    }

    fn address(&self) -> DeviceAddress {
        self.address()
    }

    fn reach(&self) -> u64 {
        self.size()
    }

    fn extents(&self) -> Vec<Extent> {
        self.extents()
    }

    fn streams(&self) -> Option<Vec<Stream>> {
        None
    }

    fn admit(&self, range: Range<u64>, access: Access) -> Result<Option<Lease>, TensorError> {
        if !self.is_committed(range.clone()) {
            return Err(MemoryError::not_committed(&range).into());
        }
        if access == Access::ReadWrite {
            self.check_writable(&range)?;
        }
        Ok(None)
    }

    /// Whoever decommits says which work it waits for, and the drop waits for all of it.
    fn record_use_anywhere(&self) {}
}

impl<M: Held + Sync> Held for Arc<M> {
    fn device(&self) -> &Device {
        (**self).device()
    }

    fn address(&self) -> DeviceAddress {
        (**self).address()
    }

    fn reach(&self) -> u64 {
        (**self).reach()
    }

    fn extents(&self) -> Vec<Extent> {
        (**self).extents()
    }

    fn streams(&self) -> Option<Vec<Stream>> {
        (**self).streams()
    }

    fn admit(&self, range: Range<u64>, access: Access) -> Result<Option<Lease>, TensorError> {
        (**self).admit(range, access)
    }

    fn is_capturing(&self) -> bool {
        (**self).is_capturing()
    }

    fn record_use_anywhere(&self) {
        (**self).record_use_anywhere();
    }
}

/// Where DLPack says that a range of an owner's bytes lies.
pub(super) fn place_of(memory: &impl Held, range: &Range<u64>) -> Result<DLDevice, TensorError> {
    let device = memory.device();
    match device.driver().device_memory() {
        DeviceMemory::Device => {}
        DeviceMemory::Host => return Ok(DLDevice::CPU),
        _ => return Err(TensorError::NoMemory),
    }
    let own = device.location();
    let mut on_host = None;
    for extent in memory.extents() {
        if extent.offset >= range.end || range.start >= extent.end() {
            continue;
        }
        let host = extent.location.kind == LocationKind::HOST_NUMA;
        let fits = host || extent.location == own;
        if !fits || on_host.is_some_and(|before| before != host) {
            return Err(MemoryError::Elsewhere {
                offset: extent.offset,
                found: extent.location,
                wanted: own,
            }
            .into());
        }
        on_host = Some(host);
    }
    Ok(match on_host {
        Some(true) => DLDevice::CPU,
        _ => DLDevice::cuda(device.ordinal().0),
    })
}
