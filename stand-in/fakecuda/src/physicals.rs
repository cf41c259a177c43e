//! Physical memory: creating, releasing, exporting, importing.
//!
//! `unsafe` exports functions (see `state`).
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::IntoRawFd as _;

use cuvmm_driver::{
    AllocationType, DeviceAddress, Driver, Exported, GranularityKind, HandleTypes, ImportSource,
    Location, LocationKind, PhysicalHandle, PhysicalProps,
};
use cuvmm_sys::{
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationPropFlags, CUmemAllocationType, CUmemFabricHandle, CUmemGenericAllocationHandle,
    CUmemLocation, CUmemLocationType, CUresult,
};

use crate::edge::{Outcome, code, export, present, put, take};
use crate::state::driver;

pub(crate) fn location(location: CUmemLocation) -> Location {
    Location {
        kind: LocationKind(location.kind.0),
        id: location.id,
    }
}

pub(crate) fn handle_types(types: CUmemAllocationHandleType) -> HandleTypes {
    HandleTypes::from_bits_retain(types.0 as u32)
}

fn from_c(props: &CUmemAllocationProp) -> PhysicalProps {
    PhysicalProps {
        allocation_type: AllocationType(props.kind.0),
        handle_types: handle_types(props.requestedHandleTypes),
        location: location(props.location),
        compression: props.allocFlags.compressionType,
        rdma_capable: props.allocFlags.gpuDirectRDMACapable != 0,
        usage: props.allocFlags.usage,
    }
}

fn to_c(props: &PhysicalProps) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CUmemAllocationType(props.allocation_type.0),
        requestedHandleTypes: CUmemAllocationHandleType(props.handle_types.bits() as i32),
        location: CUmemLocation {
            kind: CUmemLocationType(props.location.kind.0),
            id: props.location.id,
        },
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationPropFlags {
            compressionType: props.compression,
            gpuDirectRDMACapable: props.rdma_capable.into(),
            usage: props.usage,
            reserved: [0; 4],
        },
    }
}

/// Refuses properties that the trait cannot express: reserved bytes, metadata of Windows, and
/// unknown kinds of compression. As recorded, the last reserved byte may hold anything.
fn check(props: &CUmemAllocationProp) -> Outcome {
    let [first, second, third, _] = props.allocFlags.reserved;
    let reserved = [first, second, third] != [0; 3];
    let windows = !props.win32HandleMetaData.is_null();
    if reserved || windows || props.allocFlags.compressionType > 1 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    Ok(())
}

/// Writes an exported handle: a descriptor, or a fabric handle.
///
/// # Safety
/// The pointer is null or valid for writing a handle of the type.
pub(crate) unsafe fn put_exported(place: *mut c_void, exported: Exported) -> Outcome {
    match exported {
        // SAFETY: as the caller promises.
        Exported::Fd(fd) => unsafe { put(place.cast(), fd.into_raw_fd()) },
        // SAFETY: as the caller promises.
        Exported::Fabric(data) => unsafe { put(place.cast(), CUmemFabricHandle { data }) },
        _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
    }
}

/// Returns the handle to import: with every type but fabric handles the value of the pointer is a
/// descriptor.
///
/// # Safety
/// For a fabric handle, the pointer is null or valid for reading it.
pub(crate) unsafe fn source(shareable: *mut c_void, kind: HandleTypes) -> Outcome<ImportSource> {
    if kind != HandleTypes::FABRIC {
        return Ok(ImportSource::Fd(shareable.addr() as i32));
    }
    // SAFETY: as the caller promises.
    let handle = unsafe { take(shareable.cast::<CUmemFabricHandle>()) }?;
    Ok(ImportSource::Fabric(handle.data))
}

export! {
    fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        properties: *const CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags,
    ) {
        let driver = driver()?;
        present(granularity)?;
        // SAFETY: the caller passes properties, or null.
        let props = from_c(&unsafe { take(properties) }?);
        let kind = GranularityKind(option.0);
        let found = driver.allocation_granularity(&props, kind).map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(granularity, found as usize) }
    }

    fn cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        size: usize,
        properties: *const CUmemAllocationProp,
        flags: u64,
    ) {
        let driver = driver()?;
        present(handle)?;
        // SAFETY: the caller passes properties, or null.
        let props = unsafe { take(properties) }?;
        check(&props)?;
        let props = from_c(&props);
        let made = driver.create(size as u64, &props, flags).map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(handle, made.0) }
    }

    fn cuMemRelease(handle: CUmemGenericAllocationHandle) {
        // SAFETY: the host driver refuses wrong handles.
        unsafe { driver()?.release(PhysicalHandle(handle)) }.map_err(code)
    }

    fn cuMemRetainAllocationHandle(
        handle: *mut CUmemGenericAllocationHandle,
        address: *mut c_void,
    ) {
        let driver = driver()?;
        present(handle)?;
        let found = driver.retain(DeviceAddress(address.addr() as u64)).map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(handle, found.0) }
    }

    fn cuMemGetAllocationPropertiesFromHandle(
        properties: *mut CUmemAllocationProp,
        handle: CUmemGenericAllocationHandle,
    ) {
        let driver = driver()?;
        present(properties)?;
        // SAFETY: the host driver refuses wrong handles.
        let found = unsafe { driver.physical_props(PhysicalHandle(handle)) }.map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(properties, to_c(&found)) }
    }

    fn cuMemExportToShareableHandle(
        shareable: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        handle_type: CUmemAllocationHandleType,
        flags: u64,
    ) {
        let driver = driver()?;
        present(shareable)?;
        let (handle, kind) = (PhysicalHandle(handle), handle_types(handle_type));
        // SAFETY: the host driver refuses wrong handles.
        let exported = unsafe { driver.export(handle, kind, flags) }.map_err(code)?;
        // SAFETY: the caller passes a valid pointer for a handle of the type.
        unsafe { put_exported(shareable, exported) }
    }

    fn cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle,
        shareable: *mut c_void,
        handle_type: CUmemAllocationHandleType,
    ) {
        let driver = driver()?;
        present(handle)?;
        // Descriptor 0 is a null pointer too.
        present(shareable)?;
        let kind = handle_types(handle_type);
        // SAFETY: with this type the caller passes a pointer to a fabric handle, or null.
        let source = unsafe { source(shareable, kind) }?;
        // SAFETY: the caller passes an open descriptor, or a number that is not one.
        let found = unsafe { driver.import(source, kind) }.map_err(code)?;
        // SAFETY: C's promise (see `edge`).
        unsafe { put(handle, found.0) }
    }
}
