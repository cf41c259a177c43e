//! Errors of KV caches.

use super::{ArgumentError, BlockError, MemoryError};
use crate::display::Count;

/// An error of building a KV cache, or of an operation on it. Every sequence is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum KvCacheError {
    /// An argument cannot be used: a dimension or a number of tokens of zero, a layer that the
    /// model does not have, bytes that are not whole rows, too many sequences or tokens.
    Argument(#[from] ArgumentError),
    /// The cache has no sequence with this number: it was freed, or belongs to another cache.
    #[error("there is no sequence #{0} in the cache")]
    NoSuchSequence(u64),
    /// The sequence with this number is asleep, and has no memory for rows.
    #[error("sequence #{0} is asleep: wake it first")]
    Asleep(u64),
    /// The sequence would exceed its maximum of tokens.
    #[error("sequence #{sequence}: {tokens} tokens exceed the maximum of {most}")]
    Tokens {
        /// The sequence's number.
        sequence: u64,
        /// The number of tokens it would have.
        tokens: u64,
        /// The maximum.
        most: u64,
    },
    /// Tokens after the sequence's end were to be forked, kept, moved, read or written.
    #[error("sequence #{sequence} has {}, fewer than {tokens}", Count(*.held, "token"))]
    BeyondEnd {
        /// The sequence's number.
        sequence: u64,
        /// The number of tokens named, from the sequence's beginning.
        tokens: u64,
        /// The number of tokens that the sequence has.
        held: u64,
    },
    /// The cache was not built for forks.
    #[error("the cache cannot fork: build it with `may_fork`")]
    MayNotFork,
    /// The rows to be written belong to tokens that another sequence may share.
    #[error("sequence #{sequence}: token {first} is one of the first {fixed}, which forks share")]
    Fixed {
        /// The sequence's number.
        sequence: u64,
        /// The first token to be written.
        first: u64,
        /// The number of leading tokens that are fixed.
        fixed: u64,
    },
    /// There is no memory for a new sequence.
    #[error("cannot create a sequence of {}: {cause}", Count(*.tokens, "token"))]
    Create {
        /// The requested number of tokens.
        tokens: u64,
        /// The reason.
        #[source]
        cause: BlockError,
    },
    /// Memory for a sequence could not be allocated or freed while it was appended to, forked or
    /// truncated.
    #[error("sequence #{sequence}: {cause}")]
    Block {
        /// The sequence's number.
        sequence: u64,
        /// The reason.
        #[source]
        cause: BlockError,
    },
    /// Rows could not be copied, or a driver call failed.
    Memory(MemoryError),
}

impl KvCacheError {
    /// Returns `true` if waiting or freeing memory can help.
    #[must_use]
    pub fn is_shortage(&self) -> bool {
        matches!(self, Self::Create { cause, .. } | Self::Block { cause, .. } if cause.is_shortage())
    }
}
