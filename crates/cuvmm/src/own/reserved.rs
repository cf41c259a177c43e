//! Reserved ranges and the mappings in them, shared by reservations and mappings.
//!
//! Keeps I-151.
//!
//! `unsafe` is used to free the range, owned here, with the last reservation and mapping in it.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::PoisonError;

use cuvmm_driver::{Call, DeviceAddress, Location, PhysicalHandle};

use crate::deferred::is_broken_off;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};
use crate::size::range_within;
use crate::sync::{Mutex, MutexGuard};

/// A range that the driver reserved in one call.
pub(super) struct Reserved {
    device: Device,
    base: DeviceAddress,
    size: u64,
    /// Every mapping by address, including those that could not be unmapped.
    mapped: Mutex<BTreeMap<DeviceAddress, Taken>>,
}

#[derive(Clone, Copy)]
pub(super) struct Taken {
    pub(super) size: u64,
    pub(super) location: Location,
    pub(super) handle: PhysicalHandle,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) base: DeviceAddress,
    pub(super) size: u64,
}

impl Part {
    fn address(self, offset: u64) -> Option<DeviceAddress> {
        if offset < self.size {
            self.base.checked_add(offset)
        } else {
            None
        }
    }

    fn addresses(self) -> Range<DeviceAddress> {
        // The part ends within the address space.
        self.base..DeviceAddress(self.base.0.saturating_add(self.size))
    }
}

impl Reserved {
    /// Takes ownership of `size` bytes from `base` on, which the driver has reserved.
    pub(super) fn new(device: Device, base: DeviceAddress, size: u64) -> Self {
        let mapped = Mutex::default();
        Self {
            device,
            base,
            size,
            mapped,
        }
    }

    pub(super) const fn device(&self) -> &Device {
        &self.device
    }

    pub(super) const fn whole(&self) -> Part {
        Part {
            base: self.base,
            size: self.size,
        }
    }

    pub(super) fn mapped_bytes(&self, part: Part) -> u64 {
        let mapped = self.lock();
        let here = mapped.range(part.addresses());
        here.map(|(_, taken)| taken.size).sum()
    }

    /// The mappings in a part by address.
    pub(super) fn mappings(&self, part: Part) -> Vec<(DeviceAddress, Taken)> {
        let mapped = self.lock();
        let here = mapped.range(part.addresses());
        here.map(|(&address, &taken)| (address, taken)).collect()
    }

    /// Calls `look` with the mapping at an offset of a part: the address of the offset, and the
    /// size and location of the mapped memory, which stays mapped meanwhile. Returns `None` if
    /// nothing is mapped.
    pub(super) fn at<T>(
        &self,
        part: Part,
        offset: u64,
        look: impl FnOnce(DeviceAddress, u64, Location) -> T,
    ) -> Option<T> {
        let address = part.address(offset)?;
        let mapped = self.lock();
        let (start, taken) = mapped.range(..=address).next_back()?;
        (address.0 - start.0 < taken.size).then(|| look(address, taken.size, taken.location))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<DeviceAddress, Taken>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Occupies a range of a part for a mapping, before the driver is called.
    pub(super) fn insert_range(
        &self,
        part: Part,
        offset: u64,
        taken: Taken,
    ) -> Result<DeviceAddress, MemoryError> {
        let size = taken.size;
        let granule = self.device.granule();
        ArgumentError::aligned("an offset in bytes", offset, granule.bytes())?;
        let (Some(range), Some(address)) =
            (range_within(offset, size, part.size), part.address(offset))
        else {
            return Err(ArgumentError::bytes(offset, size, part.size).into());
        };
        let mut mapped = self.lock();
        let end = DeviceAddress(part.base.0 + range.end);
        // Each mapping that begins in the part also ends in it.
        if let Some((start, before)) = mapped.range(part.base..end).next_back()
            && start.0 + before.size > address.0
        {
            return Err(MemoryError::Overlap {
                offset,
                size,
                taken: start.0 - part.base.0,
            });
        }
        mapped.insert(address, taken);
        Ok(address)
    }

    pub(super) fn remove_range(&self, address: DeviceAddress) {
        self.lock().remove(&address);
    }

    pub(super) fn free(&mut self) -> Result<(), CallError> {
        // A call in which the driver panics may have freed them, and is not made again.
        let (base, size) = (self.base, std::mem::take(&mut self.size));
        if size == 0 {
            return Ok(());
        }
        let outcome = self
            .device
            // SAFETY: the range is owned here and whole, and nothing is mapped in it: each
            // reservation and mapping in it holds an `Arc` of this value, so a mutable reference
            // proves that only the one that frees it is left. It is freed once: `size` is zero then,
            // and set again after a refusal, which has changed nothing.
            .give_back(Call::MemAddressFree, |driver, _| unsafe {
                driver.free_reservation(base, size)
            });
        if outcome.is_err() {
            self.size = size;
        }
        outcome
    }

    /// Frees the addresses, asking the driver twice, or reports that they stay reserved. Returns the bytes
    /// that were freed.
    pub(super) fn give_back(&mut self) -> u64 {
        let size = self.size;
        if is_broken_off() {
            // A call that panicked may have mapped memory there.
            log!(
                error,
                size,
                "addresses of an operation that panicked stay reserved"
            );
        } else if let Err(error) = self.free().or_else(|_| self.free()) {
            self.device.report_drop("reservation", size, error);
        } else {
            return size;
        }
        // The drop does not try again.
        self.size = 0;
        0
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.size > 0 {
            self.give_back();
        }
    }
}
