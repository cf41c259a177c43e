//! Export and import of physicals.
//!
//! Only a handle is passed: size, place and identity of the device travel beside it, through
//! [`share`](crate::share) or the caller's own means. The driver does not know the size and access
//! of imported memory: an importer can always write to it.
//!
//! `unsafe` is used to export and to import. The exported handle is alive; an imported one is borrowed
//! for the call.
#![allow(unsafe_code)]

#[cfg(unix)]
use std::os::fd::AsRawFd as _;

use cuvmm_driver::{
    Call, Exported, HandleTypes, Location, LocationKind, PhysicalHandle, PhysicalProps,
};

use super::physical::Physical;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};

/// Returns a copy of descriptor 0, which the driver refuses: it takes a descriptor as a pointer, and
/// this one is null. A process that was started without a standard input may get it.
fn instead_of_zero(handle: &Exported) -> Option<Exported> {
    #[cfg(unix)]
    if let Exported::Fd(descriptor) = handle
        && descriptor.as_raw_fd() == 0
    {
        // A copy has a number above the standard streams. Without one the driver refuses.
        return descriptor.try_clone().ok().map(Exported::Fd);
    }
    let _ = handle;
    None
}

impl Physical {
    /// Exports a handle for another process (`cuMemExportToShareableHandle`): a descriptor, on Windows an
    /// NT handle, or 64 bytes that name the memory across nodes.
    ///
    /// From then on the memory counts as [exported](Self::is_exported) for good: a pool releases it
    /// like other memory, but never gives it to another user. It stays allocated while a descriptor,
    /// an NT handle or an importer holds it.
    ///
    /// # Errors
    /// [`MemoryError`] when the memory was not [created](super::PhysicalBuilder::shareable) for
    /// that type, was imported itself, or the driver refuses.
    #[doc(alias = "export_handle")]
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self, handle_type: HandleTypes) -> Result<Exported, MemoryError> {
        one_type(handle_type)?;
        let exported = self.handle_as(handle_type)?;
        self.mark_exported();
        Ok(exported)
    }

    /// Exports all physicals, in order, or none; after a failure none counts as exported.
    ///
    /// The caller keeps the memory from reuse meanwhile: it is marked last.
    pub(crate) fn export_all(
        physicals: &[&Self],
        handle_type: HandleTypes,
    ) -> Result<Vec<Exported>, MemoryError> {
        one_type(handle_type)?;
        let handles = physicals
            .iter()
            .map(|physical| physical.handle_as(handle_type))
            .collect::<Result<_, _>>()?;
        physicals
            .iter()
            .for_each(|physical| physical.mark_exported());
        Ok(handles)
    }

    fn handle_as(&self, handle_type: HandleTypes) -> Result<Exported, MemoryError> {
        let handle = self.as_raw();
        self.device()
            // SAFETY: the handle is owned here and has not been released.
            .call(Call::MemExportToShareableHandle, |driver, _| unsafe {
                driver.export(handle, handle_type, 0)
            })
            .map_err(|cause| MemoryError::Export { handle_type, cause })
    }

    /// Imports memory that another process, or this one, exported
    /// (`cuMemImportFromShareableHandle`). The memory is no copy, and outlives its exporter. The
    /// handle may be closed afterwards.
    ///
    /// `device` is the device of the memory, or any device for host memory. The driver does not
    /// report the size of imported memory: a wrong `size` fails only when the memory is mapped.
    ///
    /// # Errors
    /// [`MemoryError`] when the size is not whole granules, the driver refuses the handle, or the
    /// memory is on another device.
    #[doc(alias = "import_handle")]
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import(device: &Device, handle: &Exported, size: u64) -> Result<Self, MemoryError> {
        let granule = device.granule();
        ArgumentError::whole("bytes of an import", size, granule.bytes())?;
        let copy = instead_of_zero(handle);
        let source = copy.as_ref().unwrap_or(handle).as_source();
        let imported = device
            // SAFETY: the handle is borrowed, so it is open for the call.
            .call(Call::MemImportFromShareableHandle, |driver, _| unsafe {
                driver.import(source, source.handle_type())
            })?;
        // Owned from here on, so that a refusal releases it.
        let physical = Self::owning(device, imported, size, device.location());
        let location = location_of(device, imported)?;
        if location == device.location() {
            return Ok(physical);
        }
        if location.kind == LocationKind::DEVICE {
            return Err(MemoryError::Elsewhere {
                offset: 0,
                found: location,
                wanted: device.location(),
            });
        }
        let unknown = ArgumentError::HandleType(0);
        physical.relocated(location).ok_or(unknown.into())
    }

    /// Tries to export one granule of a device's memory as a handle type, since the driver may
    /// refuse even a type that an attribute reports as supported.
    ///
    /// Makes `cuMemCreate`, `cuMemExportToShareableHandle` and `cuMemRelease`.
    ///
    /// # Errors
    /// [`MemoryError`] with the reason.
    #[doc(alias = "VMMIPCTransport")]
    pub fn probe_export(device: &Device, handle_type: HandleTypes) -> Result<(), MemoryError> {
        one_type(handle_type)?;
        let granule = Self::builder(device, device.granularity())
            .shareable(handle_type)
            .create()?;
        granule.export(handle_type)?;
        Ok(())
    }
}

pub(crate) fn one_type(handle_type: HandleTypes) -> Result<(), ArgumentError> {
    match handle_type {
        HandleTypes::OS | HandleTypes::FABRIC => Ok(()),
        _ => Err(ArgumentError::HandleType(handle_type.bits())),
    }
}

fn location_of(device: &Device, handle: PhysicalHandle) -> Result<Location, CallError> {
    device
        .call(Call::MemGetAllocationPropertiesFromHandle, |driver, _| {
            // SAFETY: the handle has just been imported and is released by its owner.
            unsafe { driver.physical_props(handle) }
        })
        .map(|props: PhysicalProps| props.location)
}
