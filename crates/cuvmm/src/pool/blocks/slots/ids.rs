//! Names of slots and of the blocks in them.

use cuvmm_driver::DeviceAddress;

use crate::error::ArgumentError;
use crate::pool::accounts::TenantId;

pub(in crate::pool) const BYTES: &str = "bytes of a block";

pub(in crate::pool::blocks) const fn too_large(value: u64) -> ArgumentError {
    ArgumentError::Overflow { what: BYTES, value }
}

/// A slot's name: its tenant, and its number within the tenant. When the slot is dropped, another
/// may get its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::pool) struct SlotId {
    pub(crate) tenant: TenantId,
    pub(crate) index: usize,
}

/// The place of a block: its slot, first address and capacity in bytes.
#[derive(Clone, Copy, Debug)]
pub(in crate::pool) struct BlockPlace {
    pub(crate) slot: SlotId,
    pub(crate) address: DeviceAddress,
    pub(crate) capacity: u64,
}
