//! Errors of memory: reservations, physicals, mappings, managed memory, regions, copies; and of the
//! blocks of a pool. A region in a tenant has the errors of both.

use std::ops::Range;

use cuvmm_driver::{DeviceAddress, HandleTypes, Location};

use super::{ArgumentError, CallError, Shortage};
use crate::display::{Bytes, Count};

/// An error of an operation on memory. Unless it is [`Lost`](Self::Lost), nothing has changed.
///
/// Offsets and ranges count bytes from the beginning of the object that the operation works on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum MemoryError {
    /// An argument cannot be used.
    Argument(#[from] ArgumentError),
    /// The device does not support the operation, by one of its attributes.
    #[error("{device} does not support {what}")]
    NotSupported {
        /// The device.
        device: Location,
        /// The feature that it lacks.
        what: &'static str,
    },
    /// The driver refused a granule of memory that RDMA devices can reach. WSL2 does so though the
    /// device's attribute 110 says that there is such memory.
    #[error(
        "{device} has no memory that RDMA devices reach: {cause}; request it only where there is some"
    )]
    NoRdma {
        /// The device.
        device: Location,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// A device cannot access the memory (`cuDeviceCanAccessPeer`).
    #[error("{device} cannot access the memory of {place}")]
    Unreachable {
        /// The device that needs access.
        device: Location,
        /// The intended location of the memory.
        place: Location,
    },
    /// The granularity of a device is larger than that of the region's device.
    #[error(
        "memory of {place} has a granularity of {}, larger than the region's {}",
        Bytes(*.granularity), Bytes(*.home)
    )]
    Granularity {
        /// The device.
        place: Location,
        /// Its granularity in bytes.
        granularity: u64,
        /// The granularity of the region's device in bytes.
        home: u64,
    },
    /// The memory or the memory pool was not created for export as this handle type.
    #[error("{what} cannot be exported as {handle_type}: created shareable as {shareable}")]
    NotShareable {
        /// The object that was to be exported.
        what: &'static str,
        /// The requested type.
        handle_type: HandleTypes,
        /// The types that it was created for.
        shareable: HandleTypes,
    },
    /// The device may not read or write the mapping: it has no access, or only to read.
    #[error("{device} may not {wanted} the memory: grant access with `set_access` ({cause})")]
    NoAccess {
        /// The device.
        device: Location,
        /// The refused operation: `read` or `write`.
        wanted: &'static str,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// The access of this device cannot be changed so: it would be lowered, or it is the memory's
    /// own device, which always has access.
    #[error("the access of {0} cannot be changed: revoke it first, unless the memory is its own")]
    Access(Location),
    /// Part of this range has no memory.
    #[error("bytes {0:?} are not all committed: commit them first")]
    NotCommitted(Range<u64>),
    /// The range is in use, or the source and the destination of a copy overlap.
    #[error(
        "{} at offset {} overlaps the range in use at offset {}",
        Bytes(*.size), Bytes(*.offset), Bytes(*.taken)
    )]
    Overlap {
        /// The requested offset.
        offset: u64,
        /// The requested bytes.
        size: u64,
        /// The start of the range in use.
        taken: u64,
    },
    /// The range cuts the extent of these bytes, and the operation works on whole extents.
    #[error("the range cuts the extent of bytes {0:?}: use whole extents")]
    CutsExtent(Range<u64>),
    /// The memory is not at the location that the operation requires.
    #[error("the memory at offset {} is on {found}, not {wanted}", Bytes(*.offset))]
    Elsewhere {
        /// The offset in the range.
        offset: u64,
        /// The location of the memory.
        found: Location,
        /// The required location.
        wanted: Location,
    },
    /// Memory in this range is read-only: forks share it (it can be written after
    /// [unsharing](crate::Region::unshare)), or the process that shared it allows only reading.
    #[error("bytes {0:?} are read-only here: if forks share them, unshare them first")]
    ReadOnly(Range<u64>),
    /// The region maps some memory at two places, and the operation would make them differ.
    #[error("the region maps memory at two places: decommit one of them first")]
    Aliased,
    /// The extent of these bytes was exported, and another process that has imported it may go on
    /// using it.
    #[error("the extent of bytes {0:?} was exported: it cannot be moved or shared")]
    Exported(Range<u64>),
    /// Part of the range is [registered](crate::Region::register) and must not change.
    #[error("bytes of {range:?} are registered: end {} from byte {first} on", Count(*.registrations, "registration"))]
    Registered {
        /// The range that was to change.
        range: Range<u64>,
        /// The first byte of the first registration that overlaps it, in whole extents.
        first: u64,
        /// The number of registrations that overlap it.
        registrations: u64,
    },
    /// The range leaves the registered range.
    #[error("bytes {range:?} leave the registered bytes {registered:?}")]
    NotRegistered {
        /// The range.
        range: Range<u64>,
        /// The registered range.
        registered: Range<u64>,
    },
    /// Work of this device that may use the memory is running or queued.
    #[error("work of {0} that may use the memory is not complete: wait for it first")]
    InUse(Location),
    /// The driver panicked in a copy of contents. The copy counts as running until its stream is
    /// known to be idle.
    #[error("the driver panicked in a copy of contents: the copy may still be running")]
    CopyPanicked,
    /// Part of the range is pending free, or is backed with zeros, and work that may use it is not
    /// complete.
    #[doc(alias = "InLimbo")]
    #[error("{} of bytes {range:?} are pending free: wait for the work", Bytes(*.bytes))]
    PendingFree {
        /// The range.
        range: Range<u64>,
        /// Bytes of the pending frees that overlap the range.
        bytes: u64,
    },
    /// A physical could not be unmapped when an earlier call was rolled back; its range is
    /// quarantined until the owner is closed.
    #[error("{} of bytes {range:?} are quarantined until the owner is closed", Bytes(*.bytes))]
    Quarantined {
        /// The range.
        range: Range<u64>,
        /// The quarantined bytes of the range.
        bytes: u64,
    },
    /// The region would exceed its limit of mappings.
    #[error("cannot add {} to {held}: the limit is {limit}", Count(*.needed, "mapping"))]
    Mappings {
        /// Mappings needed.
        needed: u64,
        /// Mappings that the region has.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// The block of this size in bytes is asleep, falling asleep or waking. It must be woken before
    /// its memory is used.
    #[error("the block of {} is asleep or not yet awake: wake it first", Bytes(*.0))]
    Asleep(u64),
    /// The heap with this number of bytes of memory is asleep, falling asleep or waking. It must be
    /// woken before memory is allocated from it.
    #[error("the heap of {} is asleep or not yet awake: wake it first", Bytes(*.0))]
    HeapAsleep(u64),
    /// The paged cache with this number of bytes under its blocks in use is asleep, falling asleep or
    /// waking. It must be woken before its blocks are used.
    #[error("the paged cache of {} is asleep or not yet awake: wake it first", Bytes(*.0))]
    CacheAsleep(u64),
    /// This number of leases, registrations, tensors or slices use the block and may write to it.
    #[error("drop what keeps the block first: {}, counting registrations, tensors and slices", Count(*.0, "lease"))]
    Leased(u64),
    /// A capture is running, and the operation could break it.
    #[error("a capture is running, which the operation could break: end the capture first")]
    Capturing,
    /// The operation failed, and so did putting the old memory back, which is lost. This takes two
    /// failures of the driver.
    #[error("{cause}; the memory of bytes {ranges:?} could not be put back and is lost")]
    Lost {
        /// The ranges that have no memory any more.
        ranges: Vec<Range<u64>>,
        /// The first failure.
        #[source]
        cause: Box<Self>,
    },
    /// Memory could not be created or pinned.
    #[error("cannot create {} of memory on {location}: {cause}", Bytes(*.size))]
    Create {
        /// The requested bytes.
        size: u64,
        /// The requested location.
        location: Location,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// A device has too little memory for an operation of a region in no tenant. The
    /// [figures](Self::shortage) say how much the operation needed in all, how much the device had
    /// free afterwards, and how much the region holds.
    #[error("no memory: {}: {cause}", .shortage.summary())]
    OutOfMemory {
        /// The driver's answer.
        #[source]
        cause: CallError,
        /// The figures.
        shortage: Box<Shortage>,
    },
    /// A memory pool of the driver could not be created.
    #[error("cannot create a memory pool of {location}: {cause}")]
    CreatePool {
        /// The requested location.
        location: Location,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// A memory pool other than the default one is the current one of this device. Its owner could
    /// destroy it before it is set again.
    #[error(
        "the current memory pool of {0} is not the default: drop the guard, or replace it there"
    )]
    CurrentPool(Location),
    /// The memory pool is part of a [`TenantMemPool`](crate::TenantMemPool), which alone allocates
    /// from it, makes it current, and replaces it.
    #[error("the memory pool is a tenant's: allocate from its `TenantMemPool`")]
    ManagedPool,
    /// The system, or a control group of the process, has too little host memory. A part of what it
    /// has is left to others.
    #[error(
        "cannot take {} of host memory: {} are available to this process",
        Bytes(*.wanted), Bytes(*.available)
    )]
    HostOutOfMemory {
        /// The bytes that were still wanted.
        wanted: u64,
        /// The bytes that are available.
        available: u64,
    },
    /// Memory could not be exported.
    #[error(
        "cannot export as {handle_type}: {cause}; create it shareable as this type \
         (`shareable` of the builder); imported memory cannot be exported"
    )]
    Export {
        /// The requested type.
        handle_type: HandleTypes,
        /// The driver's answer. `CUDA_ERROR_INVALID_VALUE` means that the memory was not created
        /// for this type, or was imported itself.
        #[source]
        cause: CallError,
    },
    /// A memory pool of another process could not be imported.
    #[error("cannot import the memory pool (not a handle of one, or its process has ended): {0}")]
    ImportPool(#[source] CallError),
    /// An allocation of another process's memory pool could not be imported.
    #[error("cannot import the allocation (of another pool, freed, or still in use): {0}")]
    ImportPointer(#[source] CallError),
    /// The memory at this address was not allocated from the memory pool.
    #[error("the memory at {0:#x} was not allocated from this memory pool")]
    NotOfPool(u64),
    /// The process that gave the memory has ended, or has given it up.
    #[error("the process that gave the memory has ended, or has given it up: drop the memory")]
    GiverGone,
    /// A driver call for a range failed; the error names the call.
    #[error("{} at offset {}: {cause}", Bytes(*.size), Bytes(*.offset))]
    Range {
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        size: u64,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// The operation, or the property of memory, is not possible for a region in a tenant.
    #[error("{0} is not possible in a tenant: reserve the region on the device instead")]
    InTenant(&'static str),
    /// The pool of the region's tenant refused memory, mappings or addresses.
    Pool(Box<BlockError>),
    /// A driver call failed.
    Call(#[from] CallError),
}

impl From<BlockError> for MemoryError {
    fn from(error: BlockError) -> Self {
        match error {
            BlockError::Argument(error) => Self::Argument(error),
            BlockError::Memory(error) => error,
            error => Self::Pool(Box::new(error)),
        }
    }
}

impl MemoryError {
    pub(crate) const fn range(offset: u64, size: u64, cause: CallError) -> Self {
        Self::Range {
            offset,
            size,
            cause,
        }
    }

    /// The error for a device without memory that RDMA devices can reach.
    pub(crate) const fn no_rdma(device: Location) -> Self {
        let what = "memory that RDMA devices reach (attribute 110)";
        Self::NotSupported { device, what }
    }
}

/// An error of allocating, growing, shrinking, forking, freeing or moving a block.
///
/// Unless it is [`Lost`](Self::Lost), every block, charge and guarantee is unchanged. Unused memory
/// may have been reclaimed. A compaction keeps the moves made before the error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum BlockError {
    /// An argument cannot be used: a size above the capacity or below the block's size, a capacity
    /// of zero, a stream of another device.
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
        "{} at offset {} are shared with {} and in use here: wait for the work \
         that reads them, and drop the leases",
        Bytes(*.bytes), Bytes(*.offset), Count(*.others, "other block")
    )]
    SharedInUse {
        /// The offset in the block.
        offset: u64,
        /// The number of bytes.
        bytes: u64,
        /// The number of other blocks that share the first of them.
        others: usize,
    },
    /// The place in a row of blocks is not free: a block is there, or a lease or work that is not
    /// complete keeps the memory of the last block there.
    #[error(
        "the place at distance {distance} from the block has {}",
        if *.occupied { "a block: drop it first" } else { "memory in use: wait for the work, and drop the leases" }
    )]
    PlaceInUse {
        /// The number of places from the given block on.
        distance: isize,
        /// `true` if a block is there.
        occupied: bool,
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
            Self::PlaceInUse { occupied, .. } => !occupied,
            Self::Refused { cause, .. } => cause.is_shortage(),
            Self::Lost { .. } | Self::Memory(_) => false,
            other => other.is_out_of_memory(),
        }
    }
}
