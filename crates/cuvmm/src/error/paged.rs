//! Errors of paged KV caches.

use super::{ArgumentError, BlockError, MemoryError};
use crate::display::{Bytes, Count};

/// An error of building a paged KV cache, or of an operation on it. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum PagedKvError {
    /// An argument cannot be used: a dimension of zero, a block that does not exist, bytes that are
    /// not those of a block's part.
    Argument(#[from] ArgumentError),
    /// Groups share their block numbers, so their blocks must have equal bytes.
    #[error(
        "a block of group {group} has {}, one of group 0 has {}: groups that share numbers need \
         blocks of equal bytes",
        Bytes(*.bytes),
        Bytes(*.first)
    )]
    GroupBytes {
        /// The group, counted from 0.
        group: usize,
        /// The bytes of a block of this group.
        bytes: u64,
        /// The bytes of a block of the first group.
        first: u64,
    },
    /// In layer-major layout groups share their tensors, which must have equal bytes a block, one by
    /// one.
    #[error(
        "the tensors of group {group} differ from those of group 0: in layer-major layout groups \
         need the same number of tensors, with equal bytes a block"
    )]
    GroupTensors {
        /// The group, counted from 0.
        group: usize,
    },
    /// A block that is to be released, read or written is not in use.
    #[error("block {0} is not in use")]
    NotInUse(u32),
    /// A block that is always backed was to be released.
    #[error("block {0} is pinned: it stays backed")]
    Pinned(u32),
    /// There is no memory for blocks.
    #[error("cannot back {}: {cause}", Count(*.blocks, "block"))]
    Back {
        /// The number of blocks.
        blocks: usize,
        /// The reason.
        #[source]
        cause: BlockError,
    },
    /// The cache was dropped while a request for its blocks waited.
    #[error("the paged cache was dropped before its blocks were backed")]
    Ended,
    /// Bytes could not be copied, the cache [sleeps](MemoryError::CacheAsleep), or a driver call failed.
    Memory(MemoryError),
}

impl PagedKvError {
    /// Returns `true` if waiting or freeing memory can help.
    #[must_use]
    pub fn is_shortage(&self) -> bool {
        matches!(self, Self::Back { cause, .. } if cause.is_shortage())
    }
}
