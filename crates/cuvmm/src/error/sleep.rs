//! Errors of putting blocks to sleep and waking them.

use std::io;

use super::{ArgumentError, BlockError, MemoryError};

/// Why blocks could not be put to sleep, or not be woken. Every one of them is as before, unless it is
/// [`Stayed`](Self::Stayed): also where the sleep was cancelled, or its watcher panicked, and one
/// driver call failed while the memory was put back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SleepError {
    /// A value that was given cannot be meant: a store of another device than the pool's.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// Leases on some of the blocks live.
    #[error("leases live on {blocks} of the blocks, of {bytes} bytes")]
    Leased {
        /// How many blocks.
        blocks: u64,
        /// Their bytes.
        bytes: u64,
    },
    /// Others have the memory of some of the blocks too, and would go on using it.
    #[error("{blocks} of the blocks, of {bytes} bytes, were exported")]
    Exported {
        /// How many blocks.
        blocks: u64,
        /// Their bytes.
        bytes: u64,
    },
    /// Work of the GPU that may use some of the blocks has not passed, or another thread is just
    /// putting them to sleep, or waking them.
    #[error("{blocks} of the blocks, of {bytes} bytes, are still in use")]
    Busy {
        /// How many blocks.
        blocks: u64,
        /// Their bytes.
        bytes: u64,
    },
    /// The store has no room for the contents.
    #[error("{wanted} bytes are to be kept, and {free} of the store's {capacity} are free")]
    StoreFull {
        /// Bytes to be kept.
        wanted: u64,
        /// Bytes of the store that are free.
        free: u64,
        /// Bytes that the store has.
        capacity: u64,
    },
    /// The watcher said to stop.
    #[error("the watcher cancelled it")]
    Cancelled,
    /// There is no memory to wake the blocks in.
    #[error("waking {bytes} bytes: {cause}")]
    Block {
        /// Bytes that were to be woken, in whole granules.
        bytes: u64,
        /// Why not, with the figures: what they need, and what is missing.
        #[source]
        cause: BlockError,
    },
    /// The system gives no thread to copy with.
    #[error("no thread to copy with: {0}")]
    Thread(#[from] io::Error),
    /// A capture is running, contents could not be copied, or a driver call failed.
    #[error(transparent)]
    Memory(MemoryError),
    /// The sleep failed or was cancelled, and the driver twice refused to put back the memory of
    /// some blocks: they sleep, as [`Block::is_asleep`](crate::Block::is_asleep) tells, and can be
    /// woken. Contents that were to be kept are kept; those that were to be
    /// [discarded](crate::Contents::Discard) are lost. The other blocks are as before.
    #[error("{blocks} of the blocks, of {bytes} bytes, stay asleep after: {cause}")]
    Stayed {
        /// How many blocks.
        blocks: u64,
        /// Their bytes.
        bytes: u64,
        /// Why the others were not put to sleep; [`Cancelled`](Self::Cancelled) where the watcher said
        /// so.
        #[source]
        cause: Box<Self>,
    },
}
