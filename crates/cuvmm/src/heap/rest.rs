//! Bytes and places that a heap keeps while it sleeps.
//!
//! The extents of a heap that sleeps or moves are not [settled](super::extents::Extents::settle):
//! no request, no reclaim and no tidying finds them. Allocations that end meanwhile free bytes of
//! them, which is a change of data alone.

use super::extents::ExtentId;
use crate::pool;
use crate::store::Saved;

/// The saved contents of extents.
pub(super) type Contents = Vec<(ExtentId, Saved)>;

/// The state of a heap. Extents that are not named have lost their contents.
pub(super) type Rest = pool::Rest<Contents>;

impl Rest {
    /// Takes the contents of a sleeping heap, which sleeps on.
    pub(super) fn take_saved(&mut self) -> Contents {
        match self {
            Self::Asleep(saved) => std::mem::take(saved),
            _ => Vec::new(),
        }
    }
}
