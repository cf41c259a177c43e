//! Physical memory on its way to another process, and from one.
//!
//! A handle is all that travels here: size, place and identity of the device go beside it, by
//! [`share`](crate::own) or by the caller's own means. The driver knows neither a size nor a right
//! of what it imports: the importer can write to it, whatever it was told.
//!
//! `unsafe` here: exporting and importing. Our handle is alive; a descriptor is borrowed for the call.
#![allow(unsafe_code)]

use std::os::fd::AsRawFd as _;

use cuvmm_driver::{
    Call, Exported, HandleTypes, ImportSource, Location, LocationKind, PhysicalHandle,
    PhysicalProps,
};

use super::physical::Physical;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};

impl Physical {
    /// A handle that another process can import (`cuMemExportToShareableHandle`). A descriptor, or
    /// 64 bytes that name the memory across nodes.
    ///
    /// From then on the memory is [exported](Self::is_exported) for good: it is released in the end
    /// as any other, but never handed to anybody else by a pool. It lives on while a descriptor
    /// or an importer has it.
    ///
    /// # Errors
    /// [`MemoryError`] when the memory was not [created](super::PhysicalBuilder::shareable) for that
    /// type, was imported itself, or the driver refuses.
    #[doc(alias = "cuMemExportToShareableHandle")]
    pub fn export(&self, handle_type: HandleTypes) -> Result<Exported, MemoryError> {
        one_type(handle_type)?;
        let exported = self.handle_as(handle_type)?;
        self.mark_exported();
        Ok(exported)
    }

    /// Handles of several, in order: of all, or of none, and none is exported then.
    ///
    /// Whoever calls sees to it that nothing becomes of the memory meanwhile: it is marked last.
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
            // SAFETY: the handle is ours and has not been released.
            .call(Call::MemExportToShareableHandle, |driver, _| unsafe {
                driver.export(handle, handle_type, 0)
            })
            .map_err(|cause| MemoryError::Export { handle_type, cause })
    }

    /// Memory that another process, or this one, exported
    /// (`cuMemImportFromShareableHandle`). It is the same memory, not a copy, and it lives on if
    /// its exporter does not. The handle may be closed afterwards.
    ///
    /// `device` is the one that the memory lies on, or any for host memory. The driver does not tell
    /// the size of what it imports, so a wrong `size` is an error only when it is mapped.
    ///
    /// # Errors
    /// [`MemoryError`] when the size is not whole granules, the driver refuses the handle, or the
    /// memory lies on another device.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    pub fn import(device: &Device, handle: &Exported, size: u64) -> Result<Self, MemoryError> {
        let granule = device.granule();
        ArgumentError::whole("bytes of an import", size, granule.bytes())?;
        let (source, handle_type) = match handle {
            Exported::Fd(fd) => (ImportSource::Fd(fd.as_raw_fd()), HandleTypes::POSIX_FD),
            Exported::Fabric(name) => (ImportSource::Fabric(*name), HandleTypes::FABRIC),
            _ => return Err(UNKNOWN.into()),
        };
        let imported = device
            // SAFETY: the descriptor is borrowed, so it is open for the call.
            .call(Call::MemImportFromShareableHandle, |driver, _| unsafe {
                driver.import(source, handle_type)
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
        physical.relocated(location).ok_or(UNKNOWN.into())
    }

    /// Tries on one granule whether memory of a device can be exported as a handle type: an
    /// attribute may say yes where the driver says no.
    ///
    /// Calls `cuMemCreate`, `cuMemExportToShareableHandle`, `cuMemRelease`.
    ///
    /// # Errors
    /// [`MemoryError`] with the reason why not.
    pub fn probe_export(device: &Device, handle_type: HandleTypes) -> Result<(), MemoryError> {
        one_type(handle_type)?;
        let granule = Self::builder(device, device.granularity())
            .shareable(handle_type)
            .create()?;
        granule.export(handle_type)?;
        Ok(())
    }
}

/// A handle of a kind that this library does not know.
const UNKNOWN: ArgumentError = ArgumentError::HandleType { bits: 0 };

/// A type that there is, and one of them only.
pub(crate) fn one_type(handle_type: HandleTypes) -> Result<(), ArgumentError> {
    match handle_type {
        HandleTypes::POSIX_FD | HandleTypes::FABRIC => Ok(()),
        _ => Err(ArgumentError::HandleType {
            bits: handle_type.bits(),
        }),
    }
}

/// Where the driver says that a physical lies.
fn location_of(device: &Device, handle: PhysicalHandle) -> Result<Location, CallError> {
    device
        .call(Call::MemGetAllocationPropertiesFromHandle, |driver, _| {
            // SAFETY: the handle has just been imported and is released by its owner.
            unsafe { driver.physical_props(handle) }
        })
        .map(|props: PhysicalProps| props.location)
}
