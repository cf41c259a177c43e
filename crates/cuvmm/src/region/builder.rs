//! Options of a region.

use std::collections::BTreeMap;

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::committed::{Committed, PendingExtents};
use super::host_extents::HostExtents;
use super::layout::Layout;
use super::register::Register;
use super::{DEFAULT_LARGEST_EXTENT, DEFAULT_MAPPING_LIMIT, Region};
use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};
use crate::extents::{DEFAULT_ZERO_EXTENT, Space, Zeros};
use crate::own::{Access, AccessGrant, nccl_wishes};

/// Options of a region.
#[derive(Debug)]
pub struct RegionBuilder<'a> {
    device: &'a Device,
    size: u64,
    props: PhysicalProps,
    layout: Layout,
    guests: Vec<AccessGrant>,
    largest: u64,
    mapping_limit: u64,
    zero_extent: u64,
    prepared: Option<HostExtents>,
}

impl<'a> RegionBuilder<'a> {
    pub(super) fn new(device: &'a Device, size: u64) -> Self {
        Self {
            device,
            size,
            props: PhysicalProps::device(device.ordinal()),
            layout: Layout::on(device),
            guests: Vec::new(),
            largest: DEFAULT_LARGEST_EXTENT,
            mapping_limit: DEFAULT_MAPPING_LIMIT,
            zero_extent: DEFAULT_ZERO_EXTENT,
            prepared: None,
        }
    }

    /// Sets the size of the largest extent in bytes, a power of two granules; 1 GiB by default.
    /// Smaller extents can be decommitted in smaller parts and cost more driver calls.
    #[must_use]
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.largest = bytes;
        self
    }

    /// Sets the handle types that the memory may be exported as; none by default.
    #[must_use]
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.props.handle_types = types;
        self
    }

    /// Requests memory that RDMA devices can reach. [`reserve`](Self::reserve) refuses it on a
    /// device without support (attribute 110).
    #[must_use]
    pub const fn rdma_capable(mut self, yes: bool) -> Self {
        self.props.rdma_capable = yes;
        self
    }

    /// Requests memory with the properties that NCCL's own allocator (`ncclMemAlloc`) uses, so that
    /// it can be registered with NCCL: exportable as a file descriptor and, where the device
    /// supports them, as a fabric handle for other nodes and reachable by RDMA devices. Tests each
    /// by [exporting](crate::Physical::probe_export) one granule.
    ///
    /// NCCL also gives every device of the process access: see [`open_to`](Self::open_to).
    ///
    /// # Errors
    /// [`MemoryError`] when memory cannot even be exported as a descriptor, or the driver refuses a
    /// query.
    pub fn for_nccl(self) -> Result<Self, MemoryError> {
        let (types, rdma) = nccl_wishes(self.device)?;
        Ok(self.shareable(types).rdma_capable(rdma))
    }

    /// Sets where memory is placed; by default all of it on the region's device.
    #[must_use]
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Gives another device access from the beginning; see [`Region::grant`].
    #[must_use]
    pub fn open_to(mut self, device: &Device, access: Access) -> Self {
        self.guests.push(AccessGrant::new(device, access));
        self
    }

    /// Limits the mappings of the region, extents and aliases of zeros together; 65,536 by default,
    /// an eighth of what a device can have.
    #[must_use]
    pub const fn mapping_limit(mut self, mappings: u64) -> Self {
        self.mapping_limit = mappings;
        self
    }

    /// Sets the size of the largest alias of zeros under holes, in bytes, a power of two granules;
    /// 64 MiB by default. All aliases together use up to twice that much memory.
    #[must_use]
    pub const fn zero_extent(mut self, bytes: u64) -> Self {
        self.zero_extent = bytes;
        self
    }

    /// Sets prepared host memory for [relocating](Region::relocate) to its NUMA node. Memory of
    /// that node returns there when the region no longer needs it. By default host memory is
    /// created when an extent moves and released afterwards. Memory for [handles](Self::shareable)
    /// or RDMA is never taken from there.
    #[must_use]
    pub fn host_extents(mut self, prepared: &HostExtents) -> Self {
        self.prepared = Some(prepared.clone());
        self
    }

    /// Reserves the addresses (`cuMemAddressReserve`). The size is rounded up to whole granules.
    ///
    /// # Errors
    /// [`MemoryError`] when the size or the largest extent is invalid, the host extents belong to
    /// another driver, or the driver has no such range.
    pub fn reserve(self) -> Result<Region, MemoryError> {
        let granule = self.device.granule();
        for size in [self.largest, self.zero_extent] {
            ArgumentError::extent(size, granule.bytes())?;
        }
        let size = granule.whole("bytes of a reservation", self.size)?;
        self.layout.check(self.device)?;
        if self.props.rdma_capable {
            self.layout.check_rdma()?;
        }
        if let Some(prepared) = &self.prepared {
            prepared.check(self.device)?;
        }
        let mut region = Region {
            space: Space::reserve(self.device, size)?,
            props: self.props,
            layout: self.layout,
            largest: self.largest,
            mapping_limit: self.mapping_limit,
            zeros: Zeros::new(self.zero_extent),
            prepared: self.prepared,
            aliased: false,
            committed: Committed::default(),
            pending: PendingExtents::default(),
            withdrawn: BTreeMap::new(),
            register: Register::new(self.device),
        };
        for guest in &self.guests {
            if let Some(device) = guest.named() {
                region.grant(device, guest.access())?;
            }
        }
        Ok(region)
    }
}

impl Region {
    pub(super) fn empty_like(&self) -> Result<Self, MemoryError> {
        Ok(Self {
            space: self.space.empty_like()?,
            props: self.props,
            layout: self.layout.clone(),
            largest: self.largest,
            mapping_limit: self.mapping_limit,
            zeros: self.zeros.empty_like(),
            prepared: self.prepared.clone(),
            aliased: false,
            committed: Committed::default(),
            pending: PendingExtents::default(),
            withdrawn: BTreeMap::new(),
            register: Register::new(self.device()),
        })
    }

    /// Reserves at least `size` bytes of addresses on a device.
    ///
    /// # Errors
    /// Those of [`RegionBuilder::reserve`].
    pub fn reserve(device: &Device, size: u64) -> Result<Self, MemoryError> {
        Self::builder(device, size).reserve()
    }

    /// Returns a builder for a region of at least `size` bytes.
    #[must_use]
    pub fn builder(device: &Device, size: u64) -> RegionBuilder<'_> {
        RegionBuilder::new(device, size)
    }
}
