//! Errors of ring buffers.

use super::{AliasError, CommitError, CopyError, ReserveError};

/// Why an operation on a ring buffer failed. What is in it is as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// Elements without a size have no place on a device.
    #[error("the elements have no size")]
    ZeroSizedElements,
    /// A ring for no elements.
    #[error("a ring for no elements")]
    ZeroCapacity,
    /// So many elements have more bytes than can be counted.
    #[error("{elements} elements have too many bytes")]
    TooLarge {
        /// How many elements.
        elements: usize,
    },
    /// The elements do not fit beside what is there.
    #[error("{additional} elements more than {len} do not fit a ring of {capacity}")]
    Full {
        /// Elements to be added.
        additional: usize,
        /// Elements there are.
        len: usize,
        /// Elements there can be.
        capacity: usize,
    },
    /// There are not as many elements.
    #[error("{wanted} elements of a ring that has {len}")]
    Short {
        /// Elements asked for.
        wanted: usize,
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
    /// Memory could not be shown a second time.
    #[error(transparent)]
    Alias(#[from] AliasError),
    /// Elements could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
}
