//! The sleep state of a block: whether it has its memory, and its memory that is neither in its
//! slot nor given up.
//!
//! [`sleep`](super::sleep) and [`wake`](super::wake) contain the operations that change the state.

use crate::extents::{Fence, TakenOut};
use crate::store::Saved;

/// The sleep state of a block.
#[derive(Debug, Default)]
pub(crate) enum SleepState {
    /// It has its memory.
    #[default]
    Awake,
    /// An operation is putting it to sleep or waking it.
    Moving {
        /// The memory that was taken out, the last extent first.
        aside: TakenOut,
        /// Bytes that are charged and still to be placed.
        owed: u64,
        /// Covers work that may still be filling memory that was placed.
        filling: Fence,
    },
    /// It has no memory.
    Asleep {
        /// Its contents, if they were kept.
        saved: Option<Box<Saved>>,
    },
}

impl SleepState {
    /// Returns the state of a block that begins to move, with `owed` bytes charged that are not
    /// there.
    pub(super) fn moving(owed: u64) -> Self {
        Self::Moving {
            aside: TakenOut::default(),
            owed,
            filling: Fence::complete(),
        }
    }

    pub(crate) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }

    /// Returns the bytes that are charged for the block and still to be placed.
    #[cfg(debug_assertions)]
    pub(crate) const fn owed(&self) -> u64 {
        match self {
            Self::Moving { owed, .. } => *owed,
            _ => 0,
        }
    }

    /// Returns the bytes that are charged for the block and not in its slot.
    pub(crate) fn beside(&self) -> u64 {
        match self {
            Self::Moving { aside, owed, .. } => aside.bytes() + owed,
            _ => 0,
        }
    }
}
