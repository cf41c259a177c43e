//! Errors of pools, tenants and blocks.

use std::fmt;

use cuvmm_driver::{DeviceAddress, HandleTypes, Location};

use super::{
    BlockRefusal, CallError, CommitError, CopyError, CreateError, ExportError, ReserveError,
};

/// Why a pool could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildPoolError {
    /// The limit is smaller than one granule, or more than the device has.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// A limit in mappings or addresses is zero, the largest extent is no power of two granules, or
    /// guards leave no addresses for a block between them.
    #[error("option {option} cannot be {value}")]
    BadOption {
        /// The option's name.
        option: &'static str,
        /// What it was set to.
        value: u64,
    },
    /// Memory that RDMA devices reach was asked for, and the device has none (attribute 110).
    #[error("memory of {device} cannot be made reachable for RDMA")]
    NoRdma {
        /// The device.
        device: Location,
    },
    /// The mapper is another device's.
    #[error("the mapper belongs to another device")]
    WrongMapper,
    /// Memory of that kind cannot be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why a tenant could not be registered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The name is empty.
    #[error("a tenant needs a name")]
    NoName,
    /// Another tenant has the name.
    #[error("a tenant named {name:?} is registered already")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The guarantee cannot be given.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The process is a forked child of the one that opened the device.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why a limit or a guarantee cannot be given or changed. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The pool's limit is smaller than one granule.
    #[error("a limit of {limit} bytes holds no granule of {granularity} bytes")]
    TooSmall {
        /// The limit.
        limit: u64,
        /// The granule.
        granularity: u64,
    },
    /// The pool's limit is more than the device has.
    #[error("a limit of {limit} bytes is more than the device's {total}")]
    TooLarge {
        /// The limit.
        limit: u64,
        /// All memory of the device.
        total: u64,
    },
    /// The tenants are guaranteed more than the pool's limit: lower their guarantees first.
    #[error(
        "a limit of {limit} bytes is less than the {guaranteed} bytes that tenants are guaranteed"
    )]
    BelowGuarantees {
        /// The limit, in whole granules.
        limit: u64,
        /// The guarantees of all tenants.
        guaranteed: u64,
    },
    /// The mapper is to keep more ready than the pool's limit.
    #[error("a limit of {limit} bytes is less than the {free_target} bytes that are kept ready")]
    BelowFreeTarget {
        /// The limit, in whole granules.
        limit: u64,
        /// What is kept ready.
        free_target: u64,
    },
    /// The guarantees, and what others use beyond theirs, would add up to more than the pool's
    /// limit.
    #[error(
        "a guarantee of {guarantee} bytes is more than the {left} bytes that other guarantees and memory in use leave of the limit, {limit}"
    )]
    GuaranteeTooLarge {
        /// Bytes asked for.
        guarantee: u64,
        /// Bytes that neither guarantees nor memory in use beyond them take.
        left: u64,
        /// The pool's limit.
        limit: u64,
    },
    /// The tenant's guarantee is more than its own limit.
    #[error("a guarantee of {guarantee} bytes is more than the tenant's own limit, {limit}")]
    GuaranteeOverLimit {
        /// The guarantee.
        guarantee: u64,
        /// The tenant's limit.
        limit: u64,
    },
    /// The tenant has been unregistered.
    #[error("tenant {tenant:?} has been unregistered")]
    Unregistered {
        /// Its name.
        tenant: String,
    },
    /// A driver call failed, or the process is a forked child of the one that opened the device.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why a compaction ended early. What it did until then stays; the step that failed has changed
/// nothing, unless it is [`Lost`](Self::Lost).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompactError {
    /// A capture guard lives, and moving memory could break the capture.
    #[error("a capture is running on this pool: nothing is moved")]
    Capturing,
    /// Memory for the copy could not be had, for another reason than that there is none.
    #[error(transparent)]
    Create(Box<AllocateError>),
    /// Addresses for the copy could not be had.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// An extent could not be placed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// The bytes could not be copied.
    #[error(transparent)]
    Copy(CopyError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The old extents could not be put back after the new ones could not be placed: the block
    /// has lost them, and nothing is mapped there. It takes two failures of the driver.
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
        cause: CommitError,
    },
}

/// The figures of a refusal. All sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// Who asked.
    pub tenant: String,
    /// What the request was to bring into use, in whole granules.
    pub wanted: u64,
    /// How much of that could be had right now, with everything taken back that can be without
    /// waiting and without pressure hooks: a request for so much succeeds, and one for a granule
    /// more fails, as long as nothing changes in between. Always less than was wanted.
    ///
    /// It is a total. A request may fail below it where mappings or addresses are short, or where
    /// blocks of other sizes than the one that was refused strand memory on their way; and one may
    /// get more that has the shape, and the home stream, of a block that was freed on that stream
    /// a moment ago, since that one's memory is the stream's before its work has passed.
    pub available: u64,
    /// The largest single extent that could be made right now without taking anything back.
    pub largest_run: u64,
    /// The pool's limit.
    pub limit: u64,
    /// The tenant's own limit.
    pub tenant_limit: u64,
    /// What the tenant holds.
    pub tenant_held: u64,
    /// What is kept for other tenants' guarantees.
    pub guaranteed_to_others: u64,
    /// What can be taken back once GPU work has passed.
    #[doc(alias = "limbo")]
    pub pending_free: u64,
    /// What is withdrawn but leased.
    pub leased: u64,
    /// What is idle in one extent with bytes in use: it can be taken back when those are given up,
    /// and waiting does not help.
    pub stranded: u64,
    /// What could not be taken back after a failure.
    pub quarantined: u64,
    /// The other tenants and what each holds, largest first.
    pub holders: Vec<(String, u64)>,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} wants {} bytes more and can have {}: it holds {} of at most {}, the pool's limit is {}, \
             {} are kept for other tenants' guarantees, {} are pending free, {} leased, {} stranded, \
             {} quarantined, the largest free run is {}",
            self.tenant,
            self.wanted,
            self.available,
            self.tenant_held,
            self.tenant_limit,
            self.limit,
            self.guaranteed_to_others,
            self.pending_free,
            self.leased,
            self.stranded,
            self.quarantined,
            self.largest_run,
        )?;
        for (index, (name, held)) in self.holders.iter().take(8).enumerate() {
            f.write_str(if index == 0 { "; held by " } else { ", " })?;
            write!(f, "{name:?} {held}")?;
        }
        Ok(())
    }
}

/// Why a block could not be allocated or grown. Every block, charge and guarantee is as before;
/// memory that nobody used may have been taken back on the way.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// The size is zero.
    #[error("a block of zero bytes")]
    ZeroSize,
    /// The size is more than the capacity.
    #[error("a block of {size} bytes with a capacity of {capacity}")]
    OverCapacity {
        /// Bytes asked for.
        size: u64,
        /// What the block may grow to.
        capacity: u64,
    },
    /// Growing to less than the block has.
    #[error("growing a block of {size} bytes to {wanted}")]
    WouldShrink {
        /// What the block has.
        size: u64,
        /// Bytes asked for.
        wanted: u64,
    },
    /// The size does not fit 64 bits once rounded.
    #[error("a block of {size} bytes does not fit the address space")]
    TooLarge {
        /// Bytes asked for.
        size: u64,
    },
    /// The number of blocks exceeds what the device has memory for.
    #[error("{count} blocks of {size} bytes each are more than the device's {total} bytes")]
    TooMany {
        /// How many blocks.
        count: usize,
        /// Bytes asked for, of each.
        size: u64,
        /// All memory of the device in bytes.
        total: u64,
    },
    /// The block's largest extent is no power of two granules.
    #[error("an extent of {bytes} bytes is no power of two granules of {granularity}")]
    BadExtent {
        /// The largest extent asked for.
        bytes: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// Blocks side by side are to lie a multiple of no bytes apart.
    #[error("blocks that lie a multiple of zero bytes apart")]
    ZeroStride,
    /// The stream belongs to another device.
    #[error("the home stream belongs to another device than the pool")]
    WrongDevice,
    /// The block sleeps.
    #[error("a block of {size} bytes sleeps: wake it first")]
    Asleep {
        /// What the block has when it is awake.
        size: u64,
    },
    /// The tenant has been unregistered.
    #[error("tenant {tenant:?} has been unregistered")]
    Unregistered {
        /// Its name.
        tenant: String,
    },
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
    /// Neither a block's own memory nor what it had shared until then could be placed: nothing is
    /// mapped there any more. It takes two failures of the driver.
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
        cause: CommitError,
    },
    /// Addresses could not be reserved.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// Physical memory could not be committed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Memory could not be filled with zeros.
    #[error("zeroing: {0}")]
    Zero(#[source] CopyError),
    /// The part of a prefix that is not shared could not be copied.
    #[error("copying: {0}")]
    Copy(#[source] CopyError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl AllocateError {
    /// Whether waiting or giving memory back can help.
    #[must_use]
    pub const fn is_shortage(&self) -> bool {
        matches!(
            self,
            Self::OutOfMemory(_)
                | Self::OutOfMappings { .. }
                | Self::OutOfAddresses { .. }
                | Self::DriverOutOfMemory { .. }
                | Self::Capturing(_)
                | Self::SharedInUse { .. }
        )
    }
}

impl From<CreateError> for AllocateError {
    fn from(error: CreateError) -> Self {
        Self::Commit(error.into())
    }
}

/// Why blocks could not be forked. Every one of them is as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForkBlocksError {
    /// A block belongs to another tenant.
    #[error("block {index} of those to be forked is another tenant's")]
    NotOurs {
        /// Which block, counted from zero.
        index: usize,
    },
    /// Nothing is to be the same.
    #[error("a fork that begins with no bytes of its block")]
    NoPrefix,
    /// A block has fewer bytes than its fork is to begin with.
    #[error("block {index} has {has} bytes: its fork cannot begin with {bytes} of them")]
    TooLong {
        /// Which block, counted from zero.
        index: usize,
        /// Bytes that the fork is to begin with.
        bytes: u64,
        /// Bytes that the block has.
        has: u64,
    },
    /// A fork would be smaller than what it begins with.
    #[error("a fork of {size} bytes that begins with {bytes} bytes of its block")]
    LessThanPrefix {
        /// Bytes that the fork is to begin with.
        bytes: u64,
        /// Bytes that it is to have.
        size: u64,
    },
    /// Memory for it could not be had, or a block sleeps.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
}

/// Why blocks could not be grown together. Every one of them is as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrowAllError {
    /// A block belongs to another tenant.
    #[error("block {index} of those to be grown is another tenant's")]
    NotOurs {
        /// Which block, counted from zero.
        index: usize,
    },
    /// A block could not grow.
    #[error("growing block {index} of those to be grown to {size} bytes: {cause}")]
    Refused {
        /// Which block, counted from zero.
        index: usize,
        /// Bytes asked for.
        size: u64,
        /// Why.
        #[source]
        cause: AllocateError,
    },
}

/// Why a block could not be shrunk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShrinkError {
    /// Shrinking to more than the block has.
    #[error("shrinking a block of {size} bytes to {wanted}")]
    WouldGrow {
        /// What the block has.
        size: u64,
        /// Bytes asked for.
        wanted: u64,
    },
    /// Shrinking to nothing; free it instead.
    #[error("shrinking a block to zero bytes: free it instead")]
    ZeroSize,
    /// The block sleeps.
    #[error("a block that sleeps is not shrunk: wake it, or free it")]
    Asleep,
    /// The process is a forked child of the one that opened the device.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why a block could not be exported. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportBlockError {
    /// The pool's memory was not made to be exported so.
    #[error("the pool's memory is shareable as {shareable:?}, not as {handle_type:?}")]
    NotShareable {
        /// The type asked for.
        handle_type: HandleTypes,
        /// The types that the pool was built for.
        shareable: HandleTypes,
    },
    /// The block sleeps, or shares memory with [forks](crate::Block::fork).
    #[error(transparent)]
    Refused(#[from] BlockRefusal),
    /// An extent could not be exported.
    #[error(transparent)]
    Export(#[from] ExportError),
}

/// Why a block was not freed. It is handed back.
pub struct FreeError<B> {
    /// The block, as it was.
    pub block: B,
    /// Why.
    pub reason: FreeRefusal,
}

/// Why a block may not be freed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FreeRefusal {
    /// The home stream is capturing: the graph may still use the block.
    #[error("the block's home stream is capturing")]
    Capturing,
    /// The driver could not say whether the home stream is capturing.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl<B> fmt::Debug for FreeError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreeError")
            .field("reason", &self.reason)
            .finish_non_exhaustive()
    }
}

impl<B> fmt::Display for FreeError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the block was not freed: {}", self.reason)
    }
}

impl<B> std::error::Error for FreeError<B> {}
