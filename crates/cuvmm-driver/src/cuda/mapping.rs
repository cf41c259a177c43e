//! Mappings, access, and queries about an address.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use cuvmm_sys::{
    CUipcMemHandle, CUmemAccess_flags, CUmemAccessDesc, CUmemRangeHandleType, CUpointer_attribute,
};

use super::CudaDriver;
use super::answer::{ask, ask_optional};
use super::physical::{Shareable, location_to_c};
use crate::{
    AccessDesc, AccessFlags, Call, DeviceAddress, HandleTypes, Location, Ordinal, OsHandle,
    PhysicalHandle, PointerAttribute, Result,
};

/// # Safety
/// See [`Driver::map`](crate::Driver::map).
pub(super) unsafe fn map(
    driver: &CudaDriver,
    address: DeviceAddress,
    size: u64,
    offset: u64,
    handle: PhysicalHandle,
    flags: u64,
) -> Result<()> {
    ask!(driver, MemMap:
        cuMemMap(address.0, size as usize, offset as usize, handle.0, flags))
}

/// # Safety
/// See [`Driver::unmap`](crate::Driver::unmap).
pub(super) unsafe fn unmap(driver: &CudaDriver, address: DeviceAddress, size: u64) -> Result<()> {
    ask!(driver, MemUnmap: cuMemUnmap(address.0, size as usize))
}

/// # Safety
/// See [`Driver::set_access`](crate::Driver::set_access).
pub(super) unsafe fn set_access(
    driver: &CudaDriver,
    address: DeviceAddress,
    size: u64,
    access: &[AccessDesc],
) -> Result<()> {
    let to_c = |access: &AccessDesc| CUmemAccessDesc {
        location: location_to_c(access.location),
        flags: CUmemAccess_flags(access.flags.0),
    };
    let ask = |access: &[CUmemAccessDesc]| {
        ask!(driver, MemSetAccess:
            cuMemSetAccess(address.0, size as usize, access.as_ptr(), access.len()))
    };
    // Nearly always there is one device, and this call is made by every commit.
    match access {
        [one] => ask(&[to_c(one)]),
        many => ask(&many.iter().map(to_c).collect::<Vec<_>>()),
    }
}

pub(super) fn get_access(
    driver: &CudaDriver,
    address: DeviceAddress,
    location: Location,
) -> Result<AccessFlags> {
    let location = location_to_c(location);
    let mut flags = 0;
    ask!(driver, MemGetAccess: cuMemGetAccess(&mut flags, &location, address.0))?;
    Ok(AccessFlags(flags as i32))
}

pub(super) fn address_range(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
) -> Result<(DeviceAddress, u64)> {
    let _current = driver.enter(device)?;
    let (mut base, mut size) = (0, 0);
    ask_optional!(driver, MemGetAddressRange:
        cuMemGetAddressRange_v2(&mut base, &mut size, address.0))?;
    Ok((DeviceAddress(base), size as u64))
}

pub(super) fn pointer_attribute(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
    attribute: PointerAttribute,
) -> Result<u64> {
    let _current = driver.enter(device)?;
    // Any attribute number may be passed, and some values are structures: the largest known has 16
    // bytes. The first eight bytes are returned. For an `int` they are its value, because the rest
    // is zero.
    let mut value = [0u64; 16];
    let place = value.as_mut_ptr().cast::<c_void>();
    let attribute = CUpointer_attribute(attribute.0);
    ask_optional!(driver, PointerGetAttribute:
        cuPointerGetAttribute(place, attribute, address.0))?;
    let [first, ..] = value;
    Ok(first)
}

/// # Safety
/// See [`Driver::dma_buf`](crate::Driver::dma_buf).
pub(super) unsafe fn dma_buf(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
    size: u64,
) -> Result<OsHandle> {
    let _current = driver.enter(device)?;
    let mut shareable = Shareable::new();
    let place = ptr::from_mut(&mut shareable).cast::<c_void>();
    let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    ask_optional!(driver, MemGetHandleForAddressRange:
        cuMemGetHandleForAddressRange(place, address.0, size as usize, kind, 0))?;
    shareable.os_handle(Call::MemGetHandleForAddressRange, HandleTypes::POSIX_FD)
}

pub(super) fn ipc_mem_handle(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
) -> Result<[u8; 64]> {
    let _current = driver.enter(device)?;
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    ask_optional!(driver, IpcGetMemHandle: cuIpcGetMemHandle(&mut handle, address.0))?;
    Ok(handle.reserved.map(|byte| byte as u8))
}
