//! Dma-bufs of registered memory, through which a NIC or another driver of the machine accesses it.
//!
//! `unsafe` is used to request the descriptor from the driver. The range is mapped, and stays
//! mapped while the registration kept with the descriptor.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use cuvmm_driver::{Call, DeviceAddress};

use crate::error::{ArgumentError, MemoryError};
use crate::extents::Registration;

/// A descriptor of a dma-buf over a range of registered memory. The range stays in place while the
/// `DmaBuf` lives.
///
/// Each process that receives the descriptor can write to the memory, even if only reading was
/// intended, as long as it holds the descriptor, even after the `DmaBuf` was dropped. So the
/// extents count as [exported](crate::Physical::is_exported) for good.
#[derive(Debug)]
#[doc(alias = "cuMemGetHandleForAddressRange")]
pub struct DmaBuf {
    /// Declared before the registration, so that it is closed first.
    descriptor: OwnedFd,
    range: Range<u64>,
    registration: Registration,
}

impl Registration {
    /// Creates a dma-buf of part of the registered range (`cuMemGetHandleForAddressRange`). The
    /// range is given in offsets of the region or block and consists of whole pages of the host. It
    /// may span several extents of one device.
    ///
    /// Memory for RDMA devices should be [created for
    /// RDMA](crate::region::RegionBuilder::rdma_capable).
    ///
    /// # Errors
    /// [`MemoryError`] when the range leaves the registered range, is not whole pages, is at
    /// several places, is shared with forks, or the driver refuses.
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
            // SAFETY: the registration keeps its range mapped, and a clone of it is kept with the
            // descriptor.
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
                range: start..end,
                registered: whole,
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
    /// Returns the range of the region or block, in bytes.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.range.clone()
    }

    /// Returns the registration that keeps the memory in place.
    #[must_use]
    pub const fn registration(&self) -> &Registration {
        &self.registration
    }

    /// Returns the descriptor and the registration that keeps its memory in place, which should be
    /// kept together. A descriptor that outlives the registration still refers to the registered
    /// memory, even if other memory is mapped at the addresses by then.
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
