//! Managed memory.
//!
//! The driver has two versions of the calls for prefetching and advice: one for devices and the
//! host as a whole (8.0), one for every kind of location (12.2). The newer one is used where the
//! driver has it.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ptr;

use cuvmm_sys::{
    CU_DEVICE_CPU, CU_DEVICE_INVALID, CUdevice, CUmem_advise, CUmem_range_attribute, CUstream,
    Optional,
};

use super::CudaDriver;
use super::answer::{ask_optional, present};
use super::physical::location_to_c;
use crate::{
    Advice, Call, DeviceAddress, Location, LocationKind, Ordinal, RangeAttribute, Result,
    StreamHandle,
};

pub(super) fn managed_alloc(
    driver: &CudaDriver,
    device: Ordinal,
    size: u64,
    flags: u32,
) -> Result<DeviceAddress> {
    let _current = driver.enter(device)?;
    let mut address = 0;
    ask_optional!(driver, MemAllocManaged:
        cuMemAllocManaged(&mut address, size as usize, flags))?;
    Ok(DeviceAddress(address))
}

/// Converts a location to the device number that the first version takes.
///
/// The first version has no number for a NUMA node; there the error is that the driver lacks
/// `younger`.
fn as_device<F: Copy>(call: Call, location: Location, younger: &Optional<F>) -> Result<CUdevice> {
    match location.kind {
        LocationKind::DEVICE => Ok(location.id),
        LocationKind::HOST => Ok(CU_DEVICE_CPU),
        _ => present(call, younger).map(|_| CU_DEVICE_CPU),
    }
}

/// Converts a device number of the first version to a location.
fn from_device(device: CUdevice) -> Location {
    if device == CU_DEVICE_CPU {
        Location::HOST
    } else {
        Location::device(Ordinal(device))
    }
}

/// # Safety
/// See [`Driver::prefetch`](crate::Driver::prefetch).
pub(super) unsafe fn prefetch(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
    size: u64,
    location: Location,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let stream = stream.0 as CUstream;
    let younger = &driver.api().cuMemPrefetchAsync_v2;
    if younger.is_present() {
        let location = location_to_c(location);
        ask_optional!(driver, MemPrefetchAsync:
            cuMemPrefetchAsync_v2(address.0, size as usize, location, 0, stream))
    } else {
        let place = as_device(Call::MemPrefetchAsync, location, younger)?;
        ask_optional!(driver, MemPrefetchAsync:
            cuMemPrefetchAsync(address.0, size as usize, place, stream))
    }
}

pub(super) fn advise(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
    size: u64,
    advice: Advice,
    location: Location,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let advice = CUmem_advise(advice.0);
    let younger = &driver.api().cuMemAdvise_v2;
    if younger.is_present() {
        let location = location_to_c(location);
        ask_optional!(driver, MemAdvise:
            cuMemAdvise_v2(address.0, size as usize, advice, location))
    } else {
        let place = as_device(Call::MemAdvise, location, younger)?;
        ask_optional!(driver, MemAdvise: cuMemAdvise(address.0, size as usize, advice, place))
    }
}

pub(super) fn range_attribute(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
    size: u64,
    attribute: RangeAttribute,
) -> Result<i32> {
    let _current = driver.enter(device)?;
    let mut value = 0i32;
    let place = ptr::from_mut(&mut value);
    let attribute = CUmem_range_attribute(attribute.0);
    ask_optional!(driver, MemRangeGetAttribute: cuMemRangeGetAttribute(
        place.cast(),
        size_of_val(&value),
        attribute,
        address.0,
        size as usize,
    ))?;
    Ok(value)
}

pub(super) fn range_accessed_by(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
    size: u64,
) -> Result<Vec<Location>> {
    // The driver silently leaves out what does not fit, so there is space for all devices and the
    // host.
    let devices = usize::try_from(driver.count()?).unwrap_or(0);
    let mut users = vec![CU_DEVICE_INVALID; devices + 1];
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemRangeGetAttribute: cuMemRangeGetAttribute(
        users.as_mut_ptr().cast(),
        size_of_val(&*users),
        CUmem_range_attribute::CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY,
        address.0,
        size as usize,
    ))?;
    let users = users.into_iter().filter(|&user| user != CU_DEVICE_INVALID);
    Ok(users.map(from_device).collect())
}
