//! Tests of [`charge`](super::charge). They are in a file of their own because `tests/ledger_loom.rs`
//! includes that module.

use super::charge::{Attempt, COUNT_BITS, Count, MOST, attempt, discard, lower, refund};
use super::word::Word;

fn words(counts: &[u64]) -> Vec<Word> {
    counts.iter().map(|&count| Word::new(count)).collect()
}

fn charge(words: &[Word], me: usize, granules: u64, limit: u64) -> Attempt {
    attempt(words, me, granules, || limit)
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
fn tentative_granules_of_another_process_are_in_the_way_until_they_are_removed() {
    let stopped = Count::of(0).next(2, 5).unwrap();
    let words = words(&[0, stopped]);
    assert_eq!(charge(&words, 0, 5, 10), Attempt::Contended);
    assert_eq!(charge(&words, 0, 9, 10), Attempt::Full { left: 8 });
    assert_eq!(Count::of(words[0].load()).total(), 0, "withdrawn");
    discard(&words[1], Count::of(stopped));
    assert_eq!(charge(&words, 0, 5, 10), Attempt::Charged);
    // The stopped process goes on: its commit finds another sequence number.
    let commit = Count::of(stopped).next(7, 0).unwrap();
    assert!(!words[1].replace(stopped, commit));
    assert_eq!(charged(&words), [5, 2]);
}

#[test]
fn a_word_that_changed_keeps_its_tentative_granules() {
    let first = Count::of(0).next(0, 5).unwrap();
    let second = Count::of(first).next(0, 5).unwrap();
    let words = words(&[second]);
    discard(&words[0], Count::of(first));
    assert_eq!(Count::of(words[0].load()).tentative(), 5);
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
    assert_eq!(Count::of(last).next(1, 2), Some((2 << COUNT_BITS) | 1));
}

#[test]
fn no_more_is_refunded_than_was_charged() {
    let words = words(&[3]);
    assert_eq!(refund(&words[0], 5), 3);
    assert_eq!(charged(&words), [0]);
}

#[test]
fn a_cleared_word_counts_nothing() {
    let words = words(&[Count::of(0).next(4, 5).unwrap()]);
    lower(&words[0], 0, || false);
    assert_eq!(
        Count::of(words[0].load()).total(),
        9,
        "it is another owner's"
    );
    lower(&words[0], 0, || true);
    assert_eq!(Count::of(words[0].load()).total(), 0);
    assert_ne!(words[0].load(), 0, "the sequence goes on");
}
