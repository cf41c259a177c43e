//! Errors of putting blocks to sleep, waking them, and the host memory that keeps their contents.

use std::io;

use super::{AllocateError, CallError, CopyError};

/// Why a store could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildStoreError {
    /// Neither pinned nor ordinary memory was asked for.
    #[error("a store without memory")]
    Empty,
    /// The size does not fit the address space.
    #[error("a store of {bytes} bytes does not fit the address space")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
    },
    /// The driver does not give so much pinned memory.
    #[error("pinning {bytes} bytes of host memory: {cause}")]
    Pinned {
        /// Bytes asked for.
        bytes: u64,
        /// The driver's answer.
        #[source]
        cause: CallError,
    },
    /// The system does not give so much ordinary memory.
    #[error("the system does not give {bytes} bytes of memory")]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
    },
    /// A stream for copies could not be made.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why blocks could not be put to sleep. Every one of them is as before, unless it is
/// [`Stayed`](Self::Stayed): also where the sleep was cancelled, or its watcher panicked, and one
/// driver call failed while the memory was put back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SleepError {
    /// A capture guard lives, and waiting for the GPU could break the capture.
    #[error("a capture is running on this pool: nothing is put to sleep")]
    Capturing,
    /// Somebody holds leases on some of the blocks.
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
    /// Work of the GPU that may use some of the blocks has not passed, or another thread is at
    /// them.
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
    /// The store was built for another device.
    #[error("the store belongs to another device than the pool")]
    WrongDevice,
    /// Whoever watched said to stop.
    #[error("putting to sleep was cancelled")]
    Cancelled,
    /// Contents could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// No thread could be had to copy with.
    #[error("no thread to copy with: {0}")]
    Thread(#[from] io::Error),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
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

/// Why blocks could not be woken. Every one of them sleeps on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WakeError {
    /// A capture guard lives, and waiting for the GPU could break the capture.
    #[error("a capture is running on this pool: nothing is woken")]
    Capturing,
    /// Another thread is just putting some of the blocks to sleep, or waking them.
    #[error("another thread is at {blocks} of the blocks, of {bytes} bytes")]
    Busy {
        /// How many blocks.
        blocks: u64,
        /// Their bytes.
        bytes: u64,
    },
    /// There is no memory for them, with the figures: what they need, and what is missing.
    #[error("waking {bytes} bytes: {cause}")]
    Memory {
        /// Bytes that were to be woken, in whole granules.
        bytes: u64,
        /// Why not.
        #[source]
        cause: AllocateError,
    },
    /// Whoever watched said to stop.
    #[error("waking was cancelled")]
    Cancelled,
    /// Contents could not be copied.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// No thread could be had to copy with.
    #[error("no thread to copy with: {0}")]
    Thread(#[from] io::Error),
    /// A driver call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}
