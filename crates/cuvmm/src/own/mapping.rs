//! Mappings: a physical mapped in a reservation.
//!
//! Keeps I-149.
//!
//! `unsafe` is used to map, unmap and set access. Reservation and physical are owned here and kept
//! alive by the mapping, the range was free, and the sizes are equal by construction.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use cuvmm_driver::{AccessDesc, Call, DeviceAddress};

use super::access::{Access, AccessGrant};
use super::copy::Span;
use super::physical::Physical;
use super::reserved::{Part, Reserved, Taken};
use super::stream::Stream;
use super::{CloseError, CloseRefusal};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};

/// A physical mapped in a reservation. Its drop unmaps it at once.
///
/// # Work of the GPU
/// The driver unmaps memory even while a kernel uses it (`docs/semantics.md`). A program must wait
/// for its work on a mapping before it drops the mapping. [`Region`](crate::Region) and
/// [`Pool`](crate::Pool) do that by themselves.
#[doc(alias = "cuMemMap")]
#[doc(alias = "MappedRange")]
pub struct Mapping {
    /// Dropped only after unmapping: a mapping that could not be unmapped keeps addresses and
    /// memory.
    placed: ManuallyDrop<Placed>,
    /// Set unless the driver has answered that it is not mapped.
    mapped: bool,
}

struct Placed {
    reserved: Arc<Reserved>,
    physical: Physical,
    address: DeviceAddress,
    /// The offset in its reservation, which may be part of a larger range.
    offset: u64,
}

impl Mapping {
    /// Maps a physical. A panic of the driver, which may have mapped it, leaves the mapping behind.
    pub(super) fn place(
        reserved: &Arc<Reserved>,
        part: Part,
        offset: u64,
        physical: &Physical,
    ) -> Result<Self, MemoryError> {
        let mut mapping = ManuallyDrop::new(Self::prepare(reserved, part, offset, physical)?);
        let mapped = mapping.map();
        let mapping = ManuallyDrop::into_inner(mapping);
        mapped.map(|()| mapping)
    }

    /// Occupies addresses for a physical, which is to be [mapped](Self::map) next.
    pub(super) fn prepare(
        reserved: &Arc<Reserved>,
        part: Part,
        offset: u64,
        physical: &Physical,
    ) -> Result<Self, MemoryError> {
        let device = reserved.device();
        if !device.same_driver(physical.device()) {
            let what = "the physical";
            return Err(ArgumentError::WrongDriver(what).into());
        }
        let size = physical.size();
        let handle = physical.as_raw();
        let taken = Taken {
            size,
            location: physical.location(),
            handle,
        };
        let address = reserved.insert_range(part, offset, taken)?;
        let placed = Placed {
            reserved: Arc::clone(reserved),
            physical: physical.clone(),
            address,
            offset,
        };
        Ok(Self {
            placed: ManuallyDrop::new(placed),
            mapped: true,
        })
    }

    /// Maps the physical of a prepared mapping, once. After a refusal nothing is mapped.
    pub(crate) fn map(&mut self) -> Result<(), MemoryError> {
        let (address, offset, size) = (self.address(), self.offset(), self.size());
        let handle = self.physical().as_raw();
        // SAFETY: the range is within one reservation owned here, at a place that was occupied for
        // this mapping, and the handle is alive: the mapping's physical owns it.
        let mapped = self.device().call(Call::MemMap, |driver, _| unsafe {
            driver.map(address, size, 0, handle, 0)
        });
        mapped.map_err(|cause| {
            self.mapped = false;
            self.placed.reserved.remove_range(address);
            MemoryError::range(offset, size, cause)
        })
    }

    /// Returns the first address.
    #[doc(alias = "as_raw")]
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.placed.address
    }

    /// Returns the offset in the reservation.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.placed.offset
    }

    /// Returns the size in bytes, which is that of the physical.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.placed.physical.size()
    }

    /// Returns the mapped physical.
    #[must_use]
    pub fn physical(&self) -> &Physical {
        &self.placed.physical
    }

    fn device(&self) -> &Device {
        self.placed.reserved.device()
    }

    /// Sets the access of the named devices and nodes in one call (`cuMemSetAccess`). Those not
    /// named keep theirs.
    ///
    /// Access for a second device costs many times as much as for the first, so grant only what is
    /// needed.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing has changed then.
    #[doc(alias = "set_memory_access")]
    #[doc(alias = "cuMemSetAccess")]
    pub fn set_access(&self, access: &[AccessGrant]) -> Result<(), MemoryError> {
        self.open(access, Access::ReadWrite)
    }

    /// Sets access as [`set_access`](Self::set_access) does, and gives no device or node more than
    /// `most`.
    pub(crate) fn open<'a>(
        &self,
        access: impl IntoIterator<Item = &'a AccessGrant>,
        most: Access,
    ) -> Result<(), MemoryError> {
        let desc = |grant: &AccessGrant| {
            grant.check_driver(self.device())?;
            Ok(grant.desc(most))
        };
        let descs: Result<Vec<AccessDesc>, ArgumentError> = access.into_iter().map(desc).collect();
        let descs = descs?;
        ArgumentError::not_zero("devices to give access to", descs.len() as u64)?;
        let (address, size) = (self.address(), self.size());
        self.device()
            // SAFETY: the range is exactly this mapping. If a caller lowers access that queued work
            // needs, that work faults, as the type's documentation says; it frees no memory.
            .call(Call::MemSetAccess, |driver, _| unsafe {
                driver.set_access(address, size, &descs)
            })
            .map_err(|cause| MemoryError::range(0, size, cause))
    }

    /// Returns the access that a device has (`cuMemGetAccess`).
    ///
    /// # Errors
    /// [`MemoryError`] when the device belongs to another driver or the driver refuses.
    #[doc(alias = "cuMemGetAccess")]
    pub fn access_of(&self, device: &Device) -> Result<Access, MemoryError> {
        device.check_driver(self.device())?;
        let (address, location) = (self.address(), device.location());
        self.device()
            .call(Call::MemGetAccess, |driver, _| {
                driver.get_access(address, location)
            })
            .map(Access::from_flags)
            .map_err(|cause| MemoryError::range(0, self.size(), cause))
    }

    /// Writes bytes at an offset and returns when they are written.
    ///
    /// # Errors
    /// [`MemoryError`] when the range leaves the mapping, or [`MemoryError::NoAccess`] when the device
    /// may not write: a new mapping has no access before [`set_access`](Self::set_access).
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), MemoryError> {
        self.span()
            .write(&Stream::legacy(self.device()), offset, bytes)
            .map_err(|error| self.explain(error, Access::ReadWrite))
    }

    /// Reads bytes from an offset.
    ///
    /// # Errors
    /// [`MemoryError`] when the range leaves the mapping, or [`MemoryError::NoAccess`] when the device
    /// may not read: a new mapping has no access before [`set_access`](Self::set_access).
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), MemoryError> {
        self.span()
            .read(&Stream::legacy(self.device()), offset, bytes)
            .map_err(|error| self.explain(error, Access::Read))
    }

    /// Names the missing access, if that is why the driver refused a copy.
    fn explain(&self, error: MemoryError, wanted: Access) -> MemoryError {
        let MemoryError::Range { cause, .. } = &error else {
            return error;
        };
        let device = self.device();
        match self.access_of(device) {
            Ok(access) if access < wanted => MemoryError::NoAccess {
                device: device.location(),
                wanted: match wanted {
                    Access::ReadWrite => "write",
                    _ => "read",
                },
                cause: *cause,
            },
            _ => error,
        }
    }

    fn span(&self) -> Span<'_> {
        // SAFETY: the range is exactly this mapping, which the borrow keeps in place.
        unsafe { Span::new(self.device(), self.address(), self.size()) }
    }

    /// Unmaps the physical (`cuMemUnmap`) and returns it, or returns the mapping with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the mapping in it, still mapped.
    #[doc(alias("unmap", "unmap_memory"))]
    #[doc(alias = "cuMemUnmap")]
    pub fn close(mut self) -> Result<Physical, CloseError<Self>> {
        match self.unmap() {
            Ok(()) => Ok(self.physical().clone()),
            Err(cause) => Err(CloseError {
                owner: self,
                reason: CloseRefusal::Call(cause),
            }),
        }
    }

    /// Unmaps the physical. Does nothing if it is unmapped.
    pub(crate) fn unmap(&mut self) -> Result<(), CallError> {
        if !self.mapped {
            return Ok(());
        }
        let (address, size) = (self.address(), self.size());
        self.device()
            // SAFETY: the range is exactly this mapping. The owner must ensure that no work uses
            // it, as the type's documentation says; `Region` and `Pool` do.
            .give_back(Call::MemUnmap, |driver, _| unsafe {
                driver.unmap(address, size)
            })?;
        self.mapped = false;
        self.placed.reserved.remove_range(address);
        Ok(())
    }
}

crate::size::bounds!(Mapping);

impl Drop for Mapping {
    fn drop(&mut self) {
        match self.unmap() {
            // SAFETY: `placed` is dropped here and nowhere else, and not used afterwards.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.placed) },
            Err(error) => self.device().report_drop("mapping", self.size(), error),
        }
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("address", &self.address())
            .field("offset", &self.offset())
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}
