//! Errors of regions.

use super::{AccessError, CallError, CreateError, MapError};

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
}

/// What is wrong with a range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RangeError {
    /// The range is empty or runs backwards.
    #[error("the range {start}..{end} is empty")]
    Empty {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// An end is not a whole number of granules.
    #[error("the range {start}..{end} is not made of whole granules of {granularity} bytes")]
    Misaligned {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// The granule in bytes.
        granularity: u64,
    },
    /// The range leaves the region.
    #[error("the range {start}..{end} leaves the region of {bytes} bytes")]
    OutOfRange {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// The region's size.
        bytes: u64,
    },
}

/// Why memory could not be committed. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// The range is wrong.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// A piece could not be taken back when an earlier call was undone; its place is quarantined
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
    /// A stream belongs to another device.
    #[error("a stream named as user of the range belongs to another device")]
    WrongDevice,
}
