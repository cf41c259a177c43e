//! Names of slots and of the blocks in them.

use cuvmm_driver::DeviceAddress;

use super::budget::TenantId;

/// What errors call the size of a block.
pub(super) const BYTES: &str = "bytes of a block";

/// Which slot: its tenant, and its number there. When a slot goes, another may get its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlotId {
    pub(crate) tenant: TenantId,
    pub(crate) index: usize,
}

/// Where a block is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockPlace {
    pub(crate) slot: SlotId,
    pub(crate) address: DeviceAddress,
    pub(crate) capacity: u64,
}
