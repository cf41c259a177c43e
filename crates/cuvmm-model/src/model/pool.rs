//! Stream-ordered allocations from memory pools.

use super::allocation_table::Kind;
use super::answer::{Answer, INVALID_VALUE, NOT_SUPPORTED, require};
use super::backing::Backing;
use super::pool_table::{Freed, PoolKey};
use super::state::State;
use super::work::Work;
use cuvmm_driver::{DeviceAddress, MemPoolHandle, Ordinal, StreamHandle};

/// Kinds that can be freed in stream order.
const FREEABLE: &[Kind] = &[Kind::Plain, Kind::Pool, Kind::HostPool, Kind::Managed];

impl<B: Backing> State<B> {
    pub(crate) fn alloc_async(
        &mut self,
        device: Ordinal,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<DeviceAddress> {
        let index = self.context(device)?;
        let current = self.pools.current[index];
        self.alloc_in_order(device, size, current, stream)
    }

    pub(crate) fn alloc_from_pool_async(
        &mut self,
        device: Ordinal,
        size: u64,
        pool: MemPoolHandle,
        stream: StreamHandle,
    ) -> Answer<DeviceAddress> {
        self.context(device)?;
        let pool = self.pools.key(pool)?;
        self.alloc_in_order(device, size, pool, stream)
    }

    fn alloc_in_order(
        &mut self,
        device: Ordinal,
        size: u64,
        pool: PoolKey,
        stream: StreamHandle,
    ) -> Answer<DeviceAddress> {
        let key = self.stream(device, stream)?;
        // A captured allocation would be a node of the graph, which is not modeled.
        let capturing = self
            .streams
            .get(key)
            .is_some_and(|stream| stream.capture.is_some());
        require(!capturing, NOT_SUPPORTED)?;
        let (address, after) = self.allocate_from_pool(pool, size, key)?;
        if !after.is_empty() {
            self.submit_after(device, stream, after, Work::Marker)?;
        }
        Ok(DeviceAddress(address))
    }

    pub(crate) fn free_async(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        self.stream(device, stream)?;
        let allocation = self.allocation(address.0, FREEABLE)?;
        let pooled = allocation.kind != Kind::Managed || allocation.pool.is_some();
        require(pooled, INVALID_VALUE)?;
        allocation.ending = true;
        let (pool, size, bytes) = (allocation.pool, allocation.size, allocation.taken);
        let submitted = self.submit(device, stream, Work::FreeAllocation { address: address.0 });
        if submitted.is_err()
            && let Some(allocation) = self.allocations.by_address.get_mut(&address.0)
        {
            allocation.ending = false;
        }
        if let (Some(mark), Some(pool)) = (submitted?, pool) {
            self.note_freed(pool, size, Freed { mark, bytes });
        }
        Ok(())
    }
}
