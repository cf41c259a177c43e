//! Managed memory: one address for the host and all devices, whose pages migrate.
//! [`unified`](crate::unified) decides who may access it when.
//!
//! `unsafe` is used to free the allocation and to move its pages. It is owned here and freed once.
#![allow(unsafe_code)]

use std::ops::Range;

use cuvmm_driver::{
    Advice, Call, CudaVersion, DeviceAddress, DeviceAttribute, Location, LocationKind, Ordinal,
    RangeAttribute,
};

use super::CloseError;
use super::copy::Span;
use super::stream::Stream;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};

/// Makes the memory accessible to any stream of any device (`CU_MEM_ATTACH_GLOBAL`).
const GLOBAL: u32 = 1;

/// The first version that reports a location by its kind, and distinguishes NUMA nodes from the
/// host as a whole.
const KINDS_SINCE: CudaVersion = CudaVersion::new(12, 2);

/// The attributes of a location: as one number, and as kind and number.
#[derive(Clone, Copy)]
struct PlaceAttributes {
    number: RangeAttribute,
    kind: RangeAttribute,
    id: RangeAttribute,
}

const PREFERRED: PlaceAttributes = PlaceAttributes {
    number: RangeAttribute::PREFERRED_LOCATION,
    kind: RangeAttribute::PREFERRED_LOCATION_TYPE,
    id: RangeAttribute::PREFERRED_LOCATION_ID,
};

const LAST_PREFETCH: PlaceAttributes = PlaceAttributes {
    number: RangeAttribute::LAST_PREFETCH_LOCATION,
    kind: RangeAttribute::LAST_PREFETCH_LOCATION_TYPE,
    id: RangeAttribute::LAST_PREFETCH_LOCATION_ID,
};

/// Managed memory. It is freed at once when dropped.
///
/// Its initial contents are unspecified. The driver call that frees it waits for the work of its
/// own device. A program that uses it on other devices waits for their work before the drop, as
/// [`UnifiedBuffer`](crate::UnifiedBuffer) does.
#[derive(Debug)]
#[doc(alias = "cuMemAllocManaged")]
pub struct Managed {
    device: Device,
    address: DeviceAddress,
    size: u64,
    freed: bool,
}

impl Managed {
    /// Allocates `size` bytes, above zero (`cuMemAllocManaged`, for all streams of all devices).
    ///
    /// # Errors
    /// [`MemoryError`] when the size is zero, the device has no managed memory or the driver
    /// refuses.
    #[doc(alias = "cuMemAllocManaged")]
    pub fn new(device: &Device, size: u64) -> Result<Self, MemoryError> {
        ArgumentError::not_zero("bytes of managed memory", size)?;
        let location = device.location();
        let refused = |cause| MemoryError::Create {
            size,
            location,
            cause,
        };
        if !Self::is_supported(device).map_err(refused)? {
            return Err(MemoryError::NotSupported {
                device: location,
                what: "managed memory",
            });
        }
        let allocate = || {
            let address = device.call(Call::MemAllocManaged, |driver, device| {
                driver.managed_alloc(device, size, GLOBAL)
            })?;
            Ok(Self {
                device: device.clone(),
                address,
                size,
                freed: false,
            })
        };
        // Without relaxed mode, another library's capture on this thread refuses allocations.
        let allocated = device.relaxed(allocate).and_then(|allocated| allocated);
        allocated.map_err(refused)
    }

    /// Returns `true` if a device has managed memory (attribute 83).
    pub(crate) fn is_supported(device: &Device) -> Result<bool, CallError> {
        has(device, device.ordinal(), DeviceAttribute::MANAGED_MEMORY)
    }

    /// Returns `true` if a device can work while the host accesses managed memory (attribute 89).
    pub(crate) fn is_concurrent(device: &Device) -> Result<bool, CallError> {
        let ability = DeviceAttribute::CONCURRENT_MANAGED_ACCESS;
        has(device, device.ordinal(), ability)
    }

    /// Returns a device with managed memory that cannot work while the host accesses any, even
    /// memory that the device never uses. Queries the given device first, then others of its
    /// driver.
    pub(crate) fn first_unshared(device: &Device) -> Result<Option<Ordinal>, CallError> {
        let count = device.call(Call::DeviceGetCount, |driver, _| driver.device_count())?;
        let others = (0..count).map(Ordinal);
        let others = others.filter(|other| *other != device.ordinal());
        for one in std::iter::once(device.ordinal()).chain(others) {
            if !has(device, one, DeviceAttribute::CONCURRENT_MANAGED_ACCESS)?
                && has(device, one, DeviceAttribute::MANAGED_MEMORY)?
            {
                return Ok(Some(one));
            }
        }
        Ok(None)
    }

    /// Returns the first address, which is the same for the host and all devices.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Returns the size in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Returns the device that the memory was allocated on.
    #[must_use]
    pub const fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn span(&self) -> Span<'_> {
        // SAFETY: the memory is owned here for the borrow.
        unsafe { Span::new(&self.device, self.address, self.size) }
    }

    fn at(&self, range: &Range<u64>) -> (DeviceAddress, u64) {
        let start = DeviceAddress(self.address.0.saturating_add(range.start));
        (start, range.end.saturating_sub(range.start))
    }

    /// Queues a move of a range of bytes. The caller keeps the memory until it is complete.
    pub(crate) fn prefetch(
        &self,
        stream: &Stream,
        range: &Range<u64>,
        to: Location,
    ) -> Result<(), CallError> {
        let (start, size) = self.at(range);
        let handle = stream.handle()?;
        stream
            .device()
            // SAFETY: the range is owned here, the stream is alive, and the caller frees the memory
            // only when the stream's work is complete.
            .call(Call::MemPrefetchAsync, |driver, device| unsafe {
                driver.prefetch(device, start, size, to, handle)
            })
    }

    pub(crate) fn advise(
        &self,
        range: &Range<u64>,
        advice: Advice,
        location: Location,
    ) -> Result<(), CallError> {
        let (start, size) = self.at(range);
        let mut given = false;
        let give = || {
            self.device.call(Call::MemAdvise, |driver, device| {
                driver.advise(device, start, size, advice, location)
            })?;
            given = true;
            Ok(())
        };
        // Without relaxed mode, advice breaks another library's capture on this thread.
        match self.device.relaxed(give) {
            // Only switching the mode back failed, after the call.
            _ if given => Ok(()),
            outcome => outcome?,
        }
    }

    pub(crate) fn is_read_mostly(&self, range: &Range<u64>) -> Result<bool, CallError> {
        Ok(self.ask(range, RangeAttribute::READ_MOSTLY)? != 0)
    }

    /// Returns the preferred location of a whole range. The driver does not report a NUMA node
    /// (`docs/semantics.md`).
    pub(crate) fn preferred(&self, range: &Range<u64>) -> Result<Option<Location>, CallError> {
        self.place(range, PREFERRED)
    }

    /// Returns the location that a whole range was last prefetched to.
    pub(crate) fn last_prefetch(&self, range: &Range<u64>) -> Result<Option<Location>, CallError> {
        self.place(range, LAST_PREFETCH)
    }

    /// Returns the locations that a whole range is kept mapped for.
    pub(crate) fn accessed_by(&self, range: &Range<u64>) -> Result<Vec<Location>, CallError> {
        let (start, size) = self.at(range);
        self.device
            .call(Call::MemRangeGetAttribute, |driver, device| {
                driver.range_accessed_by(device, start, size)
            })
    }

    fn ask(&self, range: &Range<u64>, attribute: RangeAttribute) -> Result<i32, CallError> {
        let (start, size) = self.at(range);
        self.device
            .call(Call::MemRangeGetAttribute, |driver, device| {
                driver.range_attribute(device, start, size, attribute)
            })
    }

    fn place(
        &self,
        range: &Range<u64>,
        attributes: PlaceAttributes,
    ) -> Result<Option<Location>, CallError> {
        let version = self
            .device
            .call(Call::DriverGetVersion, |driver, _| driver.version())?;
        if version < KINDS_SINCE {
            return Ok(match self.ask(range, attributes.number)? {
                -2 => None,
                -1 => Some(Location::HOST),
                id => Some(Location {
                    kind: LocationKind::DEVICE,
                    id,
                }),
            });
        }
        match LocationKind(self.ask(range, attributes.kind)?) {
            LocationKind::INVALID => Ok(None),
            // The number is meaningless for the host.
            LocationKind::HOST => Ok(Some(Location::HOST)),
            kind => {
                let id = self.ask(range, attributes.id)?;
                Ok(Some(Location { kind, id }))
            }
        }
    }

    /// Frees the memory (`cuMemFree`), or returns it with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the memory in it when the driver refuses, as always once the context is
    /// lost, which frees the memory.
    #[doc(alias = "cuMemFree")]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let freed = self.free();
        CloseError::of(self, freed)
    }

    pub(crate) fn free(&mut self) -> Result<(), CallError> {
        if self.freed {
            return Ok(());
        }
        let address = self.address;
        let (device, freed) = (self.device.clone(), &mut self.freed);
        let free = || {
            device
                // SAFETY: the memory is owned here and is freed once: `freed` is set below, and a
                // refused call has changed nothing. The owner must ensure that no work uses it, as
                // the type's documentation says; `UnifiedBuffer` does.
                .give_back(Call::MemFree, |driver, device| unsafe {
                    driver.free(device, address)
                })?;
            *freed = true;
            Ok(())
        };
        match device.relaxed(free) {
            // Only switching the mode back failed, after the call.
            _ if self.freed => Ok(()),
            outcome => outcome?,
        }
    }

    /// Leaks the memory: pending work may use it and cannot be waited for.
    pub(crate) fn abandon(&mut self) {
        self.freed = true;
    }
}

fn has(device: &Device, which: Ordinal, ability: DeviceAttribute) -> Result<bool, CallError> {
    device
        .call(Call::DeviceGetAttribute, |driver, _| {
            driver.device_attribute(which, ability)
        })
        .map(|value| value != 0)
}

impl Drop for Managed {
    fn drop(&mut self) {
        let freed = self.free();
        self.device.report_end("managed memory", self.size, freed);
    }
}
