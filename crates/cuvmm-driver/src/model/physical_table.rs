//! The table of physical allocations and of the memory that they name.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::answer::{Answer, INVALID_VALUE};
use super::backing::MemoryKey;
use super::device_state::Owner;
use super::exports::Identity;
use crate::{Location, PhysicalProps};

/// What one handle value names. It goes when it has neither references nor mappings.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) size: u64,
    pub(crate) props: PhysicalProps,
    pub(crate) references: u64,
    pub(crate) mappings: u64,
    pub(crate) memory: MemoryKey,
    pub(crate) imported: bool,
    /// Created cold, and nobody has had access since.
    pub(crate) cold: bool,
}

/// The bytes. They go when no handle names them and no exported descriptor is open.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) size: u64,
    pub(crate) location: Location,
    /// Whose it is here; nobody's when another process made it.
    pub(crate) owner: Option<Owner>,
    /// How many handle values name it.
    pub(crate) handles: u64,
    pub(crate) file: Option<Arc<OwnedFd>>,
    pub(crate) identity: Option<Identity>,
    pub(crate) exported: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Physicals {
    pub(crate) by_handle: BTreeMap<u64, Physical>,
    pub(crate) memories: BTreeMap<MemoryKey, Memory>,
    pub(crate) by_identity: HashMap<Identity, MemoryKey>,
    /// Memories without handles whose exported descriptors were open when last looked at.
    pub(crate) lingering: BTreeSet<MemoryKey>,
    pub(crate) host_used: u64,
    next_key: u64,
    /// When memory of a location and size was released: the driver has it at hand for a while.
    pub(crate) warm: BTreeMap<(Location, u64), VecDeque<Duration>>,
    /// What was released at a location since its last create.
    pub(crate) released: BTreeMap<Location, Released>,
}

/// Bytes released in a row, when the last of them were, and how many were created since.
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

    /// Memories that only exported descriptors keep alive.
    pub(crate) fn exported_only(&self) -> usize {
        self.lingering.len()
    }

    pub(crate) fn new_key(&mut self) -> MemoryKey {
        self.next_key += 1;
        MemoryKey(self.next_key)
    }
}
