//! Errors of vectors.

use std::ops::Range;

use super::{CallError, CommitError, CopyError, DecommitError, RegisterRangeError, ReserveError};

/// Why an operation on a vector failed. Its length and its elements are as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VecError {
    /// Elements without a size have no place on a device.
    #[error("the elements have no size")]
    ZeroSizedElements,
    /// So many elements have more bytes than can be counted.
    #[error("{elements} elements have too many bytes")]
    TooLarge {
        /// How many elements.
        elements: usize,
    },
    /// More elements than addresses were reserved for.
    #[error(
        "{additional} elements more than {len} are more than the {most} there are addresses for"
    )]
    OverReserved {
        /// Elements there are.
        len: usize,
        /// Elements to be added.
        additional: usize,
        /// Elements there can be.
        most: usize,
    },
    /// More elements than there is memory for.
    #[error(
        "{additional} elements more than {len} are more than the {capacity} there is memory for"
    )]
    OverCapacity {
        /// Elements there are.
        len: usize,
        /// Elements to be added.
        additional: usize,
        /// Elements there is memory for.
        capacity: usize,
    },
    /// Some of the elements are not there.
    #[error("elements {range:?} of {len}")]
    OutOfRange {
        /// Which were asked for.
        range: Range<usize>,
        /// Elements there are.
        len: usize,
    },
    /// The region has memory already.
    #[error("the region holds {held} bytes already, and a vector begins with none")]
    RegionInUse {
        /// Bytes that it holds.
        held: u64,
    },
    /// The stream belongs to another device.
    #[error("the stream belongs to another device")]
    WrongDevice,
    /// Addresses could not be reserved.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// Memory could not be committed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Memory could not be given up.
    #[error(transparent)]
    Decommit(#[from] DecommitError),
    /// Memory could not be registered.
    #[error(transparent)]
    RegisterRange(#[from] RegisterRangeError),
    /// Elements could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}
