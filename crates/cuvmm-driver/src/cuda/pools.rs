//! Memory pools of the driver, and sharing them with other processes.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use cuvmm_sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationType, CUmemFabricHandle,
    CUmemPool_attribute, CUmemPoolProps, CUmemPoolPtrExportData, CUmemoryPool, CUstream,
};

use super::CudaDriver;
use super::answer::ask_optional;
use super::os::Security;
use super::physical::{Shareable, handle_type_to_c, location_to_c, place_of};
use crate::{
    AccessDesc, AccessFlags, Call, DeviceAddress, Exported, HandleTypes, ImportSource, Location,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, Ordinal, Result, StreamHandle,
};

fn to_c(pool: MemPoolHandle) -> CUmemoryPool {
    pool.0 as CUmemoryPool
}

fn from_c(pool: CUmemoryPool) -> MemPoolHandle {
    MemPoolHandle(pool as u64)
}

pub(super) fn mem_pool_create(
    driver: &CudaDriver,
    device: Ordinal,
    props: &MemPoolProps,
) -> Result<MemPoolHandle> {
    let _current = driver.enter(device)?;
    let security = Security::of(Call::MemPoolCreate, props.handle_types)?;
    let props = CUmemPoolProps {
        allocType: CUmemAllocationType(props.allocation_type.0),
        handleTypes: handle_type_to_c(props.handle_types),
        win32SecurityAttributes: security.of_pool(),
        maxSize: props.maximum as usize,
        usage: props.usage,
        ..CUmemPoolProps::pinned(location_to_c(props.location))
    };
    let mut pool = ptr::null_mut();
    ask_optional!(driver, MemPoolCreate: cuMemPoolCreate(&mut pool, &props))?;
    Ok(from_c(pool))
}

/// # Safety
/// See [`Driver::mem_pool_destroy`](crate::Driver::mem_pool_destroy).
pub(super) unsafe fn mem_pool_destroy(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemPoolDestroy: cuMemPoolDestroy(to_c(pool)))
}

/// # Safety
/// See [`Driver::mem_pool_attribute`](crate::Driver::mem_pool_attribute).
pub(super) unsafe fn mem_pool_attribute(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
    attribute: MemPoolAttribute,
) -> Result<u64> {
    let _current = driver.enter(device)?;
    // The driver writes an `int` or a `cuuint64_t`. The `int` attributes are not negative, so the
    // value is right in either case, because the rest is zero.
    let mut value = 0_u64;
    let place = ptr::from_mut(&mut value).cast::<c_void>();
    let attribute = CUmemPool_attribute(attribute.0);
    ask_optional!(driver, MemPoolGetAttribute:
        cuMemPoolGetAttribute(to_c(pool), attribute, place))?;
    Ok(value)
}

/// # Safety
/// See [`Driver::mem_pool_set_attribute`](crate::Driver::mem_pool_set_attribute).
pub(super) unsafe fn mem_pool_set_attribute(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
    attribute: MemPoolAttribute,
    value: u64,
) -> Result<()> {
    let _current = driver.enter(device)?;
    // The driver reads an `int` or a `cuuint64_t`. The lowest bytes come first.
    let mut value = value;
    let place = ptr::from_mut(&mut value).cast::<c_void>();
    let attribute = CUmemPool_attribute(attribute.0);
    ask_optional!(driver, MemPoolSetAttribute:
        cuMemPoolSetAttribute(to_c(pool), attribute, place))
}

/// # Safety
/// See [`Driver::mem_pool_trim`](crate::Driver::mem_pool_trim).
pub(super) unsafe fn mem_pool_trim(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
    keep: u64,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemPoolTrimTo: cuMemPoolTrimTo(to_c(pool), keep as usize))
}

/// # Safety
/// See [`Driver::mem_pool_access`](crate::Driver::mem_pool_access).
pub(super) unsafe fn mem_pool_access(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
    location: Location,
) -> Result<AccessFlags> {
    let _current = driver.enter(device)?;
    let mut location = location_to_c(location);
    let mut flags = CUmemAccess_flags(0);
    ask_optional!(driver, MemPoolGetAccess:
        cuMemPoolGetAccess(&mut flags, to_c(pool), &mut location))?;
    Ok(AccessFlags(flags.0))
}

/// # Safety
/// See [`Driver::mem_pool_set_access`](crate::Driver::mem_pool_set_access).
pub(super) unsafe fn mem_pool_set_access(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
    access: &[AccessDesc],
) -> Result<()> {
    let _current = driver.enter(device)?;
    let to_desc = |access: &AccessDesc| CUmemAccessDesc {
        location: location_to_c(access.location),
        flags: CUmemAccess_flags(access.flags.0),
    };
    let access: Vec<_> = access.iter().map(to_desc).collect();
    ask_optional!(driver, MemPoolSetAccess:
        cuMemPoolSetAccess(to_c(pool), access.as_ptr(), access.len()))
}

pub(super) fn default_mem_pool(driver: &CudaDriver, device: Ordinal) -> Result<MemPoolHandle> {
    let _current = driver.enter(device)?;
    let mut pool = ptr::null_mut();
    ask_optional!(driver, DeviceGetDefaultMemPool:
        cuDeviceGetDefaultMemPool(&mut pool, device.0))?;
    Ok(from_c(pool))
}

pub(super) fn current_mem_pool(driver: &CudaDriver, device: Ordinal) -> Result<MemPoolHandle> {
    let _current = driver.enter(device)?;
    let mut pool = ptr::null_mut();
    ask_optional!(driver, DeviceGetMemPool: cuDeviceGetMemPool(&mut pool, device.0))?;
    Ok(from_c(pool))
}

/// # Safety
/// See [`Driver::set_current_mem_pool`](crate::Driver::set_current_mem_pool).
pub(super) unsafe fn set_current_mem_pool(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, DeviceSetMemPool: cuDeviceSetMemPool(device.0, to_c(pool)))
}

/// # Safety
/// See [`Driver::alloc_from_pool_async`](crate::Driver::alloc_from_pool_async).
pub(super) unsafe fn alloc_from_pool_async(
    driver: &CudaDriver,
    device: Ordinal,
    size: u64,
    pool: MemPoolHandle,
    stream: StreamHandle,
) -> Result<DeviceAddress> {
    let _current = driver.enter(device)?;
    let mut address = 0;
    ask_optional!(driver, MemAllocFromPoolAsync:
        cuMemAllocFromPoolAsync(
            &mut address, size as usize, to_c(pool), stream.0 as CUstream))?;
    Ok(DeviceAddress(address))
}

/// # Safety
/// See [`Driver::mem_pool_export`](crate::Driver::mem_pool_export).
pub(super) unsafe fn mem_pool_export(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
    handle_type: HandleTypes,
    flags: u64,
) -> Result<Exported> {
    let _current = driver.enter(device)?;
    let mut shareable = Shareable::new();
    let place = ptr::from_mut(&mut shareable).cast::<c_void>();
    let kind = handle_type_to_c(handle_type);
    ask_optional!(driver, MemPoolExportToShareableHandle:
        cuMemPoolExportToShareableHandle(place, to_c(pool), kind, flags))?;
    shareable.exported(Call::MemPoolExportToShareableHandle, handle_type)
}

/// # Safety
/// See [`Driver::mem_pool_import`](crate::Driver::mem_pool_import).
pub(super) unsafe fn mem_pool_import(
    driver: &CudaDriver,
    device: Ordinal,
    source: ImportSource,
    handle_type: HandleTypes,
    flags: u64,
) -> Result<MemPoolHandle> {
    let _current = driver.enter(device)?;
    let kind = handle_type_to_c(handle_type);
    let mut fabric = CUmemFabricHandle { data: [0; 64] };
    let place = place_of(source, &mut fabric);
    let mut pool = ptr::null_mut();
    ask_optional!(driver, MemPoolImportFromShareableHandle:
        cuMemPoolImportFromShareableHandle(&mut pool, place, kind, flags))?;
    Ok(from_c(pool))
}

pub(super) fn mem_pool_export_pointer(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
) -> Result<MemPoolTicket> {
    let _current = driver.enter(device)?;
    let mut ticket = CUmemPoolPtrExportData { reserved: [0; 64] };
    ask_optional!(driver, MemPoolExportPointer: cuMemPoolExportPointer(&mut ticket, address.0))?;
    Ok(MemPoolTicket(ticket.reserved))
}

/// # Safety
/// See [`Driver::mem_pool_import_pointer`](crate::Driver::mem_pool_import_pointer).
pub(super) unsafe fn mem_pool_import_pointer(
    driver: &CudaDriver,
    device: Ordinal,
    pool: MemPoolHandle,
    ticket: &MemPoolTicket,
) -> Result<DeviceAddress> {
    let _current = driver.enter(device)?;
    let mut ticket = CUmemPoolPtrExportData { reserved: ticket.0 };
    let mut address = 0;
    ask_optional!(driver, MemPoolImportPointer:
        cuMemPoolImportPointer(&mut address, to_c(pool), &mut ticket))?;
    Ok(DeviceAddress(address))
}
