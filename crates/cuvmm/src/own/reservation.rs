//! A range of addresses with nothing behind it.
//!
//! `unsafe` here: giving the range back to the driver. The reservation owns it, and it goes only
//! when the last mapping in it has gone.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{Call, DeviceAddress};

use super::copy::Span;
use super::mapping::Mapping;
use super::physical::Physical;
use super::{CloseError, CloseRefusal};
use crate::device::Device;
use crate::error::{CallError, MapError, ReserveError, RetainError};
use crate::size::range_within;

/// Addresses reserved for later use: costs no memory. Freed when it and all its mappings are gone.
#[doc(alias = "cuMemAddressReserve")]
pub struct Reservation {
    shared: Arc<Shared>,
}

/// What a reservation and its mappings share.
pub(super) struct Shared {
    pub(super) device: Device,
    base: DeviceAddress,
    size: u64,
    /// Offset and size of every mapping, those that could not be unmapped included.
    mapped: Mutex<BTreeMap<u64, u64>>,
}

/// Options of a reservation.
#[derive(Debug)]
pub struct ReservationBuilder<'a> {
    device: &'a Device,
    size: u64,
    alignment: u64,
}

impl ReservationBuilder<'_> {
    /// Aligns the first address to `bytes`, a power of two; by default the granularity.
    #[must_use]
    pub const fn alignment(mut self, bytes: u64) -> Self {
        self.alignment = bytes;
        self
    }

    /// Reserves the range (`cuMemAddressReserve`).
    ///
    /// # Errors
    /// [`ReserveError`] when size or alignment is wrong or the driver has no such range.
    pub fn reserve(self) -> Result<Reservation, ReserveError> {
        let Self {
            device,
            size,
            alignment,
        } = self;
        if size == 0 {
            return Err(ReserveError::ZeroSize);
        }
        if !device.granule().divides(size) {
            return Err(ReserveError::Misaligned {
                size,
                granularity: device.granularity(),
            });
        }
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(ReserveError::OddAlignment { alignment });
        }
        let base = device
            .call(Call::MemAddressReserve, |driver, _| {
                driver.reserve(size, alignment, DeviceAddress::NULL, 0)
            })
            .map_err(|cause| ReserveError::Call { size, cause })?;
        let shared = Shared {
            device: device.clone(),
            base,
            size,
            mapped: Mutex::default(),
        };
        Ok(Reservation {
            shared: Arc::new(shared),
        })
    }
}

impl Reservation {
    /// Reserves `size` bytes, a whole number of granules, anywhere.
    ///
    /// # Errors
    /// As [`ReservationBuilder::reserve`].
    pub fn new(device: &Device, size: u64) -> Result<Self, ReserveError> {
        Self::builder(device, size).reserve()
    }

    /// Sets out to reserve `size` bytes.
    #[must_use]
    pub const fn builder(device: &Device, size: u64) -> ReservationBuilder<'_> {
        ReservationBuilder {
            device,
            size,
            alignment: 0,
        }
    }

    /// The first address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.shared.base
    }

    /// The size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// The device it was reserved through.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Bytes that mappings take up.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.shared.lock().values().sum()
    }

    /// Maps a whole physical at an offset (`cuMemMap`). Nobody has access yet.
    ///
    /// The physical may be mapped at other places too: they show the same bytes.
    ///
    /// # Errors
    /// [`MapError`] when it does not fit, overlaps another mapping or belongs to another driver.
    #[doc(alias = "cuMemMap")]
    pub fn map(&self, offset: u64, physical: &Physical) -> Result<Mapping, MapError> {
        Mapping::place(&self.shared, offset, physical)
    }

    /// The whole range to copy in. Where nothing is mapped the driver refuses the copy.
    pub(crate) fn span(&self) -> Span<'_> {
        // SAFETY: addresses stay ours for the borrow. Parts without a mapping are refused by the
        // driver at the call, which harms nothing (`docs/semantics.md`), and mappings that copies
        // use are kept by those who call this.
        unsafe { Span::new(&self.shared.device, self.shared.base, self.shared.size) }
    }

    /// The physical mapped at an offset, which may lie inside a mapping
    /// (`cuMemRetainAllocationHandle`).
    ///
    /// # Errors
    /// [`RetainError`] when nothing is mapped there.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn physical_at(&self, offset: u64) -> Result<Physical, RetainError> {
        let mapped = self.shared.lock();
        let size = match mapped.range(..=offset).next_back() {
            Some((&start, &size)) if offset - start < size => size,
            _ => return Err(RetainError::NotMapped { offset }),
        };
        let fail = |cause| RetainError::Call { offset, cause };
        let address = self
            .shared
            .address(offset)
            .ok_or(RetainError::NotMapped { offset })?;
        Physical::retained(&self.shared.device, address, size).map_err(fail)
    }

    /// Gives the addresses back (`cuMemAddressFree`), or hands the reservation back and says why
    /// not.
    ///
    /// # Errors
    /// [`CloseError`] with the reservation in it while mappings live in it, or when the driver
    /// refuses.
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let Some(shared) = Arc::get_mut(&mut self.shared) else {
            return Err(CloseError {
                owner: self,
                reason: CloseRefusal::InUse,
            });
        };
        match shared.free() {
            Ok(()) => Ok(()),
            Err(cause) => Err(CloseError {
                owner: self,
                reason: CloseRefusal::Call(cause),
            }),
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("address", &self.address())
            .field("size", &self.size())
            .field("mapped_bytes", &self.mapped_bytes())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address at an offset that lies in the reservation.
    pub(super) fn address(&self, offset: u64) -> Option<DeviceAddress> {
        if offset < self.size {
            self.base.checked_add(offset)
        } else {
            None
        }
    }

    /// Takes a place for a mapping, before the driver is asked.
    pub(super) fn occupy(&self, offset: u64, size: u64) -> Result<DeviceAddress, MapError> {
        let granule = self.device.granule();
        if !granule.divides(offset) {
            return Err(MapError::Misaligned {
                offset,
                granularity: granule.bytes(),
            });
        }
        let outside = MapError::OutOfRange {
            offset,
            size,
            reserved: self.size,
        };
        let (Some(range), Some(address)) =
            (range_within(offset, size, self.size), self.address(offset))
        else {
            return Err(outside);
        };
        let mut mapped = self.lock();
        if let Some((&taken, &length)) = mapped.range(..range.end).next_back()
            && taken + length > offset
        {
            return Err(MapError::Overlap {
                offset,
                size,
                taken,
            });
        }
        mapped.insert(offset, size);
        Ok(address)
    }

    /// Frees a mapping's place.
    pub(super) fn vacate(&self, offset: u64) {
        self.lock().remove(&offset);
    }

    /// Gives the range back to the driver, once.
    fn free(&mut self) -> Result<(), CallError> {
        let (base, size) = (self.base, self.size);
        if self.size == 0 {
            return Ok(());
        }
        self.device
            // SAFETY: the range is ours and whole, and nothing is mapped in it: each mapping holds an
            // `Arc` of this, so none is left when it can be had mutably.
            .give_back(Call::MemAddressFree, |driver, _| unsafe {
                driver.free_reservation(base, size)
            })?;
        self.size = 0;
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let size = self.size;
        if let Err(error) = self.free() {
            self.device.report_drop("reservation", size, error);
        }
    }
}
