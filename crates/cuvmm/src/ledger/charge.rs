//! Charging the budget that all processes share, without a lock that a dying process could take
//! with it.
//!
//! Each process has one word: its charged granules, its *tentative* granules, and a sequence number
//! that every change advances. A charge has three steps:
//!
//! 1. The process adds granules to its own word as tentative.
//! 2. Behind a sequentially consistent fence it sums the words of all processes, tentative granules
//!    included.
//! 3. If the sum is within the limit, it turns its tentative granules into charged ones; otherwise
//!    it removes them.
//!
//! The charged granules never exceed the limit. Suppose they did, and consider, of all charges that
//! make up that sum, the charge whose fence came last. Every other charge had made its first step
//! before its own fence, so the last charge's sum had all their granules, as tentative or as
//! charged. That sum was above the limit, and the last charge did not commit.
//!
//! Two charges can see each other's tentative granules and both withdraw; they try again. A process
//! that dies or is stopped between the steps leaves tentative granules, which only make other
//! processes more careful. Any process may [remove](discard) tentative granules that it has seen
//! unchanged for a while: the new sequence number then keeps the stopped process from committing
//! them. A refund only lowers the sum.
//!
//! This module uses nothing but words, so that tests can run it on words that explore every order
//! of the processors' reads and writes.
//!
//! Keeps I-70.

use super::word::{Word, fence};
use std::sync::atomic::Ordering;

/// The bits of each count in a word.
pub(super) const COUNT_BITS: u32 = 24;

/// The most granules that a word can count.
pub(super) const MOST: u64 = (1 << COUNT_BITS) - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Count(u64);

impl Count {
    pub(super) const fn of(word: u64) -> Self {
        Self(word)
    }

    pub(super) const fn charged(self) -> u64 {
        self.0 & MOST
    }

    /// Returns the granules of a charge that is not committed yet.
    pub(super) const fn tentative(self) -> u64 {
        (self.0 >> COUNT_BITS) & MOST
    }

    pub(super) const fn total(self) -> u64 {
        self.charged() + self.tentative()
    }

    /// Returns the next word, or `None` if a count does not fit.
    pub(super) const fn next(self, charged: u64, tentative: u64) -> Option<u64> {
        if charged > MOST || tentative > MOST {
            return None;
        }
        let sequence = (self.0 >> (2 * COUNT_BITS)).wrapping_add(1) << (2 * COUNT_BITS);
        Some(sequence | (tentative << COUNT_BITS) | charged)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    Charged,
    /// The limit leaves too little; `left` granules are left.
    Full {
        left: u64,
    },
    /// Tentative granules of another process were in the way. Another attempt may succeed.
    Contended,
}

/// Attempts to charge the process of word `me` with `granules`. Reads `limit` after the tentative
/// granules are visible.
///
/// Only the owner of the word may call this, one call at a time.
pub(super) fn attempt(
    words: &[Word],
    me: usize,
    granules: u64,
    limit: impl FnOnce() -> u64,
) -> Attempt {
    let Some(own) = words.get(me) else {
        return Attempt::Full { left: 0 };
    };
    let found = own.load();
    let before = Count(found);
    let tentative = before.next(before.charged(), granules);
    let committed = before.next(before.charged() + granules, 0);
    let (Some(tentative), Some(_)) = (tentative, committed) else {
        return Attempt::Full { left: 0 };
    };
    if !own.replace(found, tentative) {
        return Attempt::Contended;
    }
    fence(Ordering::SeqCst);
    let (mut sum, mut others_tentative) = (0_u64, 0);
    for (index, word) in words.iter().enumerate() {
        let count = Count(word.load());
        sum = count.total().saturating_add(sum);
        if index != me {
            others_tentative += count.tentative();
        }
    }
    let limit = limit();
    let mine = Count(tentative);
    if sum <= limit {
        let committed = mine.next(before.charged() + granules, 0);
        let committed = committed.is_some_and(|committed| own.replace(tentative, committed));
        return match committed {
            true => Attempt::Charged,
            // Another process took this one for stopped.
            false => Attempt::Contended,
        };
    }
    if let Some(withdrawn) = mine.next(before.charged(), 0) {
        // Otherwise another process has removed them.
        let _ = own.replace(tentative, withdrawn);
    }
    let certain = sum - others_tentative;
    match certain <= limit {
        true => Attempt::Contended,
        false => Attempt::Full {
            left: limit.saturating_add(granules).saturating_sub(certain),
        },
    }
}

/// Refunds granules of a process. Returns the refunded granules: fewer if fewer were charged.
///
/// Only the owner of the word may call this.
pub(super) fn refund(word: &Word, granules: u64) -> u64 {
    loop {
        let found = word.load();
        let count = Count(found);
        let refunded = granules.min(count.charged());
        let after = count.next(count.charged() - refunded, count.tentative());
        if after.is_none_or(|after| word.replace(found, after)) {
            return refunded;
        }
    }
}

/// Removes the tentative granules of a word that still has the value `seen`, after its process died
/// or stopped in the middle of a charge.
pub(super) fn discard(word: &Word, seen: Count) {
    if let Some(after) = seen.next(seen.charged(), 0) {
        let _ = word.replace(seen.0, after);
    }
}

/// Lowers a word to `most` charged granules while `is_whose` says that the word is still that of
/// the owner that left it. Asks after each read of the word: a new owner's charge has another
/// sequence number. Returns `true` if it lowered the word.
///
/// Only the owner of the word may call this, or a process that knows that the owner has ended.
pub(super) fn lower(word: &Word, most: u64, is_whose: impl Fn() -> bool) -> bool {
    loop {
        let found = word.load();
        let count = Count(found);
        let is_less = count.total() > most || count.tentative() > 0;
        let after = count.next(count.charged().min(most), 0);
        let Some(after) = after.filter(|_| is_less && is_whose()) else {
            return false;
        };
        if word.replace(found, after) {
            return true;
        }
    }
}
