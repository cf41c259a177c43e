//! Errors of memory itself: reservations, physicals, mappings, managed memory, regions, copies.

use std::ops::Range;

use cuvmm_driver::{HandleTypes, Location};

use super::{ArgumentError, CallError};

/// Why an operation on memory failed. Unless it is [`Lost`](Self::Lost), nothing has changed.
///
/// Reservations, physicals, mappings, managed memory, regions and copies all answer with it. Offsets
/// and ranges count bytes from the beginning of what the operation works on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A value that was given cannot be meant.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// The device cannot do it: an attribute of the device says so.
    #[error("{device} has no {what}")]
    NotSupported {
        /// The device.
        device: Location,
        /// What it lacks.
        what: &'static str,
    },
    /// A device cannot reach the memory (`cuDeviceCanAccessPeer` says so).
    #[error("{device} cannot reach the memory of {place}")]
    Unreachable {
        /// The device that needs access.
        device: Location,
        /// Where the memory was to lie.
        place: Location,
    },
    /// Memory of the device comes in larger granules than the region's device has.
    #[error("memory of {place} comes in granules of {granularity} bytes, the region's are {home}")]
    Granularity {
        /// The device.
        place: Location,
        /// Its granule in bytes.
        granularity: u64,
        /// That of the region's device.
        home: u64,
    },
    /// The memory was not made to be exported as such a handle.
    #[error("the memory is shareable as {shareable:?}, not as {handle_type:?}")]
    NotShareable {
        /// The type asked for.
        handle_type: HandleTypes,
        /// The types that the memory was made for.
        shareable: HandleTypes,
    },
    /// Access was asked for that would take something from a device, or that is given for life: the
    /// device of the memory itself always has access.
    #[error("{device} has more access already, or has it for life")]
    Access {
        /// The device.
        device: Location,
    },
    /// Part of the range has no memory.
    #[error("bytes {start}..{end} are not all committed")]
    NotCommitted {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// Something lies there already, or the source and the destination of a copy overlap.
    #[error("{size} bytes at offset {offset} overlap what is at offset {taken}")]
    Overlap {
        /// The offset asked for.
        offset: u64,
        /// Bytes asked for.
        size: u64,
        /// Where what is in the way begins.
        taken: u64,
    },
    /// The range holds a part of an extent only, and the operation works on whole extents.
    #[error("the range cuts the extent of {size} bytes at offset {offset}")]
    CutsExtent {
        /// Where the extent begins.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// The memory does not lie where the operation needs it.
    #[error("what is at offset {offset} lies on {found}, and is needed on {wanted}")]
    Elsewhere {
        /// Where in the range.
        offset: u64,
        /// Where the memory lies.
        found: Location,
        /// Where it is needed.
        wanted: Location,
    },
    /// The memory is only to be read: forks share it (it is written after
    /// [unsharing](crate::Region::unshare) it), or the process that gave it lets others only read.
    #[error("bytes {start}..{end} are only to be read here")]
    ReadOnly {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The region shows some memory at two places, and the operation would make them differ.
    #[error("the region shows memory at two places")]
    Aliased,
    /// An extent was exported, and another process that has imported it goes on using it.
    #[error("the extent of {size} bytes at offset {offset} was exported")]
    Exported {
        /// Where the extent begins.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// Others have [registered](crate::Region::register) part of the range, and it stays as it is.
    #[error("{registrations} registrations keep part of {start}..{end}, the first from {first} on")]
    Registered {
        /// First byte of what was to change.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// First byte of the first registration that meets it, in whole extents.
        first: u64,
        /// How many registrations meet it.
        registrations: u64,
    },
    /// The range leaves what is registered.
    #[error("bytes {start}..{end} leave what is registered, {registered_start}..{registered_end}")]
    NotRegistered {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// First byte that is registered.
        registered_start: u64,
        /// One past the last.
        registered_end: u64,
    },
    /// Work of a device that may use the memory is running or queued.
    #[error("work of {device} that may use the memory has not passed")]
    InUse {
        /// The device.
        device: Location,
    },
    /// Part of the range is pending free, or shows zeros, and work that may use that has not passed.
    #[doc(alias = "InLimbo")]
    #[error("{bytes} bytes of {start}..{end} are pending free")]
    PendingFree {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Bytes of what is pending free and meets the range.
        bytes: u64,
    },
    /// A physical could not be taken back when an earlier call was undone; its place is quarantined
    /// until the region is closed.
    #[error("{bytes} bytes of {start}..{end} are quarantined")]
    Quarantined {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Bytes of it that are quarantined.
        bytes: u64,
    },
    /// The region would have more mappings than it may.
    #[error("{needed} mappings more than {held} are more than the limit of {limit}")]
    Mappings {
        /// Mappings asked for.
        needed: u64,
        /// Mappings there are.
        held: u64,
        /// Mappings there may be.
        limit: u64,
    },
    /// The block sleeps, or is being put to sleep or woken: wake it before its memory is used.
    #[error("the block of {size} bytes sleeps, or is being put to sleep or woken: wake it first")]
    Asleep {
        /// The block's size.
        size: u64,
    },
    /// Leases, registrations, tensors or slices use the block, and may write to it.
    #[error("{leases} leases keep the block, which registrations, tensors and slices hold too")]
    Leased {
        /// How many leases live.
        leases: u64,
    },
    /// A capture is running, and the operation could break it.
    #[error("a capture is running: waiting for work could break it")]
    Capturing,
    /// The operation failed, and so did putting the old memory back: what was there is lost. It takes
    /// two failures of the driver.
    #[error("{cause}; and what was at {ranges:?} could not be put back")]
    Lost {
        /// Offsets that have no memory any more.
        ranges: Vec<Range<u64>>,
        /// What failed first.
        #[source]
        cause: Box<Self>,
    },
    /// Memory could not be created, or not be pinned.
    #[error("creating {size} bytes of memory at {location}: {cause}")]
    Create {
        /// Bytes asked for.
        size: u64,
        /// Where.
        location: Location,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// The system does not give so much ordinary memory.
    #[error("the system does not give {size} bytes of memory")]
    HostOutOfMemory {
        /// Bytes asked for.
        size: u64,
    },
    /// Memory could not be exported.
    #[error(
        "exporting as {handle_type:?}: {cause}; memory is exportable only if it was created \
         shareable, and not where it was imported"
    )]
    Export {
        /// The type asked for.
        handle_type: HandleTypes,
        /// The driver's answer. `CUDA_ERROR_INVALID_VALUE` says that the memory was not made to be
        /// shared so, or was imported itself.
        #[source]
        cause: CallError,
    },
    /// A driver call for a range failed; the error names the call.
    #[error("{size} bytes at offset {offset}: {cause}")]
    Range {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        size: u64,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl MemoryError {
    /// The driver's answer to a call for a range.
    pub(crate) const fn range(offset: u64, size: u64, cause: CallError) -> Self {
        Self::Range {
            offset,
            size,
            cause,
        }
    }

    /// A device without memory that RDMA devices reach.
    pub(crate) const fn no_rdma(device: Location) -> Self {
        let what = "memory that RDMA devices reach (attribute 110)";
        Self::NotSupported { device, what }
    }

    /// Memory that is not all there.
    pub(crate) const fn not_committed(range: &Range<u64>) -> Self {
        Self::NotCommitted {
            start: range.start,
            end: range.end,
        }
    }

    /// Memory that is only to be read.
    pub(crate) const fn read_only(range: &Range<u64>) -> Self {
        Self::ReadOnly {
            start: range.start,
            end: range.end,
        }
    }
}
