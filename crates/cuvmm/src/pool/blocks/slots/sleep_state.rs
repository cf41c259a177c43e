//! The sleep state of a block: whether it has its memory, and its memory that is neither in its
//! slot nor given up. [`sleep`](crate::pool::blocks::sleep) and [`wake`](crate::pool::blocks::sleep::wake) change the state.

use crate::extents::{Fence, TakenOut};
use crate::store::Saved;

#[derive(Debug, Default)]
pub(in crate::pool) enum SleepState {
    #[default]
    Awake,
    Moving {
        /// Memory taken out, the last extent first.
        aside: TakenOut,
        /// Bytes that are charged and still to be placed.
        owed: u64,
        /// Covers work that may still be filling placed memory.
        filling: Fence,
    },
    Asleep {
        /// The contents, if they were kept.
        saved: Option<Box<Saved>>,
    },
}

impl SleepState {
    /// Returns the state of a block that begins to move, with `owed` bytes.
    pub(in crate::pool) fn moving(owed: u64) -> Self {
        Self::Moving {
            aside: TakenOut::default(),
            owed,
            filling: Fence::complete(),
        }
    }

    pub(in crate::pool) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }

    #[cfg(debug_assertions)]
    pub(crate) const fn owed(&self) -> u64 {
        match self {
            Self::Moving { owed, .. } => *owed,
            _ => 0,
        }
    }

    /// Returns the bytes charged for the block and not in its slot.
    pub(crate) fn beside(&self) -> u64 {
        match self {
            Self::Moving { aside, owed, .. } => aside.bytes() + owed,
            _ => 0,
        }
    }
}
