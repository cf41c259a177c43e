//! Stream-ordered allocations from the memory pool of a device.

use super::allocation_table::Kind;
use super::answer::{Answer, NOT_SUPPORTED, require};
use super::backing::Backing;
use super::state::State;
use super::work::Work;
use crate::{DeviceAddress, Ordinal, StreamHandle};

impl<B: Backing> State<B> {
    pub(crate) fn alloc_async(
        &mut self,
        device: Ordinal,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<DeviceAddress> {
        self.context(device)?;
        let key = self.stream(device, stream)?;
        // A captured allocation would be a node of the graph, which is not modeled.
        let capturing = self
            .streams
            .get(key)
            .is_some_and(|stream| stream.capture.is_some());
        require(!capturing, NOT_SUPPORTED)?;
        self.allocate(device, size, Kind::Pool).map(DeviceAddress)
    }

    pub(crate) fn free_async(
        &mut self,
        device: Ordinal,
        address: DeviceAddress,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        self.stream(device, stream)?;
        self.allocation(address.0, &[Kind::Plain, Kind::Pool])?;
        self.submit(device, stream, Work::FreeAllocation { address: address.0 })?;
        if let Ok(still_there) = self.allocation(address.0, &[Kind::Plain, Kind::Pool]) {
            still_there.ending = true;
        }
        Ok(())
    }
}
