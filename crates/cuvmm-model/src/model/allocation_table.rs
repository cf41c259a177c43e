//! The table of allocations outside virtual memory management.

use std::collections::BTreeMap;

use super::advice::Advised;
use super::backing::{MemoryKey, PlainName};
use super::device_state::Owner;
use super::pool_table::PoolKey;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Pool,
    HostPool,
    Pinned,
    Managed,
    Opened,
}

impl Kind {
    pub(crate) fn is_touchable(self) -> bool {
        matches!(self, Self::Pinned | Self::Managed | Self::HostPool)
    }
}

#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) size: u64,
    pub(crate) kind: Kind,
    pub(crate) device: i32,
    pub(crate) advised: Advised,
    pub(crate) owner: Option<Owner>,
    pub(crate) taken: u64,
    pub(crate) slab: Option<u64>,
    pub(crate) pool: Option<PoolKey>,
    /// The range in the memory of a shareable pool, by the offset of its first byte.
    pub(crate) memory: Option<(MemoryKey, u64)>,
    pub(crate) name: Option<PlainName>,
    /// `free_async` was called, and the work that ends the allocation is queued.
    pub(crate) ending: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Allocations {
    pub(crate) by_address: BTreeMap<u64, Allocation>,
}

impl Allocations {
    pub(crate) fn containing(&self, address: u64) -> Option<(u64, &Allocation)> {
        let (&start, allocation) = self.by_address.range(..=address).next_back()?;
        (address - start < allocation.size).then_some((start, allocation))
    }
}
