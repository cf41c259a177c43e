//! Options of a region.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::committed::{Committed, PendingExtents};
use super::family::{Family, Supply};
use super::host_extents::HostExtents;
use super::layout::Layout;
use super::register::Register;
use super::{DEFAULT_LARGEST_EXTENT, DEFAULT_MAPPING_LIMIT, Region};
use crate::device::Device;
use crate::error::{ArgumentError, MemoryError};
use crate::extent_sizes::ExtentSizes;
use crate::extents::{DEFAULT_ZERO_EXTENT, Space, Zeros};
use crate::own::{Access, AccessGrant, Stream, nccl_wishes};
use crate::pool::Tenant;

/// Options of a region.
#[derive(Debug)]
pub struct RegionBuilder<'a> {
    device: &'a Device,
    size: u64,
    props: PhysicalProps,
    layout: Layout,
    guests: Vec<AccessGrant>,
    sizes: ExtentSizes,
    mapping_limit: u64,
    zero_extent: u64,
    prepared: Option<HostExtents>,
    tenant: Option<&'a Tenant>,
    home: Option<&'a Stream>,
    timeout: Option<Duration>,
}

impl<'a> RegionBuilder<'a> {
    pub(super) fn new(device: &'a Device, size: u64) -> Self {
        Self {
            device,
            size,
            props: PhysicalProps::device(device.ordinal()),
            layout: Layout::on(device),
            guests: Vec::new(),
            sizes: ExtentSizes::up_to(DEFAULT_LARGEST_EXTENT),
            mapping_limit: DEFAULT_MAPPING_LIMIT,
            zero_extent: DEFAULT_ZERO_EXTENT,
            prepared: None,
            tenant: None,
            home: None,
            timeout: None,
        }
    }

    /// Gets the region's memory from a tenant of a pool: see [Regions in a
    /// tenant](super#regions-in-a-tenant). The pool's memory must be on the region's device, and
    /// so must all of the [layout](Self::layout). Its properties are those of the pool.
    #[must_use]
    pub const fn in_tenant(mut self, tenant: &'a Tenant) -> Self {
        self.tenant = Some(tenant);
        self
    }

    /// Sets the stream on which a region in a tenant zeroes memory that was used before; by
    /// default a stream that it creates when it needs one.
    #[must_use]
    pub const fn home_stream(mut self, stream: &'a Stream) -> Self {
        self.home = Some(stream);
        self
    }

    /// Sets how long a commit in a tenant waits for memory in use to become free. By default it
    /// does not wait. Pressure hooks are called in any case.
    #[doc(alias = "wait")]
    #[must_use]
    pub const fn timeout(mut self, wait: Duration) -> Self {
        self.timeout = Some(wait);
        self
    }

    /// Sets the size of the largest extent in bytes, a power of two granules; 1 GiB by default.
    /// Smaller extents can be decommitted in smaller parts and cost more driver calls.
    #[doc(alias = "page_size")]
    #[must_use]
    pub const fn largest_extent(mut self, bytes: u64) -> Self {
        self.sizes = self.sizes.with_largest(bytes);
        self
    }

    /// Makes extents small in proportion to what lies before them, so that most of the memory
    /// behind the end is released when the end is [decommitted](Region::decommit); `false` by
    /// default. An extent has at most 16 MiB, or a quarter of the committed bytes directly before
    /// it if that is more, and at most the [largest extent](Self::largest_extent). 1 GiB then takes
    /// 20 extents instead of one.
    ///
    /// An extent is released whole. So after a decommit up to the end of committed bytes, at most a
    /// quarter of the bytes that stay, or 16 MiB, is withdrawn and still mapped. That does not hold
    /// for bytes that stay behind a decommitted part: for those, set a smaller largest extent.
    #[doc(alias = "ladder")]
    #[must_use]
    pub const fn expect_shrink(mut self, yes: bool) -> Self {
        self.sizes = self.sizes.expect_shrink(yes);
        self
    }

    /// Sets the handle types that the memory may be exported as; none by default.
    #[must_use]
    pub const fn shareable(mut self, types: HandleTypes) -> Self {
        self.props.handle_types = types;
        self
    }

    /// Requests memory that RDMA devices can reach. [`reserve`](Self::reserve)
    /// [tries](crate::Physical::probe_rdma) it with one granule, once for a device, and refuses it on a
    /// device without support.
    #[must_use]
    pub const fn rdma_capable(mut self, yes: bool) -> Self {
        self.props.rdma_capable = yes;
        self
    }

    /// Requests memory with the properties that NCCL's own allocator (`ncclMemAlloc`) uses, so that
    /// it can be registered with NCCL: exportable as a file descriptor and, where the device
    /// supports them, as a fabric handle for other nodes and reachable by RDMA devices. Tests each
    /// by [exporting](crate::Physical::probe_export) one granule, or
    /// [mapping](crate::Physical::probe_rdma) it.
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
    /// another driver, or the driver has no such range. In a tenant also when the tenant is
    /// unregistered, its pool is hardened or on another device, has no such addresses, or its
    /// memory has not the properties that were set.
    pub fn reserve(self) -> Result<Region, MemoryError> {
        let granule = self.device.granule();
        for size in [self.sizes.largest(), self.zero_extent] {
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
        let family = match self.tenant {
            Some(tenant) => Some(self.family(tenant)?),
            None => None,
        };
        let mut region = Region {
            space: match &family {
                Some(family) => family.reserve(size)?,
                None => Space::reserve(self.device, size)?,
            },
            props: family
                .as_ref()
                .map_or(self.props, |family| family.tenant.lending_terms().props),
            layout: self.layout,
            sizes: self.sizes,
            mapping_limit: self.mapping_limit,
            zeros: Zeros::new(self.zero_extent),
            prepared: self.prepared,
            aliased: false,
            committed: Committed::default(),
            pending: PendingExtents::default(),
            withdrawn: BTreeMap::new(),
            register: Register::new(self.device, family.clone()),
            supply: Supply::of(family),
            ending: None,
        };
        for guest in &self.guests {
            if let Some(device) = guest.named() {
                region.grant(device, guest.access())?;
            }
        }
        Ok(region)
    }

    /// Checks the options of a region in a tenant, and makes it a holder of the tenant's pool.
    fn family(&self, tenant: &Tenant) -> Result<Arc<Family>, MemoryError> {
        if !tenant.device().is_same(self.device) {
            return Err(ArgumentError::WrongDevice("the tenant").into());
        }
        let terms = tenant.lending_terms();
        if terms.hardened {
            return Err(ArgumentError::HardenedPool.into());
        }
        let here = self.device.location();
        if self.layout.places().any(|place| place.location() != here) || self.prepared.is_some() {
            return Err(MemoryError::InTenant(
                "memory of another device or of the host",
            ));
        }
        let (own, props) = (&self.props, terms.props);
        let rdma = own.rdma_capable && !props.rdma_capable;
        if rdma || !props.handle_types.contains(own.handle_types) {
            return Err(MemoryError::InTenant(
                "memory with other properties than the pool's",
            ));
        }
        self.home
            .map_or(Ok(()), |home| home.check_on(self.device))?;
        Ok(Family::new(tenant, self.home, self.timeout)?)
    }
}

impl Tenant {
    /// Returns a builder for a [region](Region) of at least `size` bytes that gets its memory from
    /// this tenant: see [Regions in a tenant](crate::region#regions-in-a-tenant).
    #[doc(alias("register_model", "allocate_for_model"))]
    #[must_use]
    pub fn region(&self, size: u64) -> RegionBuilder<'_> {
        RegionBuilder::new(self.device(), size).in_tenant(self)
    }
}

impl Region {
    pub(super) fn empty_like(&self) -> Result<Self, MemoryError> {
        let family = self.supply.family().cloned();
        let space = match &family {
            Some(family) => family.reserve(self.size())?,
            None => Space::reserve(self.device(), self.size())?,
        };
        Ok(Self {
            space: space.open_like(&self.space),
            props: self.props,
            layout: self.layout.clone(),
            sizes: self.sizes,
            mapping_limit: self.mapping_limit,
            zeros: self.zeros.empty_like(),
            prepared: self.prepared.clone(),
            aliased: false,
            committed: Committed::default(),
            pending: PendingExtents::default(),
            withdrawn: BTreeMap::new(),
            register: Register::new(self.device(), family.clone()),
            supply: Supply::of(family),
            ending: None,
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
