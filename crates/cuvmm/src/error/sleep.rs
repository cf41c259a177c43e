//! Errors of putting blocks to sleep and waking them.

use std::io;

use super::{ArgumentError, BlockError, MemoryError};
use crate::display::{Bytes, Count};

/// An error of putting blocks to sleep, reading them there, or waking them. All blocks are unchanged, unless it is
/// [`Stayed`](Self::Stayed); also after a sleep that was cancelled, or whose watcher panicked, if
/// at most one driver call failed while the memory was put back.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
#[non_exhaustive]
pub enum SleepError {
    /// An argument cannot be used: a store of another device than the pool's, a heap or a paged cache
    /// of another tenant, or a range that exceeds the block.
    Argument(#[from] ArgumentError),
    /// Leases on some of the blocks live, or one was taken while contents were copied and may have
    /// ended since: sleep again when none is taken.
    #[error("leases keep {} ({}): drop the leases", Count(*.blocks, "block"), Bytes(*.bytes))]
    Leased {
        /// The number of blocks.
        blocks: u64,
        /// Their size in bytes.
        bytes: u64,
    },
    /// Other processes hold the memory of some of the blocks, and would go on using it.
    #[error("{} ({}) cannot sleep: the memory was exported", Count(*.blocks, "block"), Bytes(*.bytes))]
    Exported {
        /// The number of blocks.
        blocks: u64,
        /// Their size in bytes.
        bytes: u64,
    },
    /// GPU work that may use some of the blocks is not complete, or another thread is putting them
    /// to sleep, waking them or reading their kept contents.
    #[error("work may use {} ({}): wait for its end", Count(*.blocks, "block"), Bytes(*.bytes))]
    Busy {
        /// The number of blocks.
        blocks: u64,
        /// Their size in bytes.
        bytes: u64,
    },
    /// The block whose kept contents were to be [read](crate::Block::read_kept) is awake.
    #[error("the block ({}) is awake: read its memory", Bytes(*.bytes))]
    Awake {
        /// The size of the block in bytes.
        bytes: u64,
    },
    /// Contents that were to be [read](crate::Block::read_kept) were discarded when the block fell
    /// asleep, all of them or those that were not marked.
    #[error("the contents of the block ({}) were discarded when it fell asleep", Bytes(*.bytes))]
    NotKept {
        /// The size of the block in bytes.
        bytes: u64,
    },
    /// GPU work that may use the memory of a heap is not complete, memory is being allocated from
    /// the heap, taken from it or offered to other processes, or another thread is putting it to sleep or waking it.
    #[error("a heap of {} is in use: wait for its work", Bytes(*.bytes))]
    HeapBusy {
        /// The memory of the heap in bytes.
        bytes: u64,
    },
    /// A step of a paged cache is being prepared, a [request](crate::PagedKv::back_async) has memory that
    /// it has not taken, GPU work that may use its memory is not complete, or
    /// another thread is putting it to sleep or waking it.
    #[error("a paged cache of {} is in use: end its steps, take what its requests were granted and \
             wait for its work", Bytes(*.bytes))]
    CacheBusy {
        /// The bytes under the blocks in use.
        bytes: u64,
    },
    /// The store has not enough free space for the contents.
    #[error(
        "cannot keep {}: {} of the store's {} are free",
        Bytes(*.wanted), Bytes(*.free), Bytes(*.capacity)
    )]
    StoreFull {
        /// The bytes to be kept.
        wanted: u64,
        /// The free bytes of the store.
        free: u64,
        /// The capacity of the store in bytes.
        capacity: u64,
    },
    /// The contents of some of the blocks were to be discarded, and bytes of them are
    /// [marked](crate::Block::set_kept).
    #[error(
        "marks keep {} of {}: sleep with Contents::KeepMarked, or end the marks",
        Bytes(*.bytes), Count(*.blocks, "block")
    )]
    Marked {
        /// The number of blocks with marked bytes.
        blocks: u64,
        /// The marked bytes.
        bytes: u64,
    },
    /// The watcher cancelled the operation.
    #[error("the watcher cancelled the operation")]
    Cancelled,
    /// There is no memory to wake the blocks in.
    #[error("cannot wake {}: {cause}", Bytes(*.bytes))]
    Block {
        /// The bytes that were to be woken, in whole granules.
        bytes: u64,
        /// The reason, with the figures.
        #[source]
        cause: BlockError,
    },
    /// The system could not start a thread to copy with.
    #[error("cannot start a thread to copy with: {0}")]
    Thread(#[from] io::Error),
    /// A capture is running, contents could not be copied, or a driver call failed.
    Memory(MemoryError),
    /// The sleep failed or was cancelled, and the driver refused twice to put back the memory of
    /// some blocks. They stay asleep ([`Block::is_asleep`](crate::Block::is_asleep)) and can be
    /// woken. Contents to be kept are kept; those to be [discarded](crate::Contents::Discard) are
    /// lost. The other blocks are unchanged. A heap and a paged
    /// cache count as a block each.
    #[error("an error has left {} ({}) asleep: {cause}", Count(*.blocks, "block"), Bytes(*.bytes))]
    Stayed {
        /// The number of blocks, heaps and paged caches.
        blocks: u64,
        /// Their size in bytes.
        bytes: u64,
        /// The reason why the others were not put to sleep; [`Cancelled`](Self::Cancelled) if the
        /// watcher cancelled.
        #[source]
        cause: Box<Self>,
    },
    /// An [exchange](crate::Exchange) failed, and the driver refused so often that neither the
    /// memory of some blocks nor the store has all their contents. They sleep, and read like newly
    /// allocated ones when they are woken.
    #[error("the contents of {} ({}) are lost: {cause}", Count(*.blocks, "block"), Bytes(*.bytes))]
    Lost {
        /// The number of blocks.
        blocks: u64,
        /// Their size in bytes.
        bytes: u64,
        /// The reason why the exchange failed.
        #[source]
        cause: Box<Self>,
    },
}
