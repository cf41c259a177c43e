//! A word of the ledger's file. All reads and writes of the file go through this type.
//!
//! Every build uses the standard library's atomics, since other processes share the words. In unit
//! tests a process can end itself at its nth write, and members can take turns at each access.

use std::iter;

pub(crate) use super::atomics::fence;
use super::atomics::{AtomicU64, Ordering};

/// A 64-bit word that several processes read and write, and that can have any value.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Word(AtomicU64);

impl Word {
    #[cfg(test)]
    pub(crate) fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    pub(crate) fn load(&self) -> u64 {
        reached(self, false);
        let value = self.0.load(Ordering::Acquire);
        found(value);
        value
    }

    pub(crate) fn store(&self, value: u64) {
        if reached(self, true) {
            self.0.store(value, Ordering::Release);
            wrote(self, value);
        }
    }

    /// Replaces `old` by `new`; returns `false` if another value was there.
    pub(crate) fn replace(&self, old: u64, new: u64) -> bool {
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
    pub(crate) fn add(&self, value: u64) -> u64 {
        if !reached(self, true) {
            return 0;
        }
        let before = self.0.fetch_add(value, Ordering::AcqRel);
        found(before);
        wrote(self, before.wrapping_add(value));
        before
    }

    /// Stores a value unless it is there already, so that other processors' caches keep the line.
    pub(crate) fn publish(&self, value: u64) {
        if self.load() != value {
            self.store(value);
        }
    }
}

/// Reads a text of UTF-8 that is padded with zeros.
pub(crate) fn read_text(words: &[Word]) -> String {
    let bytes = words.iter().flat_map(|word| word.load().to_le_bytes());
    let bytes: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
    let text = String::from_utf8_lossy(&bytes);
    // Control characters would reach the terminal of a person who looks at the file.
    text.chars().filter(|char| !char.is_control()).collect()
}

/// Writes a text, cut to the bytes of the words.
pub(crate) fn write_text(words: &[Word], text: &str) {
    let most = (words.len() * 8).min(text.len());
    let length = (0..=most).rev().find(|&at| text.is_char_boundary(at));
    let mut bytes = text
        .bytes()
        .take(length.unwrap_or(0))
        .chain(iter::repeat(0));
    for word in words {
        let value = std::array::from_fn(|_| bytes.next().unwrap_or(0));
        word.store(u64::from_le_bytes(value));
    }
}

/// Runs before a word is read or written. Returns `false` if a test has ended the process, which
/// then writes nothing more.
pub(crate) fn reached<T>(word: &T, writes: bool) -> bool {
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
pub(crate) fn wrote<T>(word: &T, value: u64) {
    #[cfg(test)]
    super::crash::wrote(std::ptr::from_ref(word).addr(), value);
    #[cfg(not(test))]
    let _ = (word, value);
}
