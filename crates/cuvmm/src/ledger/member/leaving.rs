//! The end of a process's membership in a ledger.

use std::sync::{Arc, PoisonError};
use std::thread;

use super::Member;
use crate::ledger::dead;
use crate::ledger::lock::Lock;
use crate::sync::atomic::Ordering;

impl Member {
    /// Leaves the ledger if this is the last handle but for that of the ledger's thread, and is
    /// about to be dropped. Waits for that thread's pass, after which it has no handle.
    pub(crate) fn leave_if_last(this: &Arc<Self>) {
        let is_keeper = this.keeper.get() == Some(&thread::current().id());
        if is_keeper || Arc::strong_count(this) > 2 || !this.opened_by.is_here() {
            return;
        }
        let passing = this.passing.lock();
        let _passing = passing.unwrap_or_else(PoisonError::into_inner);
        if Arc::strong_count(this) == 1 {
            this.leave();
        }
    }

    pub(in crate::ledger) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    fn leave(&self) {
        if self.has_left.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(served) = self.served.get() {
            served.close();
        }
        let used = self.account().used;
        if used > 0 {
            // The memory could not be released: it counts until this process ends.
            log!(warn, used, "memory is left that was charged to a ledger");
            std::mem::forget(Arc::clone(&self.file));
            return;
        }
        // If another process took this one for dead, the slot may have a new owner.
        let found = self.slot().state().0;
        dead::free(
            &self.file,
            self.index,
            self.slot(),
            (found, self.generation),
        );
        if let Err(errno) = Lock::Owner(self.index).release(self.file.file()) {
            log!(warn, %errno, "a ledger's slot could not be released");
        }
        // Ends the thread of this member.
        self.file.layout().header.wanted.ring();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.opened_by.is_here() {
            self.leave();
        }
    }
}
