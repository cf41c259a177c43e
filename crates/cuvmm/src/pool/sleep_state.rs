//! Whether a block has its memory, and what of that is neither in its slot nor given up.
//!
//! What brings a block from one state to another is [sleep](super::sleep) and [waking](super::wake).

use crate::region::{Fence, TakenOut};
use crate::store::Saved;

/// Whether a block has its memory.
#[derive(Debug, Default)]
pub(crate) enum SleepState {
    /// It has.
    #[default]
    Awake,
    /// Somebody is putting it to sleep or waking it.
    Moving {
        /// What was taken out, last first.
        aside: TakenOut,
        /// Bytes that are charged and still to be placed.
        owed: u64,
        /// What may still be filling memory that was placed.
        filling: Fence,
    },
    /// It has none.
    Asleep {
        /// Its contents, if they were to be kept.
        saved: Option<Box<Saved>>,
    },
}

impl SleepState {
    /// Begins to move a block, for which so many bytes were charged that are not there.
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

    /// Bytes that are charged for the block and still to come from somewhere.
    #[cfg(debug_assertions)]
    pub(crate) const fn owed(&self) -> u64 {
        match self {
            Self::Moving { owed, .. } => *owed,
            _ => 0,
        }
    }

    /// Bytes that are charged for the block and not in its slot.
    pub(crate) fn beside(&self) -> u64 {
        match self {
            Self::Moving { aside, owed, .. } => aside.bytes() + owed,
            _ => 0,
        }
    }
}
