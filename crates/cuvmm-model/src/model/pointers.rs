//! Queries about addresses.

use super::allocation_table::{Allocation, Kind};
use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::Backing;
use super::exports;
use super::pages::page_size;
use super::rights::Who;
use super::state::State;
use cuvmm_driver::{
    AccessFlags, CUresult, DeviceAddress, LocationKind, Ordinal, OsHandle, PointerAttribute,
};

const NOT_FOUND: CUresult = CUresult::CUDA_ERROR_NOT_FOUND;
const HOST_MEMORY: u64 = 1;
const DEVICE_MEMORY: u64 = 2;

/// The mapping or allocation at an address.
struct Found {
    start: u64,
    size: u64,
    /// Start and size of its reservation or allocation.
    range: (u64, u64),
    /// Start and size of the device's block of memory behind it.
    block: (u64, u64),
    memory_type: u64,
    device: i32,
    handle_types: u32,
    managed: bool,
    /// Network cards can access the memory.
    rdma: bool,
    pool: Option<u64>,
}

impl<B: Backing> State<B> {
    fn find(&self, address: u64) -> Option<Found> {
        if let Some((start, mapping)) = self.mappings.containing(address) {
            let props = self.physicals.by_handle.get(&mapping.handle)?.props;
            let on_device = props.location.kind == LocationKind::DEVICE;
            let reserved = self.reservations.containing(address);
            return Some(Found {
                start,
                size: mapping.size,
                range: reserved.map_or((start, mapping.size), |(from, to)| (from, to - from)),
                block: (start, mapping.size),
                memory_type: if on_device {
                    DEVICE_MEMORY
                } else {
                    HOST_MEMORY
                },
                device: if on_device { props.location.id } else { 0 },
                handle_types: props.handle_types.bits(),
                managed: false,
                rdma: props.rdma_capable,
                pool: None,
            });
        }
        let (start, allocation) = self.allocations.containing(address)?;
        let on_host = matches!(allocation.kind, Kind::Pinned | Kind::HostPool);
        let pool = allocation.pool.and_then(|key| self.pools.by_key.get(&key));
        Some(Found {
            start,
            size: allocation.size,
            range: (start, allocation.size),
            block: self.block(start, allocation),
            memory_type: if on_host { HOST_MEMORY } else { DEVICE_MEMORY },
            device: allocation.device,
            handle_types: pool.map_or(0, |pool| pool.props.handle_types.bits()),
            managed: allocation.kind == Kind::Managed,
            rdma: allocation.kind == Kind::Plain,
            pool: pool.and_then(|pool| pool.handle),
        })
    }

    fn block(&self, start: u64, allocation: &Allocation) -> (u64, u64) {
        let part = self.granules_of(start, allocation);
        match allocation.kind {
            Kind::Pool => (
                part.address,
                part.size.next_multiple_of(super::pool_table::STEP),
            ),
            Kind::Opened => (start, allocation.taken),
            _ => (part.address, part.size),
        }
    }

    /// Returns the range that contains an address. As measured, a mapping without access of the
    /// device is not found, although [`pointer_attribute`](Self::pointer_attribute) finds it.
    pub(crate) fn address_range(
        &self,
        device: Ordinal,
        address: DeviceAddress,
    ) -> Answer<(DeviceAddress, u64)> {
        self.context(device)?;
        if let Some((_, mapping)) = self.mappings.containing(address.0) {
            let right = mapping.rights.of(Who::Device(device.0));
            require(right != AccessFlags::NONE, NOT_FOUND)?;
        }
        let found = self.find(address.0).ok_or(NOT_FOUND)?;
        Ok((DeviceAddress(found.start), found.size))
    }

    pub(crate) fn pointer_attribute(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        attribute: PointerAttribute,
    ) -> Answer<u64> {
        self.context(device)?;
        let found = self.find(address.0).ok_or(INVALID_VALUE)?;
        match attribute {
            PointerAttribute::MEMORY_TYPE => Ok(found.memory_type),
            // Unique while the allocation lives, which is enough for a model.
            PointerAttribute::BUFFER_ID => Ok(found.start),
            PointerAttribute::IS_MANAGED => Ok(u64::from(found.managed)),
            PointerAttribute::DEVICE_ORDINAL => Ok(found.device as u64),
            PointerAttribute::RANGE_START_ADDR => Ok(found.range.0),
            PointerAttribute::RANGE_SIZE => Ok(found.range.1),
            PointerAttribute::IS_GPU_DIRECT_RDMA_CAPABLE => Ok(u64::from(found.rdma)),
            PointerAttribute::MAPPING_BASE_ADDR => Ok(found.block.0),
            PointerAttribute::MAPPING_SIZE => Ok(found.block.1),
            PointerAttribute::ALLOWED_HANDLE_TYPES => Ok(u64::from(found.handle_types)),
            PointerAttribute::MEMPOOL_HANDLE => Ok(found.pool.unwrap_or_default()),
            _ => Err(INVALID_VALUE),
        }
    }

    /// Returns a stand-in for a dma-buf: an empty descriptor of the range's length.
    pub(crate) fn dma_buf(
        &self,
        device: Ordinal,
        address: DeviceAddress,
        size: u64,
    ) -> Answer<OsHandle> {
        self.context(device)?;
        // The granularity is a page of the host and not a granule.
        let page = page_size();
        let whole = address.0.is_multiple_of(page) && size.is_multiple_of(page);
        require(size != 0 && whole, INVALID_VALUE)?;
        let mapped = self.mappings.containing(address.0).is_some();
        let allocated = self.allocations.containing(address.0);
        let exportable = allocated.is_some_and(|(start, allocation)| {
            let on_device = matches!(allocation.kind, Kind::Plain | Kind::Pool);
            on_device && size <= start + allocation.size - address.0
        });
        let covered = mapped && self.mappings.cover(address.0, size);
        require(covered || exportable, INVALID_VALUE)?;
        exports::stand_in(size)
    }
}
