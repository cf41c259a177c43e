//! The table of memory pools.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::answer::{Answer, INVALID_VALUE};
use super::backing::MemoryKey;
use super::device_state::Owner;
use super::exports::Identity;
use super::rights::Rights;
use super::space::Space;
use super::stream_table::Mark;
use cuvmm_driver::{MemPoolHandle, MemPoolProps, OsHandle};

/// A pool obtains and releases memory in steps of this size, as measured on an H200.
pub(crate) const STEP: u64 = 32 << 20;

/// The key of a pool, which is never reused, unlike a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PoolKey(pub(crate) u64);

/// A memory pool. Its bytes are used by allocations, freed, or kept.
#[derive(Debug)]
pub(crate) struct Pool {
    /// `None` once the pool is destroyed and waits for its last allocation.
    pub(crate) handle: Option<u64>,
    pub(crate) props: MemPoolProps,
    /// The owner that is charged; `None` if another pool has the memory.
    pub(crate) owner: Option<Owner>,
    pub(crate) rights: Rights,
    pub(crate) reuse: Reuse,
    /// The bytes that the pool may hold after a synchronization.
    pub(crate) threshold: u64,
    pub(crate) used: Watermark,
    pub(crate) reserved: Watermark,
    /// Bytes that no work uses, as a synchronization has shown.
    pub(crate) kept: u64,
    /// Bytes freed in stream order since the last synchronization that showed them free.
    pub(crate) freed: Vec<Freed>,
    pub(crate) allocations: u64,
    pub(crate) shared: Option<SharedMemory>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watermark {
    pub(crate) current: u64,
    pub(crate) high: u64,
}

impl Watermark {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.current = self.current.saturating_add(bytes);
        self.high = self.high.max(self.current);
    }

    pub(crate) fn subtract(&mut self, bytes: u64) {
        self.current = self.current.saturating_sub(bytes);
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Reuse {
    pub(crate) follow_events: bool,
    pub(crate) opportunistic: bool,
    pub(crate) internal: bool,
}

/// Bytes freed on a stream, perhaps before its work is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Freed {
    pub(crate) mark: Mark,
    pub(crate) bytes: u64,
}

/// The memory of a shareable pool: ranges of one file.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    pub(crate) exported: bool,
    pub(crate) key: MemoryKey,
    pub(crate) file: Arc<OsHandle>,
    pub(crate) identity: Identity,
    /// The free ranges; `None` for an imported pool, whose ranges its exporter chooses.
    pub(crate) space: Option<Space>,
}

#[derive(Debug)]
pub(crate) struct Pools {
    pub(crate) by_key: BTreeMap<PoolKey, Pool>,
    pub(crate) by_handle: BTreeMap<u64, PoolKey>,
    /// The current pool of each device. The default pool of device `n` has the key `n`.
    pub(crate) current: Vec<PoolKey>,
    /// The default pools of memory other than a device's, made on demand.
    pub(crate) default: Vec<(MemPoolProps, PoolKey)>,
    last: u64,
}

impl Pools {
    /// Creates a table for these devices, without their default pools.
    pub(crate) fn new(devices: usize) -> Self {
        Self {
            by_key: BTreeMap::new(),
            by_handle: BTreeMap::new(),
            current: (0..devices as u64).map(PoolKey).collect(),
            default: Vec::new(),
            last: 0,
        }
    }

    pub(crate) fn add(&mut self, pool: Pool) {
        let key = PoolKey(self.last);
        self.last += 1;
        if let Some(handle) = pool.handle {
            self.by_handle.insert(handle, key);
        }
        self.by_key.insert(key, pool);
    }

    pub(crate) fn is_default(&self, key: PoolKey) -> bool {
        let listed = |&(_, default): &(_, PoolKey)| default == key;
        key.0 < self.current.len() as u64 || self.default.iter().any(listed)
    }

    pub(crate) fn key(&self, handle: MemPoolHandle) -> Answer<PoolKey> {
        self.by_handle.get(&handle.0).copied().ok_or(INVALID_VALUE)
    }

    pub(crate) fn get(&self, handle: MemPoolHandle) -> Answer<&Pool> {
        let key = self.key(handle)?;
        self.by_key.get(&key).ok_or(INVALID_VALUE)
    }

    pub(crate) fn get_mut(&mut self, handle: MemPoolHandle) -> Answer<&mut Pool> {
        let key = self.key(handle)?;
        self.by_key.get_mut(&key).ok_or(INVALID_VALUE)
    }

    /// Returns the number of pools that were created or imported and have not ended.
    pub(crate) fn made(&self) -> usize {
        let default = self.current.len() + self.default.len();
        self.by_key.len().saturating_sub(default)
    }
}

impl Pool {
    pub(crate) fn new(
        handle: u64,
        props: MemPoolProps,
        owner: Option<Owner>,
        rights: Rights,
        shared: Option<SharedMemory>,
    ) -> Self {
        Self {
            handle: Some(handle),
            props,
            owner,
            rights,
            reuse: Reuse {
                follow_events: true,
                opportunistic: true,
                internal: true,
            },
            threshold: 0,
            used: Watermark::default(),
            reserved: Watermark::default(),
            kept: 0,
            freed: Vec::new(),
            allocations: 0,
            shared,
        }
    }
}
