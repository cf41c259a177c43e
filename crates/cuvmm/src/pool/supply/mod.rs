//! The supply of memory: the free list, what is created for it, and what goes to the driver.
//!
//! Physicals that no owner uses are in the *free list*, or *marked* to be released when the
//! operation has put its slots back. A physical whose release the driver refused, and a space with
//! stuck mappings, are *quarantined*: nothing uses them again.

mod free_list;
mod gather;
mod release;
mod room;

use std::collections::VecDeque;

use self::free_list::FreeList;
use crate::extents::{Space, Unmapped};
use crate::own::Physical;

pub(super) use self::release::{AtDriver, Obtained};
pub(crate) use self::room::Room;

/// Physicals and spaces that the pool has and no owner uses.
#[derive(Debug, Default)]
pub(crate) struct Supply {
    free_list: FreeList,
    /// Physicals to be released when the operation has put its slots back.
    marked: Vec<Unmapped>,
    /// Physicals that the driver refused to release, or that are mapped elsewhere. Their release is
    /// tried again when memory is short or to be given back, and at the end of the pool.
    quarantined: VecDeque<Physical>,
    /// Spaces with stuck mappings. Work may still use them, so they stay until the end of the pool.
    stuck: Vec<Space>,
}

impl Supply {
    /// Returns the bytes of the free list.
    pub(super) const fn free(&self) -> u64 {
        self.free_list.bytes()
    }

    /// Returns the size of the free list's largest physical in bytes, or 0.
    pub(super) fn largest_free(&self) -> u64 {
        self.free_list.largest()
    }

    /// Takes a physical of exactly `size` bytes from the free list: one that `own` wrote to last,
    /// else an unwritten one.
    pub(super) fn take_unscrubbed(&mut self, size: u64, own: Option<u64>) -> Option<Unmapped> {
        self.free_list.take(size, own, false)
    }

    /// Returns `true` if physicals are marked to be released.
    pub(super) const fn has_marked(&self) -> bool {
        !self.marked.is_empty()
    }

    /// Returns the bytes that are marked to be released.
    pub(super) fn marked(&self) -> u64 {
        self.marked.iter().map(Unmapped::size).sum()
    }

    /// Returns the physicals that the driver refused to release, or that are mapped elsewhere.
    pub(super) fn refused(&self) -> impl Iterator<Item = &Physical> {
        self.quarantined.iter()
    }

    /// Returns the bytes of quarantined physicals.
    pub(super) fn quarantined(&self) -> u64 {
        self.quarantined.iter().map(Physical::size).sum()
    }
}
