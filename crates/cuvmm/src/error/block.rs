//! Errors of blocks.

use cuvmm_driver::DeviceAddress;

use super::{ArgumentError, CallError, MemoryError, Shortage};

/// Why a block could not be allocated, grown, shrunk, forked, freed or moved.
///
/// Unless it is [`Lost`](Self::Lost), every block, charge and guarantee is as before; memory that no
/// block used may have been taken back on the way. A compaction keeps what it did until then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// A value that was given cannot be meant: a size of zero, above the capacity, or below what the
    /// block has; a stream of another device.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// A block belongs to another tenant.
    #[error("block {index} is another tenant's")]
    NotOurs {
        /// Which of the blocks given, counted from zero.
        index: usize,
    },
    /// The tenant has been unregistered.
    #[error("tenant {tenant:?} has been unregistered")]
    Unregistered {
        /// Its name.
        tenant: String,
    },
    /// A future waits for memory, and no [mapper](crate::Mapper) looks after the pool, or it has ended.
    #[error("futures wait by the pool's mapper, and it has none")]
    NoMapper,
    /// Memory is short: the limit, the tenant's limit or others' guarantees leave too little.
    #[error("out of memory: {0}")]
    OutOfMemory(Box<Shortage>),
    /// Mappings are short.
    #[error("out of mappings: {wanted} more wanted, {held} held of at most {limit}")]
    OutOfMappings {
        /// Mappings wanted.
        wanted: u64,
        /// Mappings the pool holds.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// Addresses are short.
    #[error("out of addresses: {wanted} bytes wanted, {held} reserved of at most {limit}")]
    OutOfAddresses {
        /// Bytes of addresses wanted.
        wanted: u64,
        /// Bytes of addresses the pool has reserved.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// The driver has no more although the pool's limit would allow it: another process or
    /// library took it.
    #[error("the driver is out of memory below the pool's limit: {cause}; {shortage}")]
    DriverOutOfMemory {
        /// The driver's answer.
        #[source]
        cause: CallError,
        /// The pool's own figures.
        shortage: Box<Shortage>,
    },
    /// A fence or a scrub would be needed, and a capture guard lives or the home stream captures.
    #[error("a capture is running and only memory behind a fence or a scrub would fit: {0}")]
    Capturing(Box<Shortage>),
    /// The bytes that would be written lie in memory that other blocks show too, or did, and work
    /// that may read them at this block's addresses, or a lease, has not ended: they cannot be made
    /// its own yet.
    #[error(
        "{bytes} bytes at offset {offset}, which {others} other blocks show too, are in use here"
    )]
    SharedInUse {
        /// Where in the block.
        offset: u64,
        /// How many bytes from there on.
        bytes: u64,
        /// How many other blocks show the first of them.
        others: usize,
    },
    /// One of several blocks could not grow. All of them are as before.
    #[error("growing block {index} of those to be grown to {size} bytes: {cause}")]
    Refused {
        /// Which block, counted from zero.
        index: usize,
        /// Bytes asked for.
        size: u64,
        /// Why.
        #[source]
        cause: Box<Self>,
    },
    /// The block has lost memory: what was to take its place could not be mapped, and neither could
    /// what had been there, so nothing is mapped there any more. It takes two failures of the driver.
    #[error("{bytes} bytes at offset {offset} of the block at {address} are lost: {cause}")]
    Lost {
        /// The block's address.
        address: DeviceAddress,
        /// Where in the block.
        offset: u64,
        /// How many bytes.
        bytes: u64,
        /// Why they could not be put back.
        #[source]
        cause: MemoryError,
    },
    /// The block sleeps, memory could not be created, mapped, filled or copied, or a driver call
    /// failed.
    #[error(transparent)]
    Memory(MemoryError),
}

impl BlockError {
    /// Whether waiting or giving memory back can help.
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
