//! Errors of sparse arrays.

use std::ops::Range;

use super::{CallError, CommitError, CopyError, DecommitError, ReserveError};

/// Why an operation on a sparse array failed. Its tiles and their elements are as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SparseError {
    /// Elements without a size have no place on a device.
    #[error("the elements have no size")]
    ZeroSizedElements,
    /// So many elements have more bytes than can be counted.
    #[error("{elements} elements have too many bytes")]
    TooLarge {
        /// How many elements.
        elements: usize,
    },
    /// No tile of at least that size holds whole elements and whole granules.
    #[error("there is no tile of {tile} bytes or a little more for elements of {element} bytes")]
    OddTile {
        /// Bytes asked for.
        tile: u64,
        /// An element's size in bytes.
        element: usize,
    },
    /// The range leaves the array or is empty where it may not be.
    #[error("elements {range:?} of {len}")]
    OutOfRange {
        /// Which were asked for.
        range: Range<usize>,
        /// Elements there are addresses for.
        len: usize,
    },
    /// Some of the elements have no memory.
    #[error("of elements {range:?}, those from {first} on have no memory")]
    Uncommitted {
        /// Which were asked for.
        range: Range<usize>,
        /// The first that has none.
        first: usize,
    },
    /// The stream belongs to another device.
    #[error("the stream belongs to another device")]
    WrongDevice,
    /// Addresses could not be reserved.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// Memory could not be committed, or holes not be backed.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// Memory could not be decommitted.
    #[error(transparent)]
    Decommit(#[from] DecommitError),
    /// Elements could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}
