//! Physicals: one physical allocation each.
//!
//! `unsafe` is used to query and to release a handle, which is owned here and released once.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use cuvmm_driver::{
    Call, DeviceAddress, HandleTypes, Location, LocationKind, PhysicalHandle, PhysicalProps,
};

use super::{CloseError, CloseRefusal, Place};
use crate::deferred::is_broken_off;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};
use crate::sync::{Mutex, MutexGuard};

/// Physical memory on a device or a host NUMA node. New memory reads as zero.
///
/// Clones are the same memory, released with the last clone and the last mapping.
#[doc(alias = "PhysicalAllocation")]
#[doc(alias = "cuMemCreate")]
#[doc(alias = "PhysicalMemory")]
#[doc(alias = "PhysicalMemoryHandle")]
#[derive(Clone)]
pub struct Physical {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    handle: PhysicalHandle,
    size: u64,
    location: Location,
    exported: ExportMark,
    released: bool,
}

/// The mark of a physical that another process may hold. It does not keep the physical alive.
#[derive(Clone, Default)]
pub(crate) struct ExportMark(Arc<Exporting>);

#[derive(Default)]
struct Exporting {
    is_exported: AtomicBool,
    /// The physical's exported block in a ledger; 0 for none.
    counted_as: AtomicU64,
    /// The ledger's other names: of offers of several blocks or allocations that the physical is part of,
    /// and of earlier exported blocks.
    offered_as: Mutex<Vec<u64>>,
}

impl ExportMark {
    pub(crate) fn set(&self) {
        self.0.is_exported.store(true, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.is_exported.load(Ordering::Acquire)
    }

    /// Sets the physical's exported block in a ledger. A block that it was before stays one of its
    /// names, since another process may have it by that name.
    pub(crate) fn count_as(&self, block: u64, is_known: impl Fn(u64) -> bool) {
        let before = self.0.counted_as.swap(block, Ordering::AcqRel);
        if before != 0 && before != block {
            self.add_name(before, is_known);
        }
    }

    pub(crate) fn counted_as(&self) -> Option<u64> {
        Some(self.0.counted_as.load(Ordering::Acquire)).filter(|&block| block != 0)
    }

    /// Adds a name in the ledger, such as that of an offer of several blocks or allocations. Forgets
    /// the names of which `is_known` says that they have ended.
    pub(crate) fn add_name(&self, name: u64, is_known: impl Fn(u64) -> bool) {
        let mut names = self.offers();
        names.retain(|&known| known != name && is_known(known));
        names.push(name);
    }

    /// Returns all names of the physical in a ledger.
    pub(crate) fn names(&self) -> Vec<u64> {
        let offers = self.offers();
        self.counted_as()
            .into_iter()
            .chain(offers.iter().copied())
            .collect()
    }

    fn offers(&self) -> MutexGuard<'_, Vec<u64>> {
        self.0
            .offered_as
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Options of a [`Physical`].
#[doc(alias("CUmemAllocationProp", "AllocationProp"))]
#[derive(Debug)]
pub struct PhysicalBuilder<'a> {
    device: &'a Device,
    size: u64,
    props: PhysicalProps,
}

impl PhysicalBuilder<'_> {
    /// Places the memory on a host NUMA node instead of the device.
    #[must_use]
    pub const fn on_host_numa(mut self, node: i32) -> Self {
        self.props.location = Location::host_numa(node);
        self
    }

    /// Sets the handle types that the memory may be [exported](Physical::export) as; none by
    /// default, and fixed at creation.
    #[must_use]
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.props.handle_types = types;
        self
    }

    /// Requests memory that RDMA devices can reach; fixed at creation. [`create`](Self::create)
    /// refuses it on a device without support (attribute 110): RDMA would fail later with a less
    /// specific error. [`Physical::probe_rdma`] finds out more.
    #[must_use]
    pub const fn rdma_capable(mut self, yes: bool) -> Self {
        self.props.rdma_capable = yes;
        self
    }

    /// Requests compressible memory. The driver may not grant it: see [`Physical::props`].
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

    /// Creates the memory (`cuMemCreate`).
    ///
    /// # Errors
    /// [`MemoryError`] when the size is invalid or the driver has no such memory.
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
        if props.rdma_capable && on_device && !device.promises_rdma().map_err(failed)? {
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
    /// Those of [`PhysicalBuilder::create`].
    #[doc(alias = "alloc_physical")]
    pub fn new(device: &Device, size: u64) -> Result<Self, MemoryError> {
        Self::builder(device, size).create()
    }

    /// Returns a builder for `size` bytes.
    #[doc(alias = "create_allocation_prop")]
    #[must_use]
    pub fn builder(device: &Device, size: u64) -> PhysicalBuilder<'_> {
        PhysicalBuilder {
            device,
            size,
            props: PhysicalProps::device(device.ordinal()),
        }
    }

    /// Takes a reference to the physical at an address of a reservation owned here.
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

    /// Takes ownership of a reference that the driver has returned.
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
            exported: ExportMark::default(),
            released: false,
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// Returns the location of the memory.
    #[doc(alias = "device_ordinal")]
    #[must_use]
    pub fn location(&self) -> Location {
        self.shared.location
    }

    /// Returns the place of the memory.
    #[must_use]
    pub fn place(&self) -> Place {
        if self.shared.location.kind == LocationKind::HOST_NUMA {
            Place::HostNuma(self.shared.location.id)
        } else {
            Place::Device(self.shared.device.clone())
        }
    }

    /// Returns `true` if there is another clone or mapping.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.shared) > 1
    }

    /// Returns `true` if the memory was [exported](Self::export): another process may hold it too.
    #[must_use]
    pub fn is_exported(&self) -> bool {
        self.export_mark().is_set()
    }

    /// Sets the location that the driver reported; `None` if the physical is shared.
    pub(super) fn relocated(mut self, location: Location) -> Option<Self> {
        Arc::get_mut(&mut self.shared)?.location = location;
        Some(self)
    }

    pub(crate) fn mark_exported(&self) {
        self.export_mark().set();
    }

    pub(crate) fn export_mark(&self) -> ExportMark {
        self.shared.exported.clone()
    }

    /// Returns the device that the physical was created through.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns the driver's handle, which stays owned by this physical.
    #[doc(alias = "handle")]
    #[must_use]
    pub fn as_raw(&self) -> PhysicalHandle {
        self.shared.handle
    }

    /// Returns the properties of the memory as the driver reports them
    /// (`cuMemGetAllocationPropertiesFromHandle`).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    #[doc(alias = "allocation_properties_from_handle")]
    pub fn props(&self) -> Result<PhysicalProps, CallError> {
        let handle = self.shared.handle;
        self.shared
            .device
            .call(Call::MemGetAllocationPropertiesFromHandle, |driver, _| {
                // SAFETY: the handle is owned here and has not been released.
                unsafe { driver.physical_props(handle) }
            })
    }

    /// Releases the memory (`cuMemRelease`), or returns the physical with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the physical in it while clones or mappings live, or when the driver
    /// refuses.
    #[doc(alias("free_physical", "cuMemRelease"))]
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let closed = match Arc::get_mut(&mut self.shared) {
            Some(shared) => shared.release().map_err(CloseRefusal::Call),
            None => Err(CloseRefusal::InUse),
        };
        CloseError::of(self, closed)
    }
}

/// Refuses handle types that memory cannot be created for.
pub(crate) fn creatable_as(types: HandleTypes) -> Result<(), ArgumentError> {
    let known = HandleTypes::OS | HandleTypes::FABRIC;
    if known.contains(types) {
        return Ok(());
    }
    Err(ArgumentError::HandleType(types.bits()))
}

impl Shared {
    fn release(&mut self) -> Result<(), CallError> {
        // A call in which the driver panics may have released it, and is not made again.
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        let handle = self.handle;
        let outcome = self
            .device
            // SAFETY: the handle is owned here and released once: `released` is set, and unset after
            // a refusal, which has changed nothing. Mapped memory lives on until it is unmapped.
            .give_back(Call::MemRelease, |driver, _| unsafe {
                driver.release(handle)
            });
        self.released = outcome.is_ok();
        outcome
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if is_broken_off() && !self.released {
            // The pool goes on counting it.
            self.device.report_leak(self.size);
        } else if let Err(error) = self.release() {
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
