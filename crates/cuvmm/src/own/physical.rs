//! One physical allocation.
//!
//! `unsafe` here: asking for properties of a handle and releasing it. The handle is ours, and it
//! is released once, when the last clone and the last mapping have gone.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cuvmm_driver::{
    Call, DeviceAddress, HandleTypes, Location, LocationKind, PhysicalHandle, PhysicalProps,
};

use super::{CloseError, CloseRefusal, Place};
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};

/// Physical memory on a device or a host NUMA node. Reads as zero when new.
///
/// Clones are the same memory. It is released when the last clone and the last mapping have gone.
#[doc(alias = "cuMemCreate")]
#[derive(Clone)]
pub struct Physical {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    handle: PhysicalHandle,
    size: u64,
    location: Location,
    /// Whether another process may have it too.
    exported: Arc<AtomicBool>,
    released: bool,
}

/// Says of a physical that others may have it too, and is no holder of it.
#[derive(Clone)]
pub(crate) struct ExportMark(Arc<AtomicBool>);

impl ExportMark {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Options of a physical allocation.
#[derive(Debug)]
pub struct PhysicalBuilder<'a> {
    device: &'a Device,
    size: u64,
    props: PhysicalProps,
}

impl PhysicalBuilder<'_> {
    /// Puts it on a host NUMA node instead of the device.
    #[must_use]
    pub const fn on_host_numa(mut self, node: i32) -> Self {
        self.props.location = Location::host_numa(node);
        self
    }

    /// The handle types it may be [exported](Physical::export) as; none by default, and fixed at
    /// creation.
    #[must_use]
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.props.handle_types = types;
        self
    }

    /// Asks for memory that RDMA devices can reach; fixed at creation. Refused where the device says
    /// that it has none (attribute 110): RDMA would fail later, and say less.
    #[must_use]
    pub const fn rdma_capable(mut self, yes: bool) -> Self {
        self.props.rdma_capable = yes;
        self
    }

    /// Asks for compressible memory. The driver may not grant it: see [`Physical::props`].
    #[must_use]
    pub const fn compressed(mut self, yes: bool) -> Self {
        self.props.compression = yes as u8;
        self
    }

    pub(super) const fn device(&self) -> &Device {
        self.device
    }

    pub(crate) const fn with_props(mut self, props: PhysicalProps) -> Self {
        self.props = props;
        self
    }

    /// Creates it (`cuMemCreate`).
    ///
    /// # Errors
    /// [`MemoryError`] when the size is wrong or the driver has no such memory.
    pub fn create(self) -> Result<Physical, MemoryError> {
        let Self {
            device,
            size,
            props,
        } = self;
        let granule = device.granule();
        ArgumentError::whole("bytes of a physical", size, granule.bytes())?;
        if props.location.kind == LocationKind::HOST_NUMA && props.location.id < 0 {
            return Err(ArgumentError::NoSuch {
                what: "NUMA node",
                number: props.location.id.into(),
            }
            .into());
        }
        creatable_as(props.handle_types)?;
        let on_device = props.location.kind == LocationKind::DEVICE;
        let location = props.location;
        let failed = |cause| MemoryError::Create {
            size,
            location,
            cause,
        };
        if props.rdma_capable && on_device && !device.has_rdma().map_err(failed)? {
            return Err(MemoryError::no_rdma(location));
        }
        let handle = device
            .call(Call::MemCreate, |driver, _| driver.create(size, &props, 0))
            .map_err(failed)?;
        Ok(Physical::owning(device, handle, size, props.location))
    }
}

impl Physical {
    /// Creates `size` bytes, a whole number of granules, on a device.
    ///
    /// # Errors
    /// As [`PhysicalBuilder::create`].
    pub fn new(device: &Device, size: u64) -> Result<Self, MemoryError> {
        Self::builder(device, size).create()
    }

    /// Sets out to create `size` bytes.
    #[must_use]
    pub fn builder(device: &Device, size: u64) -> PhysicalBuilder<'_> {
        PhysicalBuilder {
            device,
            size,
            props: PhysicalProps::device(device.ordinal()),
        }
    }

    /// Takes a reference to what is mapped at an address of ours.
    pub(super) fn retained(
        device: &Device,
        address: DeviceAddress,
        size: u64,
        location: Location,
    ) -> Result<Self, CallError> {
        let handle = device.call(Call::MemRetainAllocationHandle, |driver, _| {
            driver.retain(address)
        })?;
        Ok(Self::owning(device, handle, size, location))
    }

    /// Takes a reference that the driver has just counted for us.
    pub(super) fn owning(
        device: &Device,
        handle: PhysicalHandle,
        size: u64,
        location: Location,
    ) -> Self {
        let shared = Shared {
            device: device.clone(),
            handle,
            size,
            location,
            exported: Arc::default(),
            released: false,
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// The size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// Where it lies.
    #[must_use]
    pub fn location(&self) -> Location {
        self.shared.location
    }

    /// The same as a place that more memory can be had from.
    #[must_use]
    pub fn place(&self) -> Place {
        if self.shared.location.kind == LocationKind::HOST_NUMA {
            Place::HostNuma(self.shared.location.id)
        } else {
            Place::Device(self.shared.device.clone())
        }
    }

    /// Whether something else holds it: a clone or another mapping.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.shared) > 1
    }

    /// Whether it was [exported](Self::export), so that another process may have it too.
    #[must_use]
    pub fn is_exported(&self) -> bool {
        self.export_mark().is_set()
    }

    /// The same memory with the place that the driver told, while nobody else has it.
    pub(super) fn relocated(mut self, location: Location) -> Option<Self> {
        Arc::get_mut(&mut self.shared)?.location = location;
        Some(self)
    }

    pub(crate) fn mark_exported(&self) {
        self.export_mark().set();
    }

    /// What marks it as exported without holding it.
    pub(crate) fn export_mark(&self) -> ExportMark {
        ExportMark(Arc::clone(&self.shared.exported))
    }

    /// The device it was created through.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The driver's handle. It stays owned by this.
    #[must_use]
    pub fn as_raw(&self) -> PhysicalHandle {
        self.shared.handle
    }

    /// What the driver made (`cuMemGetAllocationPropertiesFromHandle`).
    ///
    /// # Errors
    /// [`CallError`] when the driver does not answer.
    pub fn props(&self) -> Result<PhysicalProps, CallError> {
        let handle = self.shared.handle;
        self.shared
            .device
            .call(Call::MemGetAllocationPropertiesFromHandle, |driver, _| {
                // SAFETY: the handle is ours and has not been released.
                unsafe { driver.physical_props(handle) }
            })
    }

    /// Releases it (`cuMemRelease`), or hands it back and says why not.
    ///
    /// # Errors
    /// [`CloseError`] with the physical in it while clones or mappings live, or when the driver
    /// refuses.
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let Some(shared) = Arc::get_mut(&mut self.shared) else {
            return Err(CloseError {
                owner: self,
                reason: CloseRefusal::InUse,
            });
        };
        match shared.release() {
            Ok(()) => Ok(()),
            Err(cause) => Err(CloseError {
                owner: self,
                reason: CloseRefusal::Call(cause),
            }),
        }
    }
}

/// Handle types that memory can be created for.
pub(crate) fn creatable_as(types: HandleTypes) -> Result<(), ArgumentError> {
    let known = HandleTypes::POSIX_FD | HandleTypes::FABRIC;
    if known.contains(types) {
        return Ok(());
    }
    Err(ArgumentError::HandleType { bits: types.bits() })
}

impl Shared {
    fn release(&mut self) -> Result<(), CallError> {
        if self.released {
            return Ok(());
        }
        let handle = self.handle;
        self.device
            // SAFETY: the handle is ours and is released once: `released` is set below, and a refused
            // release has changed nothing. What is mapped lives on until it is unmapped.
            .give_back(Call::MemRelease, |driver, _| unsafe {
                driver.release(handle)
            })?;
        self.released = true;
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Err(error) = self.release() {
            self.device.report_drop("physical", self.size, error);
        }
    }
}

impl fmt::Debug for Physical {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Physical")
            .field("handle", &self.shared.handle)
            .field("size", &self.shared.size)
            .finish_non_exhaustive()
    }
}
