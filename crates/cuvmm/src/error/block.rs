//! Errors of blocks.

use cuvmm_driver::DeviceAddress;

use super::{ArgumentError, CallError, MemoryError, Shortage};
use crate::display::Bytes;

/// An error of allocating, growing, shrinking, forking, freeing or moving a block.
///
/// Unless it is [`Lost`](Self::Lost), every block, charge and guarantee is unchanged. Unused memory
/// may have been reclaimed. A compaction keeps the moves made before the error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum BlockError {
    /// An argument cannot be used: a size of zero, above the capacity, or below the block's size; a
    /// stream of another device.
    Argument(#[from] ArgumentError),
    /// A block belongs to another tenant.
    #[error("block {index} belongs to another tenant")]
    #[doc(alias = "NotOurs")]
    WrongTenant {
        /// The index of the block among those given.
        index: usize,
    },
    /// The tenant of this name has been unregistered.
    #[error("tenant {0:?} has been unregistered")]
    Unregistered(String),
    /// A future waits for memory, and the pool has no [mapper](crate::Mapper), or the mapper has
    /// ended.
    #[error("futures need a mapper to wait for memory: build the pool with a running mapper")]
    NoMapper,
    /// Memory is short: the pool's limit, the tenant's limit or the guarantees of other tenants
    /// leave too little.
    #[error("out of memory: {}", .0.summary())]
    OutOfMemory(Box<Shortage>),
    /// The pool's limit of mappings is reached.
    #[error("out of mappings: {wanted} more needed, {held} of at most {limit} in use")]
    OutOfMappings {
        /// Mappings needed.
        wanted: u64,
        /// Mappings that the pool has.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// The pool's limit of addresses is reached.
    #[error(
        "out of addresses: {} needed, {} of at most {} reserved by the pool",
        Bytes(*.wanted), Bytes(*.held), Bytes(*.limit)
    )]
    OutOfAddresses {
        /// Bytes of addresses needed.
        wanted: u64,
        /// Bytes of addresses that the pool has reserved.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// A heap needs more addresses than it may have, or than the pool or the driver has.
    #[error(
        "out of addresses: the heap of {tenant:?} needs {} side by side, {} of at most {} reserved{}",
        Bytes(*.wanted), Bytes(*.held), Bytes(*.limit),
        .cause.as_ref().map_or_else(String::new, |cause| format!(": {cause}"))
    )]
    HeapOutOfAddresses {
        /// The tenant of the heap.
        tenant: String,
        /// Bytes of addresses needed side by side.
        wanted: u64,
        /// Bytes of addresses that the heap has.
        held: u64,
        /// The most bytes of addresses that the heap may have.
        limit: u64,
        /// The reason, unless it is that limit.
        #[source]
        cause: Option<Box<Self>>,
    },
    /// The driver has no more memory although the pool's limit would allow it: another process or
    /// library uses it.
    #[error("the device is out of memory below the pool's limit: {cause}; {}", shortage.summary())]
    DriverOutOfMemory {
        /// The driver's answer.
        #[source]
        cause: CallError,
        /// The pool's figures.
        shortage: Box<Shortage>,
    },
    /// The request needs a fence or a scrub while a capture guard lives or the home stream
    /// captures.
    #[error(
        "a capture is running, and only memory that needs a fence or a scrub would fit: {}",
        .0.summary()
    )]
    Capturing(Box<Shortage>),
    /// The bytes to be written are in memory that other blocks share, or did share, and work that
    /// may read them at this block's addresses, or a lease, has not ended: they cannot be unshared
    /// yet.
    #[error(
        "{} at offset {} are shared with {others} other blocks and in use here: wait for the work \
         that reads them, and drop the leases",
        Bytes(*.bytes), Bytes(*.offset)
    )]
    SharedInUse {
        /// The offset in the block.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
        /// The number of other blocks that share the first of them.
        others: usize,
    },
    /// One of several blocks could not grow. All of them are unchanged.
    #[error("cannot grow block {index} to {}: {cause}", Bytes(*.size))]
    Refused {
        /// The index of the block among those given.
        index: usize,
        /// The requested size in bytes.
        size: u64,
        /// The reason.
        #[source]
        cause: Box<Self>,
    },
    /// The block has lost memory: neither could new memory be mapped in place of the old, nor the
    /// old memory again. This takes two failures of the driver.
    #[error(
        "{} at offset {} of the block at {address} are lost: {cause}",
        Bytes(*.bytes), Bytes(*.offset)
    )]
    Lost {
        /// The block's address.
        address: DeviceAddress,
        /// The offset in the block.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
        /// The reason why they could not be put back.
        #[source]
        cause: MemoryError,
    },
    /// The block is asleep, memory could not be created, mapped, filled or copied, or a driver call
    /// failed.
    Memory(MemoryError),
}

impl BlockError {
    /// Returns the error without bytes charged to the tenant for the request itself, and given
    /// back.
    pub(crate) fn without_charge(mut self, bytes: u64) -> Self {
        if let Self::OutOfMemory(shortage)
        | Self::Capturing(shortage)
        | Self::DriverOutOfMemory { shortage, .. } = &mut self
        {
            shortage.tenant_held = shortage.tenant_held.saturating_sub(bytes);
        }
        self
    }

    /// Returns `true` if waiting or freeing memory can help.
    #[must_use]
    pub fn is_shortage(&self) -> bool {
        match self {
            Self::SharedInUse { .. } => true,
            Self::Refused { cause, .. } => cause.is_shortage(),
            Self::Lost { .. } | Self::Memory(_) => false,
            other => other.is_out_of_memory(),
        }
    }
}
