//! The states of a heap: awake, moving, asleep.
//!
//! The extents of a heap that sleeps or moves are not [settled](super::extents::Extents::settle):
//! no request, no reclaim and no tidying finds them. Allocations that end meanwhile free bytes of
//! them, which is a change of data alone.

use super::extents::ExtentId;
use crate::store::Saved;

/// The saved contents of extents.
pub(super) type Contents = Vec<(ExtentId, Saved)>;

#[derive(Debug, Default)]
pub(super) enum Rest {
    #[default]
    Awake,
    /// An operation puts the heap to sleep or wakes it.
    Moving {
        /// The memory is charged.
        charged: bool,
    },
    /// Nothing is mapped or charged. Extents that are not named have lost their contents.
    Asleep(Contents),
}

impl Rest {
    pub(super) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }

    pub(super) const fn is_charged(&self) -> bool {
        matches!(self, Self::Awake | Self::Moving { charged: true })
    }

    /// Takes the contents of a sleeping heap, which sleeps on.
    pub(super) fn take_saved(&mut self) -> Contents {
        match self {
            Self::Asleep(saved) => std::mem::take(saved),
            _ => Vec::new(),
        }
    }
}
