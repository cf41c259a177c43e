//! Memory that can be exported: its owner keeps it in place while it lives.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use cuvmm_driver::{DeviceAddress, DeviceMemory, LocationKind};
use dlpark::ffi::DLDevice;

use crate::device::Device;
use crate::error::{MemoryError, TensorError};
use crate::extents::Extent;
use crate::own::{Access, Stream};
use crate::pool::{Block, Lease, Use};
use crate::region::Region;
use crate::vec::DeviceVec;

/// An owner of memory that can be exported as a tensor, or an [`Arc`] of one. The exportable bytes
/// are:
/// - of a [`Block`], its size;
/// - of a [`Lease`], the size of its block when the lease was taken;
/// - of a [`DeviceVec`], its elements;
/// - of a [`Region`], its committed ranges.
///
/// This trait cannot be implemented outside this crate.
pub trait Memory: Held + Send + 'static {}

impl<M: Held + Send + 'static> Memory for M {}

/// The methods of an owner that this module needs.
///
/// While the owner lives and is not borrowed mutably, its bytes stay in place.
#[allow(private_interfaces, reason = "code outside this crate cannot name it")]
pub trait Held {
    fn device(&self) -> &Device;

    fn address(&self) -> DeviceAddress;

    /// Returns the size of the exportable bytes, from the address on.
    fn reach(&self) -> u64;

    fn extents(&self) -> Vec<Extent>;

    /// Returns the devices that have access to the memory.
    fn users(&self) -> Vec<Device>;

    /// Returns the streams whose work may use the memory; `None` for all work of the devices that
    /// have access.
    fn streams(&self) -> Option<Vec<Stream>>;

    /// Checks that a range within its size has memory and permits the access. Returns what keeps it
    /// in place beside the owner.
    fn admit(&self, range: Range<u64>, access: Access) -> Result<Option<Lease>, TensorError>;

    /// Records that unknown streams have used the memory.
    fn record_use_anywhere(&self);
}

/// The methods that are the owner's own.
macro_rules! as_its_own {
    () => {
        fn device(&self) -> &Device {
            self.device()
        }

        fn address(&self) -> DeviceAddress {
            self.address()
        }

        fn extents(&self) -> Vec<Extent> {
            self.extents()
        }
    };
}

macro_rules! in_a_pool {
    ($($memory:ty),*) => {$(
        #[allow(private_interfaces)]
        impl Held for $memory {
            as_its_own!();

            fn reach(&self) -> u64 {
                self.size()
            }

            fn users(&self) -> Vec<Device> {
                self.users()
            }

            fn streams(&self) -> Option<Vec<Stream>> {
                self.streams()
            }

            fn admit(
                &self,
                range: Range<u64>,
                access: Access,
            ) -> Result<Option<Lease>, TensorError> {
                // Without a lease, a compaction could move the block while no work of this library
                // uses it.
                Ok(Some(self.admit(Use::Lend(access), range)?))
            }

            fn record_use_anywhere(&self) {
                self.record_use_anywhere();
            }
        }
    )*};
}

in_a_pool!(Block, Lease);

impl<T: Pod> Held for DeviceVec<T> {
    as_its_own!();

    fn reach(&self) -> u64 {
        self.bytes()
    }

    fn users(&self) -> Vec<Device> {
        self.users().cloned().collect()
    }

    fn streams(&self) -> Option<Vec<Stream>> {
        self.streams()
    }

    fn admit(&self, _: Range<u64>, _: Access) -> Result<Option<Lease>, TensorError> {
        // Its elements are never shared with a fork.
        Ok(None)
    }

    fn record_use_anywhere(&self) {
        self.record_use_anywhere();
    }
}

impl Held for Region {
    as_its_own!();

    fn reach(&self) -> u64 {
        self.size()
    }

    fn users(&self) -> Vec<Device> {
        self.users().cloned().collect()
    }

    fn streams(&self) -> Option<Vec<Stream>> {
        None
    }

    fn admit(&self, range: Range<u64>, access: Access) -> Result<Option<Lease>, TensorError> {
        if !self.is_committed(range.clone()) {
            return Err(MemoryError::NotCommitted(range.clone()).into());
        }
        if access == Access::ReadWrite {
            self.check_writable(&range)?;
        }
        Ok(None)
    }

    fn record_use_anywhere(&self) {
        self.note_use_anywhere();
    }
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

    fn users(&self) -> Vec<Device> {
        (**self).users()
    }

    fn streams(&self) -> Option<Vec<Stream>> {
        (**self).streams()
    }

    fn admit(&self, range: Range<u64>, access: Access) -> Result<Option<Lease>, TensorError> {
        (**self).admit(range, access)
    }

    fn record_use_anywhere(&self) {
        (**self).record_use_anywhere();
    }
}

/// Returns the DLPack device of a range of an owner's bytes.
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
