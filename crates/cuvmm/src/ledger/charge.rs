//! Charging the budget that all processes share, without a lock that a process could take with it
//! when it dies.
//!
//! Each process has one word: the granules that it was charged, the granules that it is trying to
//! be charged (*tentative*), and a sequence number that every change advances. A charge has three
//! steps:
//!
//! 1. It adds its granules to its own word as tentative.
//! 2. Behind a sequentially consistent fence it sums the words of all processes, tentative granules
//!    included.
//! 3. If the sum is within the limit, it turns its tentative granules into charged ones; otherwise
//!    it removes them.
//!
//! The charged granules never exceed the limit. Suppose they did, and consider, of all charges that
//! make up that sum, the one whose fence came last. Every other one of them had made its first step
//! before its own fence, so the last one's sum had their granules, as tentative or as charged. That
//! sum was above the limit, and the last one did not commit.
//!
//! Two charges can see each other's tentative granules and both withdraw; they try again. A process
//! that dies or is stopped between the steps leaves tentative granules, which only make other
//! processes more careful. Any process may [remove](discard) tentative granules that it has seen
//! unchanged for a while: the word's sequence number then keeps the stopped process from committing
//! them. A refund only lowers the sum.
//!
//! This module uses nothing but words, so that tests can run it on words that explore every order
//! of the processors' reads and writes.

use super::word::{Word, fence};
use std::sync::atomic::Ordering;

const COUNT_BITS: u32 = 24;

/// The most granules that a word can count.
pub(super) const MOST: u64 = (1 << COUNT_BITS) - 1;

/// The value of a process's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Count(u64);

impl Count {
    pub(super) const fn of(word: u64) -> Self {
        Self(word)
    }

    /// Returns the granules that were charged.
    pub(super) const fn charged(self) -> u64 {
        self.0 & MOST
    }

    /// Returns the granules of a charge that has not been committed.
    pub(super) const fn tentative(self) -> u64 {
        (self.0 >> COUNT_BITS) & MOST
    }

    pub(super) const fn total(self) -> u64 {
        self.charged() + self.tentative()
    }

    /// Returns the word that follows this one, or `None` if a count does not fit.
    const fn next(self, charged: u64, tentative: u64) -> Option<u64> {
        if charged > MOST || tentative > MOST {
            return None;
        }
        let sequence = (self.0 >> (2 * COUNT_BITS)).wrapping_add(1) << (2 * COUNT_BITS);
        Some(sequence | (tentative << COUNT_BITS) | charged)
    }
}

/// The outcome of an attempt to charge.
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

/// Attempts to charge the process of word `me` with `granules`. `limit` is read, and `besides`
/// counts what is charged in no process's word, after the tentative granules are visible.
///
/// Only the owner of the word may call this, one call at a time.
pub(super) fn attempt(
    words: &[Word],
    me: usize,
    granules: u64,
    limit: impl FnOnce() -> u64,
    besides: impl FnOnce() -> u64,
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
    let (mut sum, mut others_tentative) = (besides(), 0);
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

/// Refunds granules that the process of this word was charged. Returns what was refunded: less if
/// less was charged.
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

/// Removes the tentative granules of a word that still has the value `seen`. For processes that
/// died or stopped in the middle of a charge.
pub(super) fn discard(word: &Word, seen: Count) {
    if let Some(after) = seen.next(seen.charged(), 0) {
        let _ = word.replace(seen.0, after);
    }
}

/// Removes all that a word counts while `is_whose` says that it is still the word of the owner that
/// left it. Asked after each look at the word: a new owner's charge has another sequence number.
///
/// Only the owner of the word may call this, or a process that knows that the owner has ended.
pub(super) fn clear(word: &Word, is_whose: impl Fn() -> bool) {
    loop {
        let found = word.load();
        let count = Count(found);
        let after = count.next(0, 0).filter(|_| count.total() > 0 && is_whose());
        if after.is_none_or(|after| word.replace(found, after)) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(counts: &[u64]) -> Vec<Word> {
        counts.iter().map(|&count| Word::new(count)).collect()
    }

    fn charge(words: &[Word], me: usize, granules: u64, limit: u64) -> Attempt {
        attempt(words, me, granules, || limit, || 0)
    }

    fn charged(words: &[Word]) -> Vec<u64> {
        words
            .iter()
            .map(|word| Count::of(word.load()).charged())
            .collect()
    }

    #[test]
    fn charges_add_up_to_the_limit_and_no_further() {
        let words = words(&[0, 0, 0]);
        assert_eq!(charge(&words, 0, 6, 10), Attempt::Charged);
        assert_eq!(charge(&words, 2, 5, 10), Attempt::Full { left: 4 });
        assert_eq!(charge(&words, 2, 4, 10), Attempt::Charged);
        assert_eq!(charge(&words, 1, 1, 10), Attempt::Full { left: 0 });
        assert_eq!(charged(&words), [6, 0, 4]);
        assert_eq!(refund(&words[0], 2), 2);
        assert_eq!(charge(&words, 1, 2, 10), Attempt::Charged);
        assert_eq!(charged(&words), [4, 2, 4]);
    }

    #[test]
    fn what_is_counted_besides_leaves_less() {
        let words = words(&[0, 0]);
        let outcome = attempt(&words, 0, 8, || 10, || 3);
        assert_eq!(outcome, Attempt::Full { left: 7 });
        assert_eq!(attempt(&words, 0, 7, || 10, || 3), Attempt::Charged);
    }

    #[test]
    fn tentative_granules_of_another_process_are_in_the_way_until_they_are_removed() {
        let stopped = Count(0).next(2, 5).unwrap();
        let words = words(&[0, stopped]);
        assert_eq!(charge(&words, 0, 5, 10), Attempt::Contended);
        assert_eq!(charge(&words, 0, 9, 10), Attempt::Full { left: 8 });
        assert_eq!(Count(words[0].load()).total(), 0, "withdrawn");
        discard(&words[1], Count(stopped));
        assert_eq!(charge(&words, 0, 5, 10), Attempt::Charged);
        // The stopped process goes on: its commit finds another sequence number.
        let commit = Count(stopped).next(7, 0).unwrap();
        assert!(!words[1].replace(stopped, commit));
        assert_eq!(charged(&words), [5, 2]);
    }

    #[test]
    fn a_word_that_changed_keeps_its_tentative_granules() {
        let first = Count(0).next(0, 5).unwrap();
        let second = Count(first).next(0, 5).unwrap();
        let words = words(&[second]);
        discard(&words[0], Count(first));
        assert_eq!(Count(words[0].load()).tentative(), 5);
    }

    #[test]
    fn counts_that_do_not_fit_are_refused() {
        let words = words(&[0]);
        assert_eq!(
            charge(&words, 0, MOST + 1, u64::MAX >> 1),
            Attempt::Full { left: 0 }
        );
        assert_eq!(charge(&words, 0, MOST, u64::MAX >> 1), Attempt::Charged);
        assert_eq!(
            charge(&words, 0, 1, u64::MAX >> 1),
            Attempt::Full { left: 0 }
        );
        assert_eq!(charge(&words, 9, 1, 10), Attempt::Full { left: 0 });
    }

    #[test]
    fn the_sequence_number_wraps() {
        let last = u64::MAX << (2 * COUNT_BITS);
        assert_eq!(Count(last).next(1, 2), Some((2 << COUNT_BITS) | 1));
    }

    #[test]
    fn no_more_is_refunded_than_was_charged() {
        let words = words(&[3]);
        assert_eq!(refund(&words[0], 5), 3);
        assert_eq!(charged(&words), [0]);
    }

    #[test]
    fn a_cleared_word_counts_nothing() {
        let words = words(&[Count(0).next(4, 5).unwrap()]);
        clear(&words[0], || false);
        assert_eq!(Count(words[0].load()).total(), 9, "it is another owner's");
        clear(&words[0], || true);
        assert_eq!(Count(words[0].load()).total(), 0);
        assert_ne!(words[0].load(), 0, "the sequence goes on");
    }
}
