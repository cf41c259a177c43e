//! Whether a block has its memory, and what of that is neither in its slot nor given up.
//!
//! What brings a block from one state to another is [sleep](super::sleep) and [waking](super::wake).

use crate::own::Access;
use crate::region::{Fence, Unmapped};
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
        aside: Vec<Aside>,
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

/// An extent that was taken out of a block.
#[derive(Debug)]
pub(crate) struct Aside {
    pub(super) offset: u64,
    pub(super) unmapped: Unmapped,
    /// The most that anybody might do with it.
    pub(super) most: Access,
}

impl SleepState {
    pub(crate) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }

    /// Bytes that are charged for the block and not in its slot.
    pub(crate) fn beside(&self) -> u64 {
        match self {
            Self::Moving { aside, owed, .. } => {
                let aside: u64 = aside.iter().map(|aside| aside.unmapped.size()).sum();
                aside + owed
            }
            _ => 0,
        }
    }
}
