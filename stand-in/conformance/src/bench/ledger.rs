//! The ledger of a case: the resources that it acquired and has not released.

use cuvmm_driver::{
    DeviceAddress, DriverError, EventHandle, GraphExecHandle, GraphHandle, MemPoolHandle, Ordinal,
    PhysicalHandle, StreamHandle,
};

/// All outstanding resources, in the order of their acquisition.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) reservations: Vec<(DeviceAddress, u64)>,
    pub(super) mappings: Vec<(DeviceAddress, u64)>,
    /// One entry for each reference, so a handle may be listed twice.
    pub(super) handles: Vec<PhysicalHandle>,
    pub(super) plain: Vec<DeviceAddress>,
    pub(super) pinned: Vec<usize>,
    pub(super) registered: Vec<usize>,
    pub(super) pools: Vec<MemPoolHandle>,
    /// The current memory pool of the device was set.
    pub(super) changed_pool: bool,
    pub(super) streams: Vec<(Ordinal, StreamHandle)>,
    /// Streams whose capture was begun and not ended.
    pub(super) capturing: Vec<StreamHandle>,
    pub(super) events: Vec<EventHandle>,
    pub(super) graphs: Vec<GraphHandle>,
    pub(super) execs: Vec<GraphExecHandle>,
}

impl Ledger {
    /// Removes the mappings that are entirely in a range.
    pub(super) fn strike_mappings(&mut self, address: DeviceAddress, size: u64) {
        let end = address.0.saturating_add(size);
        self.mappings
            .retain(|(at, len)| at.0 < address.0 || at.0.saturating_add(*len) > end);
    }
}

pub(super) fn note(troubles: &mut Vec<String>, outcome: Result<(), DriverError>) {
    troubles.extend(outcome.err().map(|error| error.to_string()));
}

pub(super) fn strike<T: PartialEq>(entries: &mut Vec<T>, wanted: &T) {
    if let Some(index) = entries.iter().rposition(|entry| entry == wanted) {
        entries.remove(index);
    }
}
