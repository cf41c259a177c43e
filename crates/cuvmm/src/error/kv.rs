//! Errors of caches of keys and values.

use super::{AllocateError, CallError, CopyError, FreeRefusal, GrowAllError, ShrinkError};

/// Why a cache could not be built.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BuildKvCacheError {
    /// A dimension of the shape is zero.
    #[error("a cache whose {dimension} is zero")]
    Zero {
        /// Which one.
        dimension: &'static str,
    },
    /// The addresses of all sequences together cannot be counted in 64 bits.
    #[error("a cache of this shape does not fit the address space")]
    TooLarge,
    /// The stream belongs to another device.
    #[error("the home stream belongs to another device than the tenant's pool")]
    WrongDevice,
}

/// Why an operation on a cache failed. Every sequence is as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvCacheError {
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
    /// The model has no such layer.
    #[error("layer {layer} of {layers}")]
    NoSuchLayer {
        /// The layer asked for, counted from zero.
        layer: u32,
        /// How many there are.
        layers: u32,
    },
    /// A sequence has at least one token; free it instead.
    #[error("a sequence without tokens")]
    NoTokens,
    /// A new sequence would be longer than sequences may be.
    #[error("a sequence of {tokens} tokens, where {limit} are the most")]
    TooLong {
        /// Tokens asked for.
        tokens: u64,
        /// The most.
        limit: u64,
    },
    /// A sequence would become longer than sequences may be.
    #[error("sequence #{sequence} would have {tokens} tokens, where {limit} are the most")]
    AppendTooLong {
        /// Its number.
        sequence: u64,
        /// Tokens it would have.
        tokens: u64,
        /// The most.
        limit: u64,
    },
    /// There are as many sequences as there may be.
    #[error("there are {held} sequences, where {limit} are the most")]
    TooManySequences {
        /// Sequences that live.
        held: usize,
        /// The most.
        limit: u32,
    },
    /// Truncating to more tokens than there are.
    #[error("truncating sequence #{sequence} of {tokens} tokens to {wanted}")]
    WouldGrow {
        /// Its number.
        sequence: u64,
        /// Tokens it has.
        tokens: u64,
        /// Tokens that were to be left.
        wanted: u64,
    },
    /// Rows of tokens that the sequence does not have.
    #[error("{count} tokens from {first} on of sequence #{sequence}, which has {tokens}")]
    OutOfRange {
        /// Its number.
        sequence: u64,
        /// The first token.
        first: u64,
        /// How many tokens.
        count: u64,
        /// Tokens it has.
        tokens: u64,
    },
    /// Bytes that are no rows.
    #[error("{bytes} bytes are no rows of {row} bytes each")]
    NotWholeRows {
        /// Bytes given.
        bytes: usize,
        /// Bytes of a row: all heads of one layer's keys or values of one token.
        row: u64,
    },
    /// The cache was not built to fork.
    #[error("the cache was built without `may_fork`")]
    MayNotFork,
    /// Forking a sequence at more tokens than it has.
    #[error("forking sequence #{sequence} of {tokens} tokens at {wanted}")]
    ForkTooLong {
        /// Its number.
        sequence: u64,
        /// Tokens it has.
        tokens: u64,
        /// Tokens that the fork was to begin with.
        wanted: u64,
    },
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
        cause: AllocateError,
    },
    /// A sequence could not be forked.
    #[error("forking sequence #{sequence} at {tokens} tokens: {cause}")]
    Fork {
        /// Its number.
        sequence: u64,
        /// Tokens that the fork was to begin with.
        tokens: u64,
        /// Why.
        #[source]
        cause: AllocateError,
    },
    /// Memory for more tokens could not be had.
    #[error("appending to sequence #{sequence}: {cause}")]
    Append {
        /// The sequence that found none.
        sequence: u64,
        /// Why.
        #[source]
        cause: GrowAllError,
    },
    /// Memory could not be given up.
    #[error(transparent)]
    Shrink(#[from] ShrinkError),
    /// The sequence may not be freed now.
    #[error(transparent)]
    Free(#[from] FreeRefusal),
    /// Rows could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl KvCacheError {
    /// Whether waiting, or giving memory back, can help.
    #[must_use]
    pub const fn is_shortage(&self) -> bool {
        match self {
            Self::Create { cause, .. } | Self::Fork { cause, .. } => cause.is_shortage(),
            Self::Append {
                cause: GrowAllError::Refused { cause, .. },
                ..
            } => cause.is_shortage(),
            _ => false,
        }
    }
}
