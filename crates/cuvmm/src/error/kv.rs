//! Errors of caches of keys and values.

use super::{ArgumentError, BlockError, MemoryError};

/// Why a cache of keys and values could not be built, or an operation on it failed. Every sequence is as
/// before.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvCacheError {
    /// A value that was given cannot be meant: a dimension or a number of tokens of zero, a layer that
    /// the model has not, bytes that are no whole rows, more sequences or tokens than there may be.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// There is no such sequence in the cache: it was freed, or it is another cache's.
    #[error("there is no sequence #{sequence} in the cache")]
    NoSuchSequence {
        /// Its number.
        sequence: u64,
    },
    /// The sequence sleeps, and has no memory for rows.
    #[error("sequence #{sequence} sleeps: wake it first")]
    Asleep {
        /// Its number.
        sequence: u64,
    },
    /// The sequence would have more tokens than it may, or tokens were named that it has not: to be
    /// kept, read, or begun with by a fork.
    #[error("sequence #{sequence}: {tokens} tokens, where {most} are the most")]
    Tokens {
        /// Its number.
        sequence: u64,
        /// Tokens it would have, or one past the last that was named.
        tokens: u64,
        /// The most.
        most: u64,
    },
    /// The cache was not built to fork.
    #[error("the cache was built without `may_fork`")]
    MayNotFork,
    /// Rows of tokens that another sequence may show too.
    #[error(
        "writing token {first} of sequence #{sequence}, which shares the first {fixed} with a fork"
    )]
    Fixed {
        /// Its number.
        sequence: u64,
        /// The first token that was to be written.
        first: u64,
        /// So many tokens stay as they are.
        fixed: u64,
    },
    /// Memory for a new sequence could not be had.
    #[error("a sequence of {tokens} tokens: {cause}")]
    Create {
        /// Tokens asked for.
        tokens: u64,
        /// Why.
        #[source]
        cause: BlockError,
    },
    /// Memory for a sequence could not be had or given up: it was appended to, forked or truncated.
    #[error("sequence #{sequence}: {cause}")]
    Block {
        /// Its number.
        sequence: u64,
        /// Why.
        #[source]
        cause: BlockError,
    },
    /// Rows could not be copied, or a driver call failed.
    #[error(transparent)]
    Memory(MemoryError),
}

impl KvCacheError {
    /// Whether waiting, or giving memory back, can help.
    #[must_use]
    pub fn is_shortage(&self) -> bool {
        matches!(self, Self::Create { cause, .. } | Self::Block { cause, .. } if cause.is_shortage())
    }
}
