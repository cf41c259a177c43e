//! A dma-buf of registered memory: how a NIC or another driver of the machine reaches it.
//!
//! `unsafe` here: asking the driver for the descriptor. The range is mapped, and stays so as long as
//! the registration that goes with the descriptor.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cuvmm_driver::{Call, DeviceAddress};

use super::registration::Registration;
use crate::error::{ArgumentError, MemoryError};

/// A descriptor of a dma-buf over a range of registered memory. The range stays as it is while this
/// lives.
///
/// Whoever is given the descriptor can write to the memory, whatever it was told, for as long as it
/// has it: even after this has been dropped. So the extents count as
/// [exported](crate::Physical::is_exported) for good.
#[doc(alias = "cuMemGetHandleForAddressRange")]
pub struct DmaBuf {
    /// Before the registration, so that it is closed first.
    descriptor: OwnedFd,
    range: Range<u64>,
    registration: Registration,
}

impl Registration {
    /// A dma-buf of a part of what is registered (`cuMemGetHandleForAddressRange`), in offsets of the
    /// region or block, in whole pages of the host. It may go over several extents of one device.
    ///
    /// Memory that RDMA devices are to reach was best
    /// [asked for so](crate::region::RegionBuilder::rdma_capable).
    ///
    /// # Errors
    /// [`MemoryError`] when the range leaves what is registered, is not whole pages, lies at several
    /// places, is shared with forks, or the driver refuses.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    pub fn dma_buf(&self, range: Range<u64>) -> Result<DmaBuf, MemoryError> {
        self.check(&range)?;
        self.may_export(&range)?;
        let Range { start, end } = range;
        let failed = |cause| MemoryError::range(start, end - start, cause);
        let whole = self.range();
        let address = DeviceAddress(self.address().0.saturating_add(start - whole.start));
        let descriptor = self
            .device()
            // SAFETY: the registration keeps what lies in its range mapped, and a clone of it is
            // kept beside the descriptor.
            .call(Call::MemGetHandleForAddressRange, |driver, device| unsafe {
                driver.dma_buf(device, address, end - start)
            })
            .map_err(failed)?;
        self.mark_exported(&range);
        Ok(DmaBuf {
            descriptor,
            range,
            registration: self.clone(),
        })
    }

    fn check(&self, range: &Range<u64>) -> Result<(), MemoryError> {
        let Range { start, end } = *range;
        if start >= end {
            let what = "bytes";
            return Err(ArgumentError::Empty { what, start, end }.into());
        }
        let page = rustix::param::page_size() as u64;
        ArgumentError::aligned("the first byte of a dma-buf", start, page)?;
        ArgumentError::aligned("the end of a dma-buf in bytes", end, page)?;
        let whole = self.range();
        if start < whole.start || end > whole.end {
            return Err(MemoryError::NotRegistered {
                start,
                end,
                registered_start: whole.start,
                registered_end: whole.end,
            });
        }
        let mut extents = self.extents_in(range);
        let first = extents.next().map(|extent| extent.location);
        match (first, extents.find(|extent| Some(extent.location) != first)) {
            (Some(wanted), Some(other)) => Err(MemoryError::Elsewhere {
                offset: other.offset,
                found: other.location,
                wanted,
            }),
            _ => Ok(()),
        }
    }
}

impl DmaBuf {
    /// What of the region or block it is, in bytes.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// What keeps the memory in place.
    #[must_use]
    pub const fn registration(&self) -> &Registration {
        &self.registration
    }

    /// The descriptor and what keeps its memory in place, to be kept beside it. A descriptor that
    /// outlives the registration is of the memory that was there, even where the addresses show
    /// other memory then.
    #[must_use]
    pub fn into_parts(self) -> (OwnedFd, Registration) {
        (self.descriptor, self.registration)
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl fmt::Debug for DmaBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DmaBuf")
            .field("descriptor", &self.descriptor)
            .field("range", &self.range)
            .finish_non_exhaustive()
    }
}
