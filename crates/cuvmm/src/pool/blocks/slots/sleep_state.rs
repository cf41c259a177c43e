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
        /// Bytes of the slot or aside that are charged to the block that gets them.
        passed: u64,
        /// Covers work that may still be filling placed memory.
        filling: Fence,
        /// A lease was taken: its holder may have written since the contents were copied.
        leased: bool,
    },
    Asleep {
        /// The contents, if they were kept.
        saved: Option<Box<Saved>>,
    },
}

impl SleepState {
    /// Returns the state of a block that begins to move, with `owed` bytes.
    pub(in crate::pool::blocks) fn moving(owed: u64) -> Self {
        Self::Moving {
            aside: TakenOut::default(),
            owed,
            passed: 0,
            filling: Fence::complete(),
            leased: false,
        }
    }

    pub(in crate::pool::blocks) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }

    pub(in crate::pool::blocks) const fn is_asleep(&self) -> bool {
        matches!(self, Self::Asleep { .. })
    }

    /// Returns the bytes that are charged for the block and still to be placed.
    #[cfg(debug_assertions)]
    pub(in crate::pool::blocks) const fn owed(&self) -> u64 {
        match self {
            Self::Moving { owed, .. } => *owed,
            _ => 0,
        }
    }

    /// Returns the bytes in the slot or aside that are charged to another block.
    pub(in crate::pool::blocks) const fn passed(&self) -> u64 {
        match self {
            Self::Moving { passed, .. } => *passed,
            _ => 0,
        }
    }

    /// Notes that a lease was taken.
    pub(in crate::pool::blocks) const fn note_lease(&mut self) {
        if let Self::Moving { leased, .. } = self {
            *leased = true;
        }
    }

    /// Returns `true` if a lease was taken since the block began to move.
    pub(in crate::pool::blocks) const fn was_leased(&self) -> bool {
        matches!(self, Self::Moving { leased: true, .. })
    }

    /// Returns the bytes charged for the block and not in its slot.
    pub(in crate::pool::blocks) fn beside(&self) -> u64 {
        match self {
            Self::Moving { aside, owed, .. } => aside.bytes() + owed,
            _ => 0,
        }
    }
}
