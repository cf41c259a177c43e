//! Options of a region.

use cuvmm_driver::{HandleTypes, PhysicalProps};

use super::space::Space;
use super::{DEFAULT_LARGEST_EXTENT, Region};
use crate::device::Device;
use crate::error::ReserveError;

/// Options of a region.
#[derive(Debug)]
pub struct RegionBuilder<'a> {
    device: &'a Device,
    size: u64,
    props: PhysicalProps,
    largest: u64,
}

impl<'a> RegionBuilder<'a> {
    pub(super) fn new(device: &'a Device, size: u64) -> Self {
        Self {
            device,
            size,
            props: PhysicalProps::device(device.ordinal()),
            largest: DEFAULT_LARGEST_EXTENT,
        }
    }

    /// The largest extent in bytes, a power of two granules; 1 GiB by default. Smaller extents
    /// can be decommitted in smaller pieces and cost more driver calls.
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

    /// Asks for memory that RDMA devices can reach.
    #[must_use]
    pub const fn rdma_capable(mut self, yes: bool) -> Self {
        self.props.rdma_capable = yes;
        self
    }

    /// Reserves the addresses (`cuMemAddressReserve`). The size is rounded up to whole granules.
    ///
    /// # Errors
    /// [`ReserveError`] when size or largest extent is wrong, or the driver has no such range.
    pub fn reserve(self) -> Result<Region, ReserveError> {
        let granule = self.device.granule();
        if !(self.largest.is_power_of_two() && granule.divides(self.largest)) {
            return Err(ReserveError::Misaligned {
                size: self.largest,
                granularity: granule.bytes(),
            });
        }
        let size = granule
            .round_up(self.size)
            .ok_or(ReserveError::TooLarge { size: self.size })?;
        let space = Space::reserve(self.device, size)?;
        Ok(Region::new(space, self.props, self.largest))
    }
}

impl Region {
    /// Reserves at least `size` bytes of addresses on a device.
    ///
    /// # Errors
    /// As [`RegionBuilder::reserve`].
    pub fn reserve(device: &Device, size: u64) -> Result<Self, ReserveError> {
        Self::builder(device, size).reserve()
    }

    /// Sets out to reserve at least `size` bytes.
    #[must_use]
    pub fn builder(device: &Device, size: u64) -> RegionBuilder<'_> {
        RegionBuilder::new(device, size)
    }
}
