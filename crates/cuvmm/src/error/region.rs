//! Errors of regions.

use std::ops::Range;

use cuvmm_driver::{HandleTypes, Location};

use super::{
    AccessError, CallError, CopyError, CreateError, ExportError, MapError, RangeError,
    StillRegistered,
};

/// Why a mapper could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartMapperError {
    /// The device has a mapper already: a second thread would gain nothing.
    #[error("the device has a mapper already")]
    Running,
    /// The system gives no thread.
    #[error("the system gives no thread for the mapper")]
    Thread(#[source] std::io::Error),
    /// The process is a forked child of the one that opened the device.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why addresses could not be reserved.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The size is zero.
    #[error("a reservation of zero bytes")]
    ZeroSize,
    /// The size is not a whole number of granules.
    #[error("a reservation of {size} bytes is not a multiple of the granularity, {granularity}")]
    Misaligned {
        /// Bytes asked for.
        size: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// The size does not fit 64 bits once rounded.
    #[error("a reservation of {size} bytes does not fit the address space")]
    TooLarge {
        /// Bytes asked for.
        size: u64,
    },
    /// The memory cannot be laid out so.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A device could not be let in.
    #[error(transparent)]
    Grant(Box<GrantError>),
    /// The alignment is not a power of two.
    #[error("an alignment of {alignment} bytes is not a power of two")]
    OddAlignment {
        /// Bytes asked for.
        alignment: u64,
    },
    /// The driver refused.
    #[error("reserving {size} bytes of addresses: {cause}")]
    Call {
        /// Bytes asked for.
        size: u64,
        /// Its answer.
        #[source]
        cause: CallError,
    },
}

/// Why a region cannot be laid out so.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// No place was named.
    #[error("the layout names no place")]
    NoPlace,
    /// A stripe or share is not a whole number of granules, or none at all.
    #[error("{bytes} bytes are not a multiple of the granularity, {granularity}")]
    Misaligned {
        /// Bytes asked for.
        bytes: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// A device belongs to another driver.
    #[error("{place} belongs to another driver")]
    WrongDriver {
        /// The device.
        place: Location,
    },
    /// Memory of the device comes in larger granules.
    #[error("memory of {place} comes in granules of {granularity} bytes, the region's are {home}")]
    Granularity {
        /// The device.
        place: Location,
        /// Its granule in bytes.
        granularity: u64,
        /// That of the region's device.
        home: u64,
    },
    /// Memory that RDMA devices reach was asked for, and the device has none (attribute 110).
    #[error("memory of {place} cannot be made reachable for RDMA")]
    NoRdma {
        /// The device.
        place: Location,
    },
    /// A device cannot reach the memory (`cuDeviceCanAccessPeer` says so).
    #[error("{device} cannot reach the memory of {place}")]
    Unreachable {
        /// The device that needs access.
        device: Location,
        /// Where the memory was to lie.
        place: Location,
    },
    /// The driver did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why a device's access could not be changed. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// The device belongs to another driver.
    #[error("the device belongs to another driver than the region")]
    WrongDriver,
    /// The region's own device always has access.
    #[error("the region's own device has access to it for life")]
    OwnDevice,
    /// It would take something from the device: that is revoking.
    #[error("the device has more access already, or none was asked for: revoke that first")]
    Lowers,
    /// Work of the device is running or queued, and may use the memory.
    #[error("work of {device} that may use the memory has not passed")]
    InUse {
        /// The device.
        device: Location,
    },
    /// The device cannot reach memory of the region.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The rights could not be set.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Others have registered part of it.
    #[error(transparent)]
    Registered(#[from] StillRegistered),
}

/// Why other memory could not be put under the same addresses.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplaceError {
    /// Addresses to copy through could not be had.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// Memory could not be placed.
    #[error(transparent)]
    Place(CommitError),
    /// The bytes could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// It failed, and so did putting the old memory back: what was there is lost.
    #[error("{cause}; and what was at {ranges:?} could not be put back")]
    Lost {
        /// Offsets that have no memory any more.
        ranges: Vec<Range<u64>>,
        /// What failed first.
        #[source]
        cause: Box<Self>,
    },
}

/// Why memory could not be moved to another place. It lies where it did, unless the error says that
/// it is lost.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelocateError {
    /// The range is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Part of the range is not committed.
    #[error("the range {start}..{end} is not all committed")]
    NotCommitted {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The range holds a part of an extent only; extents move whole.
    #[error("the range cuts the extent of {size} bytes at offset {offset}")]
    CutsExtent {
        /// Where the extent begins.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// The region shows memory at two places; moved, they would show different memory.
    #[error("the region shows memory at two places")]
    Aliased,
    /// Part of the range was exported; whoever imported it would keep what the region leaves.
    #[error("the extent of {size} bytes at offset {offset} was exported, and stays where it is")]
    Exported {
        /// Where the extent begins.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// The stream belongs to another device.
    #[error("the stream belongs to another device than the region")]
    WrongDevice,
    /// The place cannot be had or reached.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Memory there could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// It could not be put in place.
    #[error(transparent)]
    Replace(#[from] ReplaceError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Others have registered part of it.
    #[error(transparent)]
    Registered(#[from] StillRegistered),
}

/// Why memory could not be shown a second time. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AliasError {
    /// A range is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Part of the range is not committed.
    #[error("the range {start}..{end} is not all committed")]
    NotCommitted {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The range holds a part of an extent only; extents are mapped whole.
    #[error("the range cuts the extent of {size} bytes at offset {offset}")]
    CutsExtent {
        /// Where the extent begins.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// A fork has part of the range too: it has to be unshared first.
    #[error("the range {start}..{end} is shared with a fork, and read-only")]
    ReadOnly {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// Something is at the second place already.
    #[error("something lies at offset {taken} of the second place, {start}..{end}")]
    Taken {
        /// First byte of the second place.
        start: u64,
        /// One past its last byte.
        end: u64,
        /// Where what lies there begins.
        taken: u64,
    },
    /// The memory could not be placed.
    #[error(transparent)]
    Place(#[from] CommitError),
}

/// Why a range of a region could not be exported. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportRegionError {
    /// The range is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Part of the range is not committed.
    #[error("the range {start}..{end} is not all committed")]
    NotCommitted {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The range holds a part of an extent only; extents are exported whole.
    #[error("the range cuts the extent of {size} bytes at offset {offset}")]
    CutsExtent {
        /// Where the extent begins.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// A fork has part of the range too, and whoever imported it could write to that: it has to
    /// be unshared first.
    #[error("the range {start}..{end} is shared with a fork, and read-only")]
    ReadOnly {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The region's memory was not made to be exported so.
    #[error("the region's memory is shareable as {shareable:?}, not as {handle_type:?}")]
    NotShareable {
        /// The type asked for.
        handle_type: HandleTypes,
        /// The types that the region was built for.
        shareable: HandleTypes,
    },
    /// An extent could not be exported.
    #[error(transparent)]
    Export(#[from] ExportError),
}

/// Why a region could not be forked. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForkError {
    /// Some memory is shown twice in the region; a fork could not keep that.
    #[error("the region shows memory at two places")]
    Aliased,
    /// Some memory was exported; whoever imported it could write to what the fork shows.
    #[error(
        "the extent of {size} bytes at offset {offset} was exported, and whoever imported it can \
         write to it"
    )]
    Exported {
        /// Where the extent begins.
        offset: u64,
        /// Its size.
        size: u64,
    },
    /// A stream belongs to a device without access.
    #[error("a stream belongs to a device without access")]
    WrongDevice,
    /// Work that may write to the region is running or queued.
    #[error("work that may write to the region has not passed")]
    InUse,
    /// Addresses could not be reserved.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The memory could not be placed.
    #[error(transparent)]
    Place(#[from] CommitError),
    /// Rights could not be set.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Others have registered part of it.
    #[error(transparent)]
    Registered(#[from] StillRegistered),
}

/// Why a range could not be made a region's own. It is shared still, unless the error says that it
/// is lost.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnshareError {
    /// The range is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Part of the range is not committed.
    #[error("the range {start}..{end} is not all committed")]
    NotCommitted {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A stream belongs to a device without access.
    #[error("a stream belongs to a device without access")]
    WrongDevice,
    /// There is no memory for a copy.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The copy could not be put in place.
    #[error(transparent)]
    Replace(#[from] ReplaceError),
    /// Rights could not be set.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// Others have registered part of it.
    #[error(transparent)]
    Registered(#[from] StillRegistered),
}

/// Why memory could not be committed. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// The range is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// A physical could not be taken back when an earlier call was undone; its place is quarantined
    /// until the region is closed.
    #[error("the range {start}..{end} holds {bytes} quarantined bytes")]
    Quarantined {
        /// First byte of the range asked for.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Bytes of it that are quarantined.
        bytes: u64,
    },
    /// The place cannot be had or reached.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A stream named as user of the range belongs to a device without access.
    #[error("a stream named as user of the range belongs to a device without access")]
    WrongDevice,
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
    /// Zeros under the range may still be read by work that is running or queued.
    #[error("zeros under the range {start}..{end} may still be read")]
    ZerosInUse {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// Part of the range is pending free, and work that may use it has not passed.
    #[doc(alias = "InLimbo")]
    #[error("{bytes} bytes of the range {start}..{end} are pending free")]
    PendingFree {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Bytes of extents pending free that meet it.
        bytes: u64,
    },
    /// Part of an extent was withdrawn and cannot be revived: a fork or an alias shows the extent too,
    /// or it may only be read.
    #[error(
        "the extent of {size} bytes at {offset} is shared or read-only, and part of it is committed still: unshare it, or decommit all of it"
    )]
    Shared {
        /// Where in the region the extent begins.
        offset: u64,
        /// Its size in bytes.
        size: u64,
    },
    /// Physical memory could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A physical could not be mapped.
    #[error(transparent)]
    Map(#[from] MapError),
    /// Access could not be given.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A driver call failed.
    #[error("committing {size} bytes at offset {offset}: {cause}")]
    Call {
        /// Where the extent was to be.
        offset: u64,
        /// Its size.
        size: u64,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
}

impl CommitError {
    /// The call that failed, where one did.
    #[must_use]
    pub const fn call(&self) -> Option<&CallError> {
        match self {
            Self::Create(CreateError::Call { cause, .. })
            | Self::Map(MapError::Call { cause, .. })
            | Self::Call { cause, .. } => Some(cause),
            _ => None,
        }
    }
}

/// Why memory could not be decommitted. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecommitError {
    /// The range is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// Part of the range is not committed.
    #[error("the range {start}..{end} is not all committed")]
    NotCommitted {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A stream belongs to a device without access.
    #[error("a stream named as user of the range belongs to a device without access")]
    WrongDevice,
    /// Others have registered part of it.
    #[error(transparent)]
    Registered(#[from] StillRegistered),
}
