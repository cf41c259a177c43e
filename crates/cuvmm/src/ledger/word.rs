//! A word of the ledger's file. All reads and writes of the file go through this type.
//!
//! Every build uses the standard library's atomics, since other processes share the words. In unit
//! tests a process can end itself at its nth write, and members can take turns at each access.

pub(super) use super::atomics::fence;
use super::atomics::{AtomicU64, Ordering};

/// A 64-bit word that several processes read and write, and that can have any value.
#[derive(Debug)]
#[repr(transparent)]
pub(super) struct Word(AtomicU64);

impl Word {
    #[cfg(test)]
    pub(super) fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    pub(super) fn load(&self) -> u64 {
        reached(self, false);
        let value = self.0.load(Ordering::Acquire);
        found(value);
        value
    }

    pub(super) fn store(&self, value: u64) {
        if reached(self, true) {
            self.0.store(value, Ordering::Release);
            wrote(self, value);
        }
    }

    /// Replaces `old` by `new`; returns `false` if another value was there.
    pub(super) fn replace(&self, old: u64, new: u64) -> bool {
        if !reached(self, true) {
            return true;
        }
        let outcome = self
            .0
            .compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        let replaced = outcome.is_ok();
        found(u64::from(replaced));
        wrote(self, outcome.map_or_else(|other| other, |_| new));
        replaced
    }

    /// Adds to the word, wrapping, and returns the old value.
    pub(super) fn add(&self, value: u64) -> u64 {
        if !reached(self, true) {
            return 0;
        }
        let before = self.0.fetch_add(value, Ordering::AcqRel);
        found(before);
        wrote(self, before.wrapping_add(value));
        before
    }

    /// Stores a value unless it is there already, so that other processors' caches keep the line.
    pub(super) fn publish(&self, value: u64) {
        if self.load() != value {
            self.store(value);
        }
    }
}

/// Runs before a word is read or written. Returns `false` if a test has ended the process, which
/// then writes nothing more.
pub(super) fn reached<T>(word: &T, writes: bool) -> bool {
    #[cfg(test)]
    return super::crash::reached(std::ptr::from_ref(word).addr(), writes);
    #[cfg(not(test))]
    {
        let _ = (word, writes);
        true
    }
}

fn found(value: u64) {
    #[cfg(test)]
    super::crash::found(value);
    #[cfg(not(test))]
    let _ = value;
}

/// Tells a test about a write, which may end the process there.
pub(super) fn wrote<T>(word: &T, value: u64) {
    #[cfg(test)]
    super::crash::wrote(std::ptr::from_ref(word).addr(), value);
    #[cfg(not(test))]
    let _ = (word, value);
}
