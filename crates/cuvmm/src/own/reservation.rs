//! A range of addresses with nothing behind it.
//!
//! `unsafe` here: naming the reserved range as one to copy in.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use cuvmm_driver::{Call, DeviceAddress};

use super::copy::Span;
use super::mapping::Mapping;
use super::physical::Physical;
use super::reserved::Reserved;
use super::{CloseError, CloseRefusal};
use crate::device::Device;
use crate::error::{MapError, ReserveError, RetainError};

/// Addresses reserved for later use: costs no memory. Freed when it and all its mappings are gone.
#[doc(alias = "cuMemAddressReserve")]
pub struct Reservation {
    shared: Arc<Reserved>,
}

/// Options of a reservation.
#[derive(Debug)]
pub struct ReservationBuilder<'a> {
    device: &'a Device,
    size: u64,
    alignment: u64,
    guard: u64,
}

impl ReservationBuilder<'_> {
    /// Aligns the first address to `bytes`, a power of two; by default the granularity.
    #[must_use]
    pub const fn alignment(mut self, bytes: u64) -> Self {
        self.alignment = bytes;
        self
    }

    /// Reserves so many bytes, whole granules, before the range and behind it besides. They are no
    /// part of it, so nothing can be mapped there: whoever runs over an end faults.
    pub(crate) const fn guard(mut self, bytes: u64) -> Self {
        self.guard = bytes;
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
            guard,
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
        let too_large = ReserveError::TooLarge { size };
        let Some(whole) = guard.checked_mul(2).and_then(|both| size.checked_add(both)) else {
            return Err(too_large);
        };
        let first = device
            .call(Call::MemAddressReserve, |driver, _| {
                driver.reserve(whole, alignment, DeviceAddress::NULL, 0)
            })
            .map_err(|cause| ReserveError::Call { size: whole, cause })?;
        // It ends in the address space, so what lies in it does too.
        let base = DeviceAddress(first.0.saturating_add(guard));
        let shared = Arc::new(Reserved::new(device.clone(), base, size, guard));
        Ok(Reservation { shared })
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
            guard: 0,
        }
    }

    /// The first address.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.shared.base()
    }

    /// The size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size()
    }

    /// Bytes of addresses that it takes up, guards included.
    pub(crate) fn addresses(&self) -> u64 {
        self.size() + 2 * self.shared.guard()
    }

    /// The device it was reserved through.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.shared.device()
    }

    /// Bytes that mappings take up.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.shared.mapped_bytes()
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

    /// The same range for another thread to map in. The addresses stay reserved while it lives.
    pub(crate) fn another(&self) -> Self {
        let shared = Arc::clone(&self.shared);
        Self { shared }
    }

    /// The whole range for a device to copy in. Where nothing is mapped, or without a right of the
    /// device, the driver refuses the copy.
    pub(crate) fn span<'a>(&'a self, device: &'a Device) -> Span<'a> {
        // SAFETY: addresses stay ours for the borrow. Parts without a mapping are refused by the
        // driver at the call, which harms nothing (`docs/semantics.md`), and mappings that copies
        // use are kept by those who call this.
        unsafe { Span::new(device, self.address(), self.size()) }
    }

    /// The physical mapped at an offset, which may lie inside a mapping
    /// (`cuMemRetainAllocationHandle`).
    ///
    /// # Errors
    /// [`RetainError`] when nothing is mapped there.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn physical_at(&self, offset: u64) -> Result<Physical, RetainError> {
        let missing = RetainError::NotMapped { offset };
        self.shared
            .at(offset, |address, size, location| {
                Physical::retained(self.device(), address, size, location)
                    .map_err(|cause| RetainError::Call { offset, cause })
            })
            .ok_or(missing)?
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
