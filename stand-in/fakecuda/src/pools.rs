//! Memory pools.
//!
//! Only an allocation needs a current context: a pool belongs to a device or to the host.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;

use cuvmm_driver::{
    AccessDesc, AccessFlags, AllocationType, DeviceAddress, Driver, DriverError, LocationKind,
    MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, Ordinal,
};
use cuvmm_sys::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemAllocationType, CUmemLocation, CUmemPool_attribute, CUmemPoolProps,
    CUmemPoolPtrExportData, CUmemoryPool, CUresult, CUstream,
};

use crate::attributes::any_device;
use crate::contexts::current;
use crate::edge::{LONGEST, Outcome, code, export, export_also, present, put, take, take_all};
use crate::physicals::{handle_types, location, put_exported, source};
use crate::state::driver;
use crate::streams::{stream_handle, target};
use crate::watched::Watched;

fn pool_handle(pool: CUmemoryPool) -> MemPoolHandle {
    MemPoolHandle(pool.addr() as u64)
}

/// # Safety
/// The pointer is null or valid for writing.
unsafe fn put_handle(place: *mut CUmemoryPool, pool: MemPoolHandle) -> Outcome {
    let handle = std::ptr::without_provenance_mut(pool.0 as usize);
    // SAFETY: as the caller promises.
    unsafe { put(place, handle) }
}

fn from_c(props: &CUmemPoolProps) -> MemPoolProps {
    MemPoolProps {
        allocation_type: AllocationType(props.allocType.0),
        handle_types: handle_types(props.handleTypes),
        location: location(props.location),
        maximum: props.maxSize as u64,
        usage: props.usage,
    }
}

/// Writes the pool of a place: a device's, by `of_device`, or the one of host or managed memory.
///
/// # Safety
/// The pointers are null or valid.
unsafe fn put_pool_of(
    pool: *mut CUmemoryPool,
    place: *mut CUmemLocation,
    kind: CUmemAllocationType,
    of_device: impl FnOnce(&Watched, Ordinal) -> Result<MemPoolHandle, DriverError>,
) -> Outcome {
    let driver = driver()?;
    present(pool)?;
    // SAFETY: as the caller promises.
    let place = location(unsafe { take(place.cast_const()) }?);
    let found = match (kind, place.kind) {
        (CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED, LocationKind::DEVICE) => {
            of_device(driver, Ordinal(place.id))
        }
        _ => driver.default_mem_pool_of(&MemPoolProps {
            allocation_type: AllocationType(kind.0),
            ..MemPoolProps::at(place)
        }),
    };
    // SAFETY: as the caller promises.
    unsafe { put_handle(pool, found.map_err(code)?) }
}

fn is_int(attribute: CUmemPool_attribute) -> bool {
    use CUmemPool_attribute as A;
    [
        A::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
        A::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
        A::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    ]
    .contains(&attribute)
}

export! {
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps) {
        let device = any_device()?;
        present(pool)?;
        // SAFETY: the caller passes properties, or null.
        let props = unsafe { take(properties) }?;
        if props.reserved != [0; 54] {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let made = driver()?
            .mem_pool_create(device, &from_c(&props))
            .map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put_handle(pool, made) }
    }

    fn cuMemPoolDestroy(pool: CUmemoryPool) {
        let device = any_device()?;
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.mem_pool_destroy(device, pool_handle(pool)) }.map_err(code)
    }

    fn cuMemPoolGetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    ) {
        let device = any_device()?;
        present(value)?;
        let asked = MemPoolAttribute(attribute.0);
        // SAFETY: the host driver refuses wrong handles.
        let found = unsafe { driver()?.mem_pool_attribute(device, pool_handle(pool), asked) }
            .map_err(code)?;
        match is_int(attribute) {
            // SAFETY: the caller passes a valid pointer for the attribute's type.
            true => unsafe { put(value.cast(), found as i32) },
            // SAFETY: the caller passes a valid pointer for the attribute's type.
            false => unsafe { put(value.cast(), found) },
        }
    }

    fn cuMemPoolSetAttribute(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
        value: *mut c_void,
    ) {
        let device = any_device()?;
        let value = match is_int(attribute) {
            // SAFETY: the caller passes a valid pointer for the attribute's type, or null.
            true => u64::from(unsafe { take(value.cast::<u32>()) }?),
            // SAFETY: the caller passes a valid pointer for the attribute's type, or null.
            false => unsafe { take(value.cast::<u64>()) }?,
        };
        let (pool, attribute) = (pool_handle(pool), MemPoolAttribute(attribute.0));
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.mem_pool_set_attribute(device, pool, attribute, value) }.map_err(code)
    }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) {
        let device = any_device()?;
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.mem_pool_trim(device, pool_handle(pool), keep as u64) }.map_err(code)
    }

    fn cuMemPoolGetAccess(
        flags: *mut CUmemAccess_flags,
        pool: CUmemoryPool,
        place: *mut CUmemLocation,
    ) {
        let device = any_device()?;
        present(flags)?;
        // SAFETY: the caller passes a location, or null.
        let place = location(unsafe { take(place.cast_const()) }?);
        // SAFETY: the host driver refuses wrong handles.
        let found = unsafe { driver()?.mem_pool_access(device, pool_handle(pool), place) }
            .map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(flags, CUmemAccess_flags(found.0)) }
    }

    fn cuMemPoolSetAccess(
        pool: CUmemoryPool,
        descriptors: *const CUmemAccessDesc,
        count: usize,
    ) {
        let device = any_device()?;
        if count > LONGEST {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        // SAFETY: the caller passes that many descriptors, or null.
        let descriptors = unsafe { take_all(descriptors, count) }?;
        let access: Vec<_> = descriptors
            .iter()
            .map(|desc| AccessDesc {
                location: location(desc.location),
                flags: AccessFlags(desc.flags.0),
            })
            .collect();
        // SAFETY: a wrong handle is refused by the host driver, and the caller takes no access away
        // that work uses.
        unsafe { driver()?.mem_pool_set_access(device, pool_handle(pool), &access) }.map_err(code)
    }

    fn cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice) {
        let driver = driver()?;
        present(pool)?;
        let found = driver.default_mem_pool(Ordinal(device)).map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put_handle(pool, found) }
    }

    fn cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice) {
        let driver = driver()?;
        present(pool)?;
        let found = driver.current_mem_pool(Ordinal(device)).map_err(|error| match code(error) {
            CUresult::CUDA_ERROR_INVALID_DEVICE => CUresult::CUDA_ERROR_INVALID_VALUE,
            other => other,
        })?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put_handle(pool, found) }
    }

    fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) {
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.set_current_mem_pool(Ordinal(device), pool_handle(pool)) }.map_err(code)
    }

    fn cuMemAllocFromPoolAsync + ptsz(
        address: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    ) {
        current()?;
        present(address)?;
        let (size, pool) = (bytes as u64, pool_handle(pool));
        if size == 0 {
            // SAFETY: C's promise (see `edge`).
            return unsafe { put(address, 0) };
        }
        let (device, stream) = target(Some(stream_handle(stream)))?;
        // SAFETY: the caller passes a stream that it created and has not destroyed; a wrong pool is
        // refused by the host driver.
        let made = unsafe { driver()?.alloc_from_pool_async(device, size, pool, stream) }
            .map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, made.0) }
    }

    fn cuMemPoolExportToShareableHandle(
        shareable: *mut c_void,
        pool: CUmemoryPool,
        handle_type: CUmemAllocationHandleType,
        flags: u64,
    ) {
        let device = any_device()?;
        present(shareable)?;
        let (pool, kind) = (pool_handle(pool), handle_types(handle_type));
        // SAFETY: the host driver refuses wrong handles.
        let exported = unsafe { driver()?.mem_pool_export(device, pool, kind, flags) }
            .map_err(code)?;
        // SAFETY: the caller passes a valid pointer for a handle of the type.
        unsafe { put_exported(shareable, exported) }
    }

    fn cuMemPoolImportFromShareableHandle(
        pool: *mut CUmemoryPool,
        shareable: *mut c_void,
        handle_type: CUmemAllocationHandleType,
        flags: u64,
    ) {
        let device = any_device()?;
        present(pool)?;
        let kind = handle_types(handle_type);
        // SAFETY: with this type the caller passes a pointer to a fabric handle, or null.
        let source = unsafe { source(shareable, kind) }?;
        // SAFETY: the caller passes an open descriptor, or a number that is not one.
        let found = unsafe { driver()?.mem_pool_import(device, source, kind, flags) }
            .map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put_handle(pool, found) }
    }

    fn cuMemPoolExportPointer(ticket: *mut CUmemPoolPtrExportData, address: CUdeviceptr) {
        let device = any_device()?;
        present(ticket)?;
        let made = driver()?
            .mem_pool_export_pointer(device, DeviceAddress(address))
            .map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(ticket, CUmemPoolPtrExportData { reserved: made.0 }) }
    }

    fn cuMemPoolImportPointer(
        address: *mut CUdeviceptr,
        pool: CUmemoryPool,
        ticket: *mut CUmemPoolPtrExportData,
    ) {
        let device = any_device()?;
        present(address)?;
        // SAFETY: the caller passes export data, or null.
        let ticket = MemPoolTicket(unsafe { take(ticket.cast_const()) }?.reserved);
        // SAFETY: the host driver refuses wrong handles.
        let found = unsafe {
            driver()?.mem_pool_import_pointer(device, pool_handle(pool), &ticket)
        }
        .map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(address, found.0) }
    }
}

export_also! {
    fn cuMemGetDefaultMemPool(
        pool: *mut CUmemoryPool,
        place: *mut CUmemLocation,
        kind: CUmemAllocationType,
    ) {
        let of_device = |driver: &Watched, device| driver.default_mem_pool(device);
        // SAFETY: C's promise (see `edge`).
        unsafe { put_pool_of(pool, place, kind, of_device) }
    }

    fn cuMemGetMemPool(
        pool: *mut CUmemoryPool,
        place: *mut CUmemLocation,
        kind: CUmemAllocationType,
    ) {
        let of_device = |driver: &Watched, device| driver.current_mem_pool(device);
        // SAFETY: C's promise (see `edge`).
        unsafe { put_pool_of(pool, place, kind, of_device) }
    }
}
