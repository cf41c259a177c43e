//! Errors of memory that others have registered.

use cuvmm_driver::Location;

use super::{BlockRefusal, CallError, RangeError};

/// A range that cannot change, because others have registered part of it. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the range {start}..{end} cannot change: {registrations} registrations keep part of it, \
     the first of them {registered_start}..{registered_end}"
)]
#[non_exhaustive]
pub struct StillRegistered {
    /// First byte of what was to change.
    pub start: u64,
    /// One past its last byte.
    pub end: u64,
    /// First byte of the first registration that meets it, in whole extents.
    pub registered_start: u64,
    /// One past that one's last byte.
    pub registered_end: u64,
    /// How many registrations meet it.
    pub registrations: u64,
}

/// Why a range could not be registered. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterRangeError {
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
    /// The context is lost, or this is a forked child.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why there is no dma-buf of a range. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DmaBufError {
    /// The range is empty or runs backwards.
    #[error("the range {start}..{end} is empty")]
    Empty {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// An end is not a whole number of the host's pages.
    #[error("the range {start}..{end} is not made of whole pages of {page} bytes")]
    Misaligned {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// A page of the host in bytes.
        page: u64,
    },
    /// The range leaves what is registered.
    #[error(
        "the range {start}..{end} leaves what is registered, {registered_start}..{registered_end}"
    )]
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
    /// A fork of the region shares part of the range, or did when it was registered: a device
    /// that has the dma-buf could write to it.
    #[error(
        "the range {start}..{end} is shared with a fork and only to be read: unshare it, and \
         register it again"
    )]
    ReadOnly {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
    },
    /// The block shares memory with forks: a device that has the dma-buf could write to it.
    #[error(transparent)]
    Refused(#[from] BlockRefusal),
    /// Memory of several places is in the range; a dma-buf is of one device.
    #[error(
        "the range {start}..{end} begins in memory of {first} and goes on, at offset {offset}, in memory of {other}"
    )]
    SeveralPlaces {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Where the first extent lies.
        first: Location,
        /// Where the first extent of another place begins.
        offset: u64,
        /// That place.
        other: Location,
    },
    /// The driver refused: the device may have no dma-buf (attribute 124), or none of such memory.
    #[error("a dma-buf of the range {start}..{end}: {cause}")]
    Call {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Its answer.
        #[source]
        cause: CallError,
    },
}
