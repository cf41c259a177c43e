//! Errors of the owners: devices, reservations, physicals, mappings, copies.

use cuvmm_driver::{HandleTypes, Location, Ordinal};

use super::CallError;

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no such device.
    #[error("there is no device {ordinal}; the driver has {count}")]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: u32,
        /// How many devices there are.
        count: i32,
    },
    /// The device has no virtual memory management (attribute 102 says so).
    #[error("device {ordinal} ({name}) has no virtual memory management")]
    NoVirtualMemory {
        /// The ordinal asked for.
        ordinal: u32,
        /// The device's name.
        name: String,
    },
    /// The driver's granularity is not a power of two, which nothing here can work with.
    #[error(
        "device {ordinal} reports an allocation granularity of {granularity} bytes, which is not a power of two"
    )]
    OddGranularity {
        /// The ordinal asked for.
        ordinal: u32,
        /// What the driver reported.
        granularity: u64,
    },
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why physical memory could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The size is zero.
    #[error("a physical of zero bytes")]
    ZeroSize,
    /// The size is not a whole number of granules.
    #[error("a physical of {size} bytes is not a multiple of the granularity, {granularity}")]
    Misaligned {
        /// Bytes asked for.
        size: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// The NUMA node is negative.
    #[error("there is no NUMA node {node}")]
    NoSuchNode {
        /// The node asked for.
        node: i32,
    },
    /// A handle type that this library does not know.
    #[error("handle types {bits:#x} are not known")]
    UnknownHandleType {
        /// The bits asked for.
        bits: u32,
    },
    /// A handle type that only Windows has.
    #[error("handle types {bits:#x} are of Windows, and there are none here")]
    WindowsOnly {
        /// The bits asked for.
        bits: u32,
    },
    /// The device's memory cannot be made reachable for RDMA (attribute 110 says so).
    #[error("memory of {location} cannot be made reachable for RDMA")]
    NoRdma {
        /// The device.
        location: Location,
    },
    /// The driver refused.
    #[error("creating {size} bytes of physical memory at {location}: {cause}")]
    Call {
        /// Bytes asked for.
        size: u64,
        /// Where.
        location: Location,
        /// Its answer.
        #[source]
        cause: CallError,
    },
}

/// Why physical memory could not be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// Not one of the handle types that there are.
    #[error("handle types {bits:#x} are not one type: a descriptor or a fabric handle")]
    NotOneType {
        /// The bits asked for.
        bits: u32,
    },
    /// A handle type that only Windows has.
    #[error("handle types {bits:#x} are of Windows, and there are none here")]
    WindowsOnly {
        /// The bits asked for.
        bits: u32,
    },
    /// The driver refused. `CUDA_ERROR_INVALID_VALUE` says that the memory was not made to be
    /// shared so, or was imported itself.
    #[error(
        "exporting as {handle_type:?}: {cause}; memory is exportable only if it was created \
         shareable, and not where it was imported"
    )]
    Call {
        /// The type asked for.
        handle_type: HandleTypes,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
}

/// Why memory of another process could not be imported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The size is zero or not a whole number of granules.
    #[error("an import of {size} bytes is not a multiple of the granularity, {granularity}")]
    Misaligned {
        /// Bytes it was said to have.
        size: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// A kind of handle that this library does not know.
    #[error("the handle is of a kind that is not known here")]
    UnknownHandle,
    /// The memory lies on another device than it is imported for.
    #[error("the memory lies on {location}, not on {device}")]
    WrongDevice {
        /// Where it lies.
        location: Location,
        /// The device named.
        device: Location,
    },
    /// The driver refused. `CUDA_ERROR_UNKNOWN` says that the descriptor is no memory.
    #[error("importing memory: {0}")]
    Call(#[source] CallError),
}

/// Why memory cannot be exported as a handle type.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// The driver does not create such memory.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// The driver does not export it.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The driver did not answer.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl ProbeError {
    /// The call that failed, where one did.
    #[must_use]
    pub const fn call(&self) -> Option<&CallError> {
        match self {
            Self::Create(CreateError::Call { cause, .. })
            | Self::Export(ExportError::Call { cause, .. })
            | Self::Call(cause) => Some(cause),
            _ => None,
        }
    }
}

/// Why managed memory could not be allocated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocateManagedError {
    /// The size is zero.
    #[error("managed memory of zero bytes")]
    ZeroSize,
    /// The device has no managed memory (attribute 83 says so).
    #[error("{device} has no managed memory")]
    NotSupported {
        /// The device.
        device: Ordinal,
    },
    /// The driver refused.
    #[error("allocating {size} bytes of managed memory: {cause}")]
    Call {
        /// Bytes asked for.
        size: u64,
        /// Its answer.
        #[source]
        cause: CallError,
    },
}

/// Why a physical could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The physical came from another driver than the reservation.
    #[error("the physical belongs to another driver than the reservation")]
    WrongDriver,
    /// The offset is not a whole number of granules.
    #[error("offset {offset} is not a multiple of the granularity, {granularity}")]
    Misaligned {
        /// The offset asked for.
        offset: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// The physical does not fit behind the offset.
    #[error("{size} bytes at offset {offset} do not fit a reservation of {reserved} bytes")]
    OutOfRange {
        /// The offset asked for.
        offset: u64,
        /// The physical's size.
        size: u64,
        /// The reservation's size.
        reserved: u64,
    },
    /// Something is mapped there already.
    #[error("{size} bytes at offset {offset} overlap the mapping at offset {taken}")]
    Overlap {
        /// The offset asked for.
        offset: u64,
        /// The physical's size.
        size: u64,
        /// Where the mapping in the way begins.
        taken: u64,
    },
    /// The driver refused.
    #[error("mapping {size} bytes at offset {offset}: {cause}")]
    Call {
        /// The offset asked for.
        offset: u64,
        /// The physical's size.
        size: u64,
        /// Its answer.
        #[source]
        cause: CallError,
    },
}

/// Why access could not be set or asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// Nobody was named.
    #[error("no location was named to give access to")]
    Nobody,
    /// A device of another driver was named.
    #[error("{location} belongs to another driver than the mapping")]
    WrongDriver {
        /// Who was named.
        location: Location,
    },
    /// The driver refused.
    #[error("access to {size} bytes: {cause}")]
    Call {
        /// The mapping's size.
        size: u64,
        /// Its answer.
        #[source]
        cause: CallError,
    },
}

/// Why the physical behind an offset could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RetainError {
    /// Nothing is mapped there.
    #[error("nothing is mapped at offset {offset}")]
    NotMapped {
        /// The offset asked for.
        offset: u64,
    },
    /// The driver refused.
    #[error("the physical at offset {offset}: {cause}")]
    Call {
        /// The offset asked for.
        offset: u64,
        /// Its answer.
        #[source]
        cause: CallError,
    },
}

/// Why bytes could not be copied or filled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The range leaves the memory.
    #[error("{size} bytes at offset {offset} leave the {bytes} bytes there are")]
    OutOfRange {
        /// The offset asked for.
        offset: u64,
        /// Bytes asked for.
        size: u64,
        /// Bytes there are.
        bytes: u64,
    },
    /// Part of the range has no memory behind it.
    #[error("{size} bytes at offset {offset} are not all committed")]
    NotCommitted {
        /// The offset asked for.
        offset: u64,
        /// Bytes asked for.
        size: u64,
    },
    /// Source and destination overlap.
    #[error("{size} bytes at offset {offset} overlap where they are to go, at offset {to}")]
    Overlap {
        /// Where they are copied from.
        offset: u64,
        /// Where they are copied to.
        to: u64,
        /// How many.
        size: u64,
    },
    /// The memory lies on a device, where the host's processors do not reach it.
    #[error("what is at offset {offset} lies on {location}")]
    NotOnHost {
        /// Where the extent begins.
        offset: u64,
        /// Where its memory lies.
        location: Location,
    },
    /// The memory may only be read.
    #[error("the memory may only be read")]
    ReadOnly,
    /// The block sleeps, and has no memory.
    #[error("the block sleeps")]
    Asleep,
    /// The stream belongs to another device.
    #[error("the stream belongs to another device than the memory")]
    WrongDevice,
    /// A capture guard lives, and waiting for the copy could break the capture.
    #[error("a capture is running on this pool: a copy that waits could break it")]
    Capturing,
    /// The driver refused.
    #[error("copying {size} bytes at offset {offset}: {cause}")]
    Call {
        /// The offset asked for.
        offset: u64,
        /// Bytes asked for.
        size: u64,
        /// Its answer.
        #[source]
        cause: CallError,
    },
}
