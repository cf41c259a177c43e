//! A reserved range and the places taken in it: what a reservation and its mappings share.
//!
//! `unsafe` here: giving the range back to the driver. The range is ours, and goes only when the
//! last mapping in it has gone.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::PoisonError;

use cuvmm_driver::{Call, DeviceAddress, Location};

use crate::device::Device;
use crate::error::{CallError, MapError};
use crate::size::range_within;
use crate::sync::{Mutex, MutexGuard};

/// What a reservation and its mappings share.
pub(super) struct Reserved {
    device: Device,
    base: DeviceAddress,
    size: u64,
    /// Bytes that are reserved before it and behind it besides, where nothing is ever mapped.
    guard: u64,
    /// By offset every mapping, those that could not be unmapped included.
    mapped: Mutex<BTreeMap<u64, Taken>>,
}

/// A place that a mapping takes.
struct Taken {
    size: u64,
    location: Location,
}

impl Reserved {
    /// `size` bytes from `base` on, which the driver reserved with a guard on either side.
    pub(super) fn new(device: Device, base: DeviceAddress, size: u64, guard: u64) -> Self {
        let mapped = Mutex::default();
        Self {
            device,
            base,
            size,
            guard,
            mapped,
        }
    }

    pub(super) const fn device(&self) -> &Device {
        &self.device
    }

    pub(super) const fn base(&self) -> DeviceAddress {
        self.base
    }

    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    pub(super) const fn guard(&self) -> u64 {
        self.guard
    }

    pub(super) fn mapped_bytes(&self) -> u64 {
        self.lock().values().map(|taken| taken.size).sum()
    }

    /// Looks at what is mapped at an offset: its address there, and size and location of the
    /// memory, which stays in its place meanwhile. Nothing if nothing is mapped.
    pub(super) fn at<T>(
        &self,
        offset: u64,
        look: impl FnOnce(DeviceAddress, u64, Location) -> T,
    ) -> Option<T> {
        let mapped = self.lock();
        let (&start, taken) = mapped.range(..=offset).next_back()?;
        let address = self.address(offset)?;
        (offset - start < taken.size).then(|| look(address, taken.size, taken.location))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Taken>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address at an offset that lies in the reservation.
    fn address(&self, offset: u64) -> Option<DeviceAddress> {
        if offset < self.size {
            self.base.checked_add(offset)
        } else {
            None
        }
    }

    /// Takes a place for a mapping, before the driver is asked.
    pub(super) fn occupy(
        &self,
        offset: u64,
        size: u64,
        location: Location,
    ) -> Result<DeviceAddress, MapError> {
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
        if let Some((&start, taken)) = mapped.range(..range.end).next_back()
            && start + taken.size > offset
        {
            return Err(MapError::Overlap {
                offset,
                size,
                taken: start,
            });
        }
        mapped.insert(offset, Taken { size, location });
        Ok(address)
    }

    /// Frees a mapping's place.
    pub(super) fn vacate(&self, offset: u64) {
        self.lock().remove(&offset);
    }

    /// Gives the range back to the driver, once.
    pub(super) fn free(&mut self) -> Result<(), CallError> {
        if self.size == 0 {
            return Ok(());
        }
        let base = DeviceAddress(self.base.0 - self.guard);
        let size = self.size + 2 * self.guard;
        self.device
            // SAFETY: the range is ours and whole, guards included, and nothing is mapped in it: each mapping holds an
            // `Arc` of this, so none is left when it can be had mutably.
            .give_back(Call::MemAddressFree, |driver, _| unsafe {
                driver.free_reservation(base, size)
            })?;
        self.size = 0;
        Ok(())
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let size = self.size;
        if let Err(error) = self.free() {
            self.device.report_drop("reservation", size, error);
        }
    }
}
