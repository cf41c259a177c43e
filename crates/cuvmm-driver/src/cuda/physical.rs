//! Physical memory: creating, releasing, sharing with other processes.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;

use cuvmm_sys::{
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationPropFlags, CUmemAllocationType,
    CUmemFabricHandle, CUmemLocation, CUmemLocationType, CUresult,
};

use super::CudaDriver;
use super::answer::{ask, ask_optional};
use super::os;
use crate::{
    AllocationType, Call, DeviceAddress, DriverError, Exported, HandleTypes, ImportSource,
    Location, LocationKind, OsHandle, PhysicalHandle, PhysicalProps, Result,
};

/// Converts a location to its C form.
pub(super) fn location_to_c(location: Location) -> CUmemLocation {
    CUmemLocation {
        kind: CUmemLocationType(location.kind.0),
        id: location.id,
    }
}

/// Converts properties to their C form, which points to `security`.
pub(super) fn to_c(props: &PhysicalProps, security: &os::Security) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CUmemAllocationType(props.allocation_type.0),
        requestedHandleTypes: handle_type_to_c(props.handle_types),
        location: location_to_c(props.location),
        win32HandleMetaData: security.of_physical(),
        allocFlags: CUmemAllocationPropFlags {
            compressionType: props.compression,
            gpuDirectRDMACapable: props.rdma_capable.into(),
            usage: props.usage,
            reserved: [0; 4],
        },
    }
}

/// Converts properties from their C form.
fn from_c(props: &CUmemAllocationProp) -> PhysicalProps {
    PhysicalProps {
        allocation_type: AllocationType(props.kind.0),
        handle_types: HandleTypes::from_bits_retain(props.requestedHandleTypes.0 as u32),
        location: Location {
            kind: LocationKind(props.location.kind.0),
            id: props.location.id,
        },
        compression: props.allocFlags.compressionType,
        rdma_capable: props.allocFlags.gpuDirectRDMACapable != 0,
        usage: props.allocFlags.usage,
    }
}

pub(super) fn handle_type_to_c(types: HandleTypes) -> CUmemAllocationHandleType {
    CUmemAllocationHandleType(types.bits() as i32)
}

pub(super) fn create(
    driver: &CudaDriver,
    size: u64,
    props: &PhysicalProps,
    flags: u64,
) -> Result<PhysicalHandle> {
    let security = os::Security::of(Call::MemCreate, props.handle_types)?;
    let props = to_c(props, &security);
    let mut handle = 0;
    ask!(driver, MemCreate: cuMemCreate(&mut handle, size as usize, &props, flags))?;
    Ok(PhysicalHandle(handle))
}

/// # Safety
/// See [`Driver::release`](crate::Driver::release).
pub(super) unsafe fn release(driver: &CudaDriver, handle: PhysicalHandle) -> Result<()> {
    ask!(driver, MemRelease: cuMemRelease(handle.0))
}

pub(super) fn retain(driver: &CudaDriver, address: DeviceAddress) -> Result<PhysicalHandle> {
    let mut handle = 0;
    let address = address.0 as *mut c_void;
    ask_optional!(driver, MemRetainAllocationHandle:
        cuMemRetainAllocationHandle(&mut handle, address))?;
    Ok(PhysicalHandle(handle))
}

/// # Safety
/// See [`Driver::physical_props`](crate::Driver::physical_props).
pub(super) unsafe fn physical_props(
    driver: &CudaDriver,
    handle: PhysicalHandle,
) -> Result<PhysicalProps> {
    let nowhere = CUmemLocation {
        kind: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID,
        id: 0,
    };
    let mut props = CUmemAllocationProp::pinned(nowhere);
    ask!(driver, MemGetAllocationPropertiesFromHandle:
        cuMemGetAllocationPropertiesFromHandle(&mut props, handle.0))?;
    Ok(from_c(&props))
}

/// The buffer that an export writes to: a handle of the system or 64 bytes, depending on the type. It is
/// large enough for every type. What it holds at first is no handle.
#[repr(C, align(8))]
pub(super) struct Shareable([u8; 64]);

impl Shareable {
    pub(super) const fn new() -> Self {
        Self([0xff; 64])
    }

    /// Returns the handle of a type that `call` has written.
    pub(super) fn exported(self, call: Call, handle_type: HandleTypes) -> Result<Exported> {
        match handle_type {
            HandleTypes::FABRIC => Ok(Exported::Fabric(self.0)),
            _ => self.os_handle(call, handle_type).map(Exported::from),
        }
    }

    /// Returns the handle of the system that `call` has written, if `handle_type` is its type.
    pub(super) fn os_handle(self, call: Call, handle_type: HandleTypes) -> Result<OsHandle> {
        match handle_type {
            HandleTypes::OS => os::own(call, self.0),
            // The driver exported a type that this crate can neither hold nor close.
            _ => Err(DriverError::new(call, CUresult::CUDA_ERROR_NOT_SUPPORTED)),
        }
    }
}

/// Returns the pointer for a handle to import: a handle of the system is passed as the pointer's value, a
/// fabric handle by reference.
pub(super) fn place_of(source: ImportSource, fabric: &mut CUmemFabricHandle) -> *mut c_void {
    if let ImportSource::Fabric(data) = source {
        fabric.data = data;
    }
    let named = ptr::from_mut(fabric).cast();
    source.os_handle().map_or(named, os::pointer_of)
}

/// # Safety
/// See [`Driver::export`](crate::Driver::export).
pub(super) unsafe fn export(
    driver: &CudaDriver,
    handle: PhysicalHandle,
    handle_type: HandleTypes,
    flags: u64,
) -> Result<Exported> {
    let mut shareable = Shareable::new();
    let place = ptr::from_mut(&mut shareable).cast::<c_void>();
    ask!(driver, MemExportToShareableHandle:
        cuMemExportToShareableHandle(place, handle.0, handle_type_to_c(handle_type), flags))?;
    shareable.exported(Call::MemExportToShareableHandle, handle_type)
}

/// # Safety
/// See [`Driver::import`](crate::Driver::import).
pub(super) unsafe fn import(
    driver: &CudaDriver,
    source: ImportSource,
    handle_type: HandleTypes,
) -> Result<PhysicalHandle> {
    let handle_type = handle_type_to_c(handle_type);
    let mut fabric = CUmemFabricHandle { data: [0; 64] };
    let place = place_of(source, &mut fabric);
    let mut handle = 0;
    ask!(driver, MemImportFromShareableHandle:
        cuMemImportFromShareableHandle(&mut handle, place, handle_type))?;
    Ok(PhysicalHandle(handle))
}
