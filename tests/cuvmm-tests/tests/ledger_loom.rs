//! The memory order of a ledger's charges, under every order of reads and writes that the memory
//! model allows.
//!
//! loom runs the very code of `src/ledger/charge.rs` and `word.rs`, on its own atomics. Without the
//! fence of a charge, `no_two_charges_exceed_the_limit` fails.
#![allow(dead_code, clippy::redundant_pub_crate)]

#[path = "../../../crates/cuvmm/src/ledger/charge.rs"]
mod charge;
#[path = "../../../crates/cuvmm/src/ledger/word.rs"]
mod word;

mod crash {
    pub(super) fn reached(_: usize, _: bool) -> bool {
        true
    }

    pub(super) fn found(_: u64) {}

    pub(super) fn wrote(_: usize, _: u64) {}
}

use charge::{Attempt, Count};
use loom::sync::Arc;
use loom::sync::atomic as atomics;
use loom::thread;
use word::Word;

const LIMIT: u64 = 10;

fn model(preemptions: Option<usize>, run: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(run);
}

fn words(counts: &[u64]) -> Arc<Vec<Word>> {
    Arc::new(counts.iter().map(|&charged| Word::new(charged)).collect())
}

fn charge(words: &[Word], me: usize, granules: u64) -> Attempt {
    charge::attempt(words, me, granules, || LIMIT)
}

fn charged(words: &[Word]) -> u64 {
    let counts = words.iter().map(|word| Count::of(word.load()));
    counts.map(Count::charged).sum()
}

#[test]
fn no_two_charges_exceed_the_limit() {
    model(None, || {
        let words = words(&[0, 0]);
        let other = Arc::clone(&words);
        let other = thread::spawn(move || charge(&other, 1, 6));
        let mine = charge(&words, 0, 6);
        let both = [mine, other.join().unwrap()];
        let granted = both.iter().filter(|it| **it == Attempt::Charged).count() as u64;
        assert!(granted <= 1, "{both:?}");
        assert_eq!(charged(&words), 6 * granted);
        assert_eq!(Count::of(words[0].load()).tentative(), 0);
    });
}

#[test]
fn of_three_charges_no_more_succeed_than_fit() {
    model(Some(2), || {
        let words = words(&[0, 0, 0]);
        let others = [1, 2].map(|me| {
            let words = Arc::clone(&words);
            thread::spawn(move || charge(&words, me, 4))
        });
        charge(&words, 0, 4);
        for other in others {
            other.join().unwrap();
        }
        assert!(charged(&words) <= LIMIT);
    });
}

#[test]
fn tentative_granules_that_were_removed_are_not_committed() {
    model(None, || {
        let words = words(&[0, 0]);
        let other = Arc::clone(&words);
        let other = thread::spawn(move || {
            let found = Count::of(other[0].load());
            if found.tentative() > 0 {
                charge::discard(&other[0], found);
            }
            charge(&other, 1, 6)
        });
        let mine = charge(&words, 0, 6);
        let both = [mine, other.join().unwrap()];
        assert!(charged(&words) <= LIMIT, "{both:?}");
        let granted = both.iter().filter(|it| **it == Attempt::Charged).count() as u64;
        assert_eq!(charged(&words), 6 * granted);
    });
}

#[test]
fn a_refund_beside_a_charge_leaves_what_both_say() {
    model(None, || {
        let words = words(&[6, 0]);
        let other = Arc::clone(&words);
        let other = thread::spawn(move || charge(&other, 1, 6));
        assert_eq!(charge::refund(&words[0], 5), 5);
        let granted = other.join().unwrap() == Attempt::Charged;
        assert_eq!(charged(&words), 1 + 6 * u64::from(granted));
    });
}
