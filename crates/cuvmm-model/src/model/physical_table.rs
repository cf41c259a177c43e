//! The table of physical allocations and of the memory that they name.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::answer::{Answer, INVALID_VALUE};
use super::backing::MemoryKey;
use super::device_state::Owner;
use super::exports::Identity;
use cuvmm_driver::{Location, OsHandle, PhysicalProps};

/// A physical allocation, named by one handle value, which ends when it has neither references nor
/// mappings.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) size: u64,
    pub(crate) props: PhysicalProps,
    pub(crate) references: u64,
    pub(crate) mappings: u64,
    pub(crate) memory: MemoryKey,
    /// Created cold, and no location has had access since.
    pub(crate) cold: bool,
}

/// The bytes of a physical, which end when no handle names them and no exported descriptor is open.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) size: u64,
    pub(crate) location: Location,
    /// The owner that is charged; `None` if another process created the memory.
    pub(crate) owner: Option<Owner>,
    pub(crate) handles: u64,
    pub(crate) file: Option<Arc<OsHandle>>,
    pub(crate) identity: Option<Identity>,
    pub(crate) exported: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Physicals {
    pub(crate) by_handle: BTreeMap<u64, Physical>,
    pub(crate) memories: BTreeMap<MemoryKey, Memory>,
    pub(crate) by_identity: HashMap<Identity, MemoryKey>,
    /// Memories without handles whose exported descriptors were open at the last check.
    pub(crate) lingering: BTreeSet<MemoryKey>,
    pub(crate) host_used: u64,
    next_key: u64,
    /// Release times of memory by location and size: for a while, the driver can reuse the memory
    /// cheaply.
    pub(crate) warm: BTreeMap<(Location, u64), VecDeque<Duration>>,
    /// Memory released at each location since its last create.
    pub(crate) released: BTreeMap<Location, Released>,
}

/// The bytes released in a row, the time of the last release, and the bytes created since.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Released {
    pub(crate) bytes: u64,
    pub(crate) last: Duration,
    pub(crate) created: u64,
}

impl Physicals {
    pub(crate) fn get(&self, handle: u64) -> Answer<&Physical> {
        self.by_handle.get(&handle).ok_or(INVALID_VALUE)
    }

    pub(crate) fn exported_only(&self) -> usize {
        self.lingering.len()
    }

    pub(crate) fn new_key(&mut self) -> MemoryKey {
        self.next_key += 1;
        MemoryKey(self.next_key)
    }
}
