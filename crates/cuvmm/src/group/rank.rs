//! One rank's membership: its file and its slot.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, TryLockError};

use super::layout::{At, GroupFile, Header, Slot};
use super::membership::Membership;
use super::watch::Watch;
use crate::error::{CallError, GroupError};
use crate::fork::OpeningProcess;
use crate::ledger::lock::Lock;

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) name: String,
    pub(super) file: GroupFile,
    pub(super) ranks: usize,
    pub(super) index: usize,
    /// The state of the slot while this rank has it.
    pub(super) state: u64,
    pub(super) opened_by: OpeningProcess,
    /// Locked during an operation of the group.
    pub(super) watch: Mutex<Watch>,
}

impl Rank {
    pub(super) const fn header(&self) -> &Header {
        &self.file.layout().header
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.file.layout().slots.iter().take(self.ranks)
    }

    pub(super) fn slot(&self) -> &Slot {
        &self.file.layout().slots[self.index]
    }

    pub(super) fn set_at(&self, at: At) {
        self.slot().set_at(at);
        self.header().bell.ring();
    }

    pub(super) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Refuses in a forked child, which is no member.
    pub(super) fn own_process(&self) -> Result<(), CallError> {
        match self.opened_by.is_here() {
            true => Ok(()),
            false => Err(CallError::Forked {
                opened_by: self.opened_by.id(),
            }),
        }
    }

    /// Begins an operation, unless another thread is in one.
    pub(super) fn begin(&self) -> Result<MutexGuard<'_, Watch>, GroupError> {
        // A lock may be held for ever in a forked child.
        self.own_process()?;
        match self.watch.try_lock() {
            Ok(watch) => Ok(watch),
            Err(TryLockError::Poisoned(watch)) => Ok(watch.into_inner()),
            Err(TryLockError::WouldBlock) => Err(GroupError::Busy {
                group: self.name.clone(),
            }),
        }
    }
}

impl Drop for Rank {
    /// Leaves the group, unless this is a forked child.
    fn drop(&mut self) {
        if !self.opened_by.is_here() {
            return;
        }
        // Without it, another process may find the slot free and still locked.
        let leaving = Membership::lock(&self.file)
            .inspect_err(|error| log!(warn, %error, "a rank leaves while another process joins"));
        // Before the rank's lock is released: a slot without a lock is its owner's end.
        self.slot()
            .state
            .replace(self.state, self.state.wrapping_add(1));
        if let Err(errno) = Lock::Owner(self.index).release(self.file.file()) {
            log!(warn, %errno, "the lock of a group's rank could not be released");
        }
        drop(leaving);
        self.header().bell.ring();
    }
}
