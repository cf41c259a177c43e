//! Errors of buffers with snapshots.

use std::ops::Range;

use super::{CallError, CommitError, CopyError, ForkError, ReserveError, UnshareError};

/// Why an operation on a buffer with snapshots failed. Its elements, and those of its snapshots,
/// are as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CowError {
    /// Elements without a size have no place on a device.
    #[error("the elements have no size")]
    ZeroSizedElements,
    /// So many elements have more bytes than can be counted.
    #[error("{elements} elements have too many bytes")]
    TooLarge {
        /// How many elements.
        elements: usize,
    },
    /// Some of the elements are not there.
    #[error("elements {range:?} of {len}")]
    OutOfRange {
        /// Which were asked for.
        range: Range<usize>,
        /// Elements there are.
        len: usize,
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
    /// A snapshot could not be made.
    #[error(transparent)]
    Fork(#[from] ForkError),
    /// Elements could not be made the buffer's own.
    #[error(transparent)]
    Unshare(#[from] UnshareError),
    /// Elements could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}
