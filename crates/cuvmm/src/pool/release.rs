//! Where memory goes that no slot uses any more: to the free list, or to the driver.

use super::core::Locked;
use super::state::State;
use crate::own::CloseRefusal;
use crate::region::Unmapped;

impl Locked<'_> {
    /// Gives memory up that an operation does not need after all: what it created goes back to the
    /// driver, the rest to the free list.
    pub(crate) fn put_back(&mut self, physicals: Vec<Unmapped>) {
        for unmapped in physicals {
            if unmapped.fresh {
                self.release(unmapped);
            } else {
                self.keep(unmapped);
            }
        }
    }

    /// Gives what others may still have to the driver.
    pub(super) fn release_marked(&mut self) {
        while let Some(unmapped) = self.to_release.pop() {
            self.release(unmapped);
        }
    }

    /// Gives a physical to the driver, or to the quarantine if it will not have it.
    pub(crate) fn release(&mut self, unmapped: Unmapped) -> u64 {
        let size = unmapped.size();
        match self.unlocked(|| unmapped.physical.close()) {
            Ok(()) => {
                self.budget.released(size);
                size
            }
            Err(failed) => {
                let reason = match failed.reason {
                    CloseRefusal::Call(error) => error.to_string(),
                    _ => "it is mapped elsewhere".to_owned(),
                };
                tracing::error!(%reason, size, "a physical could not be released: quarantined");
                self.budget.quarantine(size, 0);
                self.quarantine.0.push(failed.owner);
                0
            }
        }
    }

    /// Gives memory of the free list to the driver until at most `keep` bytes of it are left.
    pub(crate) fn release_free(&mut self, keep: u64) -> u64 {
        let mut released = 0;
        while self.free_list.bytes() > keep {
            let Some(unmapped) = self.free_list.take_largest() else {
                break;
            };
            released += self.release(unmapped);
        }
        released
    }

    /// Gives to the driver what the free list has grown by since it was `before` bytes, in physicals that
    /// make up so much: what lay there before stays.
    pub(crate) fn release_growth(&mut self, before: u64) {
        let mut left = self.free_list.bytes().saturating_sub(before);
        while let Some(unmapped) = self.free_list.take_within(left, None, true) {
            left -= unmapped.size();
            self.release(unmapped);
        }
    }
}

impl State {
    /// Bytes that go to the driver when the operation ends.
    fn marked(&self) -> u64 {
        self.to_release.iter().map(Unmapped::size).sum()
    }

    /// Keeps a physical that no slot uses any more for the next tenant that wants memory. What another
    /// process may have goes to the driver, at the latest when the operation ends. What is still
    /// mapped elsewhere, since a roll-back could not unmap it, is quarantined then: it would show the
    /// next tenant's data there. What exceeds the pool's limit, since that was lowered, goes to the
    /// driver too.
    pub(crate) fn keep(&mut self, unmapped: Unmapped) {
        let excess = self.budget.excess();
        let exceeds = excess > 0 && excess > self.marked();
        if unmapped.physical.is_exported() || unmapped.physical.is_shared() || exceeds {
            self.to_release.push(unmapped);
            self.has_behind = true;
        } else {
            self.free_list.add(unmapped);
        }
    }
}
