//! Why a block's memory cannot be used, lent or given away.

use super::{CallError, CopyError};

/// Why a block's memory cannot be used, lent or given away. Nothing has changed.
///
/// Every way to the memory of a block asks the same questions: copies, leases for a right,
/// registrations, dma-bufs, tensors and slices for other libraries, exports, offers, publications.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockRefusal {
    /// The block sleeps, or is being put to sleep or woken.
    #[error(
        "the block of {size} bytes sleeps, or is being put to sleep or woken: wake it before its \
         memory is used"
    )]
    Asleep {
        /// The block's size.
        size: u64,
    },
    /// The block shows memory together with [forks](crate::Block::fork), or may only read it
    /// because it is one.
    #[error(
        "the first {bytes} bytes of the block are shared with forks and only to be read: use what \
         lies behind them, or copy them to a block of their own"
    )]
    Shared {
        /// How many of its first bytes.
        bytes: u64,
    },
    /// Leases, registrations, tensors or slices still use the block, and may write to it.
    #[error(
        "{leases} leases keep the block, which registrations, tensors, slices and offers hold \
         too: end them before its memory becomes read-only"
    )]
    Lent {
        /// How many leases live.
        leases: u64,
    },
    /// A capture guard lives, and waiting for the copy could break the capture.
    #[error("a capture is running on this pool: a copy that waits could break it")]
    Capturing,
    /// Part of the range has no memory: the block was freed in its sleep, or the driver failed
    /// twice when memory was moved.
    #[error("{size} bytes at offset {offset} of the block have lost their memory")]
    Unmapped {
        /// Where the range begins.
        offset: u64,
        /// Its bytes.
        size: u64,
    },
    /// The context is lost, or this is a forked child.
    #[error(transparent)]
    Call(#[from] CallError),
}

impl BlockRefusal {
    /// The error of a copy of `size` bytes at `offset` that was refused so.
    pub(crate) const fn of_copy(self, offset: u64, size: u64) -> CopyError {
        match self {
            Self::Asleep { .. } => CopyError::Asleep,
            Self::Shared { .. } | Self::Lent { .. } => CopyError::ReadOnly,
            Self::Capturing => CopyError::Capturing,
            Self::Unmapped { .. } => CopyError::NotCommitted { offset, size },
            Self::Call(cause) => CopyError::Call {
                offset,
                size,
                cause,
            },
        }
    }
}
