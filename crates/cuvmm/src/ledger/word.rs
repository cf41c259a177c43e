//! One word of the ledger's file. All reads and writes of the file go through this type.
//!
//! The words are those of the standard library in every build, since other processes share them.
//! In unit tests a process can end itself at its nth write.

pub(super) use super::atomics::fence;
use super::atomics::{AtomicU64, Ordering};

/// A 64-bit word that several processes read and write. Any value can be found in it.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct Word(AtomicU64);

impl Word {
    #[cfg(test)]
    pub(super) fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    pub(super) fn load(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn store(&self, value: u64) {
        self.0.store(value, Ordering::Release);
        written();
    }

    /// Replaces `old` by `new`; returns `false` if another value was there.
    pub(super) fn replace(&self, old: u64, new: u64) -> bool {
        let replaced = self
            .0
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            .is_ok();
        written();
        replaced
    }

    /// Adds to the word, wrapping, and returns the value from before.
    pub(super) fn add(&self, value: u64) -> u64 {
        let before = self.0.fetch_add(value, Ordering::AcqRel);
        written();
        before
    }

    /// Stores a value unless it is there already, so that other processors' caches keep the line.
    pub(super) fn publish(&self, value: u64) {
        if self.load() != value {
            self.store(value);
        }
    }
}

/// Counts a write, and ends the process if a test wants it to end there.
pub(super) fn written() {
    #[cfg(test)]
    super::crash::written();
}
