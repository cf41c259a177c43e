//! Options of a region.

use std::collections::BTreeMap;

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::committed::{Committed, PendingExtents};
use super::host_extents::HostExtents;
use super::layout::Layout;
use super::register::Register;
use super::space::Space;
use super::zeros::{DEFAULT_ZERO_EXTENT, Zeros};
use super::{DEFAULT_LARGEST_EXTENT, DEFAULT_MAPPING_LIMIT, Region};
use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};
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

    /// The largest extent in bytes, a power of two granules; 1 GiB by default. Smaller extents
    /// can be decommitted in smaller parts and cost more driver calls.
    #[must_use]
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.largest = bytes;
        self
    }

    /// The handle types the memory may be exported as; none by default.
    #[must_use]
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.props.handle_types = types;
        self
    }

    /// Asks for memory that RDMA devices can reach. Refused where the device says that it has none
    /// (attribute 110).
    #[must_use]
    pub const fn rdma_capable(mut self, yes: bool) -> Self {
        self.props.rdma_capable = yes;
        self
    }

    /// As NCCL's own allocator (`ncclMemAlloc`) asks for memory, so that it can be registered there:
    /// to be exported as a descriptor, and across nodes and reachable for RDMA where the device can.
    /// Tries [exporting](crate::Physical::probe_export) on a granule for each.
    ///
    /// NCCL lets every device of the process in, too: see [`open_to`](Self::open_to).
    ///
    /// # Errors
    /// [`MemoryError`] when memory cannot even be exported as a descriptor, or the device does not
    /// answer.
    pub fn for_nccl(self) -> Result<Self, MemoryError> {
        let (types, rdma) = nccl_wishes(self.device)?;
        Ok(self.shareable(types).rdma_capable(rdma))
    }

    /// Where memory is put; by default all of it on the region's device.
    #[must_use]
    pub fn layout(mut self, layout: Layout) -> Self {
        self.layout = layout;
        self
    }

    /// Lets another device in from the beginning: see [`Region::grant`].
    #[must_use]
    pub fn open_to(mut self, device: &Device, access: Access) -> Self {
        self.guests.push(AccessGrant::device(device, access));
        self
    }

    /// How many mappings the region may have in all, extents and aliases of zeros; by default
    /// 65,536, an eighth of what a device can have.
    #[must_use]
    pub const fn mapping_limit(mut self, mappings: u64) -> Self {
        self.mapping_limit = mappings;
        self
    }

    /// The largest alias of zeros under holes, in bytes, a power of two granules; 64 MiB by default.
    /// Up to twice that much memory lies behind all of them together.
    #[must_use]
    pub const fn zero_extent(mut self, bytes: u64) -> Self {
        self.zero_extent = bytes;
        self
    }

    /// Host memory that lies ready for what [moves](Region::relocate) to its NUMA node, and where
    /// memory of that node goes when the region needs it no more. None by default: it is created when
    /// something moves, and released after. Memory for [handles](Self::shareable) or RDMA never comes
    /// from there.
    #[must_use]
    pub fn host_extents(mut self, prepared: &HostExtents) -> Self {
        self.prepared = Some(prepared.clone());
        self
    }

    /// Reserves the addresses (`cuMemAddressReserve`). The size is rounded up to whole granules.
    ///
    /// # Errors
    /// [`MemoryError`] when size or largest extent is wrong, the host extents are another driver's, or
    /// the driver has no such range.
    pub fn reserve(self) -> Result<Region, MemoryError> {
        let granule = self.device.granule();
        for size in [self.largest, self.zero_extent] {
            ArgumentError::extent(size, granule.bytes())?;
        }
        let size = granule
            .round_up(self.size)
            .ok_or(ArgumentError::Uncountable {
                what: "bytes of a reservation",
                value: self.size,
            })?;
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
    /// A region of the same shape with nothing in it, open to the same devices.
    pub(super) fn empty_twin(&self) -> Result<Self, MemoryError> {
        Ok(Self {
            space: self.space.empty_twin()?,
            props: self.props,
            layout: self.layout.clone(),
            largest: self.largest,
            mapping_limit: self.mapping_limit,
            zeros: self.zeros.empty_twin(),
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
    /// As [`RegionBuilder::reserve`].
    pub fn reserve(device: &Device, size: u64) -> Result<Self, MemoryError> {
        Self::builder(device, size).reserve()
    }

    /// Sets out to reserve at least `size` bytes.
    #[must_use]
    pub fn builder(device: &Device, size: u64) -> RegionBuilder<'_> {
        RegionBuilder::new(device, size)
    }
}
