//! Reservations: ranges of addresses without memory.
//!
//! `unsafe` is used to name the reserved range as one to copy in.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use cuvmm_driver::{Call, DeviceAddress, Location, PhysicalHandle};

use super::access::Access;
use super::copy::Span;
use super::mapping::Mapping;
use super::physical::Physical;
use super::reserved::{Part, Reserved, Taken};
use super::{CloseError, CloseRefusal};
use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};

/// A reserved range of addresses, which costs no memory. It is freed with the reservation and all
/// mappings in it.
#[doc(alias = "VirtualMemoryManager")]
#[doc(alias = "cuMemAddressReserve")]
#[doc(alias = "AddressRange")]
#[doc(alias = "VirtualAddressRange")]
pub struct Reservation {
    shared: Arc<Reserved>,
    part: Part,
    /// Bytes before and behind the part, in which nothing is ever mapped.
    guard: u64,
}

/// A mapping in a [`Reservation`], as [`Reservation::mappings`] lists it.
#[doc(alias = "MappingRecord")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappingInfo {
    /// The offset in the reservation, in bytes.
    pub offset: u64,
    /// The size in bytes.
    pub size: u64,
    /// The location of the memory.
    pub location: Location,
    /// The driver's handle of the physical, which its owner may have released.
    pub handle: PhysicalHandle,
    /// The access of the reservation's device. `None` if the driver does not tell, as while another
    /// thread maps or unmaps here.
    pub access: Option<Access>,
}

/// Options of a [`Reservation`].
#[derive(Debug)]
pub struct ReservationBuilder<'a> {
    device: &'a Device,
    size: u64,
    alignment: u64,
}

impl ReservationBuilder<'_> {
    /// Aligns the first address to `bytes`, a power of two; to the granularity by default.
    #[must_use]
    pub const fn alignment(mut self, bytes: u64) -> Self {
        self.alignment = bytes;
        self
    }

    /// Reserves the range (`cuMemAddressReserve`).
    ///
    /// # Errors
    /// [`MemoryError`] when size or alignment is invalid or the driver has no such range.
    pub fn reserve(self) -> Result<Reservation, MemoryError> {
        let Self {
            device,
            size,
            alignment,
        } = self;
        ArgumentError::whole("bytes of a reservation", size, device.granularity())?;
        if alignment != 0 && !alignment.is_power_of_two() {
            let what = "an alignment in bytes";
            let value = alignment;
            return Err(ArgumentError::NotPowerOfTwo { what, value }.into());
        }
        let base = device
            .call(Call::MemAddressReserve, |driver, _| {
                driver.reserve(size, alignment, DeviceAddress::NULL, 0)
            })
            .map_err(|cause| MemoryError::range(0, size, cause))?;
        let shared = Arc::new(Reserved::new(device.clone(), base, size));
        let part = shared.whole();
        Ok(Reservation {
            shared,
            part,
            guard: 0,
        })
    }
}

impl Reservation {
    /// Reserves `size` bytes, a whole number of granules, at any address.
    ///
    /// # Errors
    /// Those of [`ReservationBuilder::reserve`].
    pub fn new(device: &Device, size: u64) -> Result<Self, MemoryError> {
        Self::builder(device, size).reserve()
    }

    /// Returns a builder for a reservation of `size` bytes.
    #[must_use]
    pub const fn builder(device: &Device, size: u64) -> ReservationBuilder<'_> {
        ReservationBuilder {
            device,
            size,
            alignment: 0,
        }
    }

    /// Reserves `count` ranges of `size` bytes at equal distances, each with `guard` bytes (whole
    /// granules) on either side where nothing can be mapped, so that an access beyond either end
    /// faults. The addresses are freed together, with the last range and mapping.
    pub(crate) fn row(
        device: &Device,
        size: u64,
        guard: u64,
        count: u64,
    ) -> Result<impl Iterator<Item = Self> + use<>, MemoryError> {
        let too_large = ArgumentError::Overflow {
            what: "bytes of addresses",
            value: size,
        };
        let Some((stride, whole)) = guard
            .checked_mul(2)
            .and_then(|both| size.checked_add(both))
            .and_then(|stride| Some((stride, stride.checked_mul(count)?)))
        else {
            return Err(too_large.into());
        };
        let whole = Self::new(device, whole)?;
        let first = whole.address().0 + guard;
        let part = move |index| Self {
            shared: Arc::clone(&whole.shared),
            part: Part {
                base: DeviceAddress(first + index * stride),
                size,
            },
            guard,
        };
        Ok((0..count).map(part))
    }

    /// Returns the first address.
    #[doc(alias("as_raw", "base", "base_address"))]
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.part.base
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.part.size
    }

    /// Returns the bytes of occupied addresses, guards included.
    pub(crate) const fn addresses(&self) -> u64 {
        self.size() + 2 * self.guard
    }

    /// Returns the device that the range was reserved through.
    #[must_use]
    pub fn device(&self) -> &Device {
        self.shared.device()
    }

    /// Returns the bytes that mappings occupy.
    #[must_use]
    pub fn mapped_bytes(&self) -> u64 {
        self.shared.mapped_bytes(self.part)
    }

    /// Returns the mappings in order of their offsets, and asks the driver for the access to each
    /// (`cuMemGetAccess`). A mapping that could not be unmapped is listed too: its addresses stay
    /// taken.
    ///
    /// ```
    /// use cuvmm::driver::auto;
    /// use cuvmm::{Access, Device, Physical, Reservation};
    ///
    /// let device = Device::open(auto::open(auto::OpenOptions::new())?.driver, 0)?;
    /// let granule = device.granularity();
    /// let reservation = Reservation::new(&device, 4 * granule)?;
    /// let mapping = reservation.map(granule, &Physical::new(&device, 2 * granule)?)?;
    /// let listed = reservation.mappings();
    /// assert_eq!((listed[0].offset, listed[0].size), (granule, 2 * granule));
    /// assert_eq!(listed[0].handle, mapping.physical().as_raw());
    /// assert_eq!(listed[0].access, Some(Access::None)); // before `set_access`
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn mappings(&self) -> Vec<MappingInfo> {
        let listed = self.shared.mappings(self.part).into_iter();
        let one = |(address, taken): (DeviceAddress, Taken)| {
            let location = self.device().location();
            let access = self.device().call(Call::MemGetAccess, |driver, _| {
                driver.get_access(address, location)
            });
            MappingInfo {
                offset: address - self.address(),
                size: taken.size,
                location: taken.location,
                handle: taken.handle,
                access: access.ok().map(Access::from_flags),
            }
        };
        listed.map(one).collect()
    }

    /// Maps a whole physical at an offset (`cuMemMap`). No device has access before
    /// [`Mapping::set_access`] grants it.
    ///
    /// A physical may be mapped several times; all mappings show the same bytes.
    ///
    /// # Errors
    /// [`MemoryError`] when the physical does not fit, overlaps another mapping or belongs to
    /// another driver.
    #[doc(alias = "map_memory")]
    #[doc(alias = "cuMemMap")]
    pub fn map(&self, offset: u64, physical: &Physical) -> Result<Mapping, MemoryError> {
        Mapping::place(&self.shared, self.part, offset, physical)
    }

    /// Occupies an offset for a whole physical, which [`Mapping::map`] maps next.
    pub(crate) fn prepare(&self, offset: u64, physical: &Physical) -> Result<Mapping, MemoryError> {
        Mapping::prepare(&self.shared, self.part, offset, physical)
    }

    /// Returns another owner of the range, for another thread to map in.
    pub(crate) fn another(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            part: self.part,
            guard: self.guard,
        }
    }

    /// Frees the addresses (`cuMemAddressFree`). Returns the bytes that the driver has freed: 0 if it
    /// refuses, or while mappings or other ranges of the row are there; the last one frees all.
    pub(crate) fn give_back(self) -> u64 {
        Arc::into_inner(self.shared).map_or(0, |mut whole| whole.give_back())
    }

    /// Returns the whole range for a device to copy in. The driver refuses a copy where nothing is
    /// mapped or the device has no access.
    pub(crate) fn span<'a>(&'a self, device: &'a Device) -> Span<'a> {
        // SAFETY: the addresses stay reserved for the borrow. The driver refuses a copy of parts
        // without a mapping when it is called (`docs/semantics.md`), and callers keep the mappings
        // that their copies use.
        unsafe { Span::new(device, self.address(), self.size()) }
    }

    /// Returns the physical mapped at an offset, which may be inside a mapping
    /// (`cuMemRetainAllocationHandle`).
    ///
    /// # Errors
    /// [`MemoryError`] when nothing is mapped there.
    #[doc(alias = "retain_allocation_handle")]
    #[doc(alias = "cuMemRetainAllocationHandle")]
    pub fn physical_at(&self, offset: u64) -> Result<Physical, MemoryError> {
        let missing = MemoryError::NotCommitted(offset..offset.saturating_add(1));
        self.shared
            .at(self.part, offset, |address, size, location| {
                Physical::retained(self.device(), address, size, location)
                    .map_err(|cause| MemoryError::range(offset, size, cause))
            })
            .ok_or(missing)?
    }

    /// Frees the addresses (`cuMemAddressFree`), or returns the reservation with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the reservation in it while mappings live in it, or when the driver
    /// refuses.
    #[doc(alias("release", "cuMemAddressFree"))]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let closed = match Arc::get_mut(&mut self.shared) {
            Some(shared) => shared.free().map_err(CloseRefusal::Call),
            None => Err(CloseRefusal::InUse),
        };
        CloseError::of(self, closed)
    }
}

crate::size::bounds!(Reservation);

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("address", &self.address())
            .field("size", &self.size())
            .field("mapped_bytes", &self.mapped_bytes())
            .finish_non_exhaustive()
    }
}
