//! The layout of a group's file: a header with the round, and one slot for each rank.
//!
//! The file has a fixed size and consists of words only, so every content is valid to read. Values
//! are checked where they are used.
//!
//! `unsafe` in this file: the claim that the layout consists of atomics.
#![allow(unsafe_code)]

use crate::ledger::bell::Bell;
use crate::ledger::shared_file::{Contents, SharedFile};
use crate::ledger::word::{Word, read_text, write_text};

/// The most ranks of a group.
pub(super) const MOST_RANKS: u32 = 128;

/// The first word of every group's file: "cuvmmgrp" in ASCII.
pub(super) const MAGIC: u64 = u64::from_be_bytes(*b"cuvmmgrp");

/// The version of the layout. A file of another version is refused.
pub(super) const VERSION: u64 = 1;

pub(super) type GroupFile = SharedFile<Layout>;

#[repr(C)]
pub(super) struct Layout {
    pub(super) header: Header,
    pub(super) slots: [Slot; MOST_RANKS as usize],
}

// SAFETY: the layout consists of words and a bell, which are atomics of at most 8 bytes.
unsafe impl Contents for Layout {
    const KIND: &'static str = "group";
}

#[repr(C)]
pub(super) struct Header {
    /// [`MAGIC`].
    pub(super) magic: Word,
    pub(super) version: Word,
    /// The number of ranks, changed only while no rank is a member.
    pub(super) ranks: Word,
    /// The [`Round`].
    round: Word,
    /// Wakes waiting ranks: a slot or the round has changed.
    pub(super) bell: Bell,
    unused: [Word; 59],
}

/// The part of one rank. Only its owner writes it; a free slot is written by a process that has the
/// lock of joining.
#[repr(C)]
pub(super) struct Slot {
    /// 1 in the low bit if the slot is taken, and above it how often it was taken.
    pub(super) state: Word,
    pub(super) pid: Word,
    /// When the process started, in clock ticks since boot, or 0 if it could not be read.
    pub(super) started: Word,
    /// A number for the namespaces of `pid` and `started`.
    pub(super) namespace: Word,
    /// The [`At`].
    at: Word,
    /// A hash of the operation, all of it.
    pub(super) digest: Word,
    operation: [Word; 32],
    /// The reason why the rank's own half failed.
    reason: [Word; 64],
    unused: [Word; 26],
}

const _: () = {
    assert!(size_of::<Header>() == 512);
    assert!(size_of::<Slot>() == 1024);
};

/// One operation of a group, by number, and its decision. All of it is one word, so the decision is
/// made once, and all ranks see the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) number: u32,
    pub(super) decision: Decision,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Open,
    Finish,
    /// The cause, and the rank that it lies with.
    Undo(Cause, u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    Failed,
    Ended,
    NotJoined,
    NotCalled,
    NotReady,
    OtherOperation,
}

impl Cause {
    const ALL: [Self; 6] = [
        Self::Failed,
        Self::Ended,
        Self::NotJoined,
        Self::NotCalled,
        Self::NotReady,
        Self::OtherOperation,
    ];
}

impl Round {
    fn word(self) -> u64 {
        let (code, rank) = match self.decision {
            Decision::Open => (0, 0),
            Decision::Finish => (1, 0),
            Decision::Undo(cause, rank) => (2 + cause as u64, rank),
        };
        u64::from(self.number) << 32 | code << 16 | u64::from(rank)
    }

    /// Returns `None` for a word that no rank writes.
    fn of(word: u64) -> Option<Self> {
        let rank = (word & 0xffff) as u32;
        let decision = match word >> 16 & 0xffff {
            0 => Decision::Open,
            1 => Decision::Finish,
            code => {
                let cause = usize::try_from(code - 2).ok();
                Decision::Undo(*Cause::ALL.get(cause?)?, rank)
            }
        };
        let number = (word >> 32) as u32;
        let round = Self { number, decision };
        // A word with other bits would never be replaced.
        (round.word() == word).then_some(round)
    }
}

impl Header {
    /// # Errors
    /// The word, if no rank writes such a one.
    pub(super) fn round(&self) -> Result<Round, u64> {
        let word = self.round.load();
        Round::of(word).ok_or(word)
    }

    /// Returns `false` if another round was there.
    pub(super) fn replace_round(&self, old: Round, new: Round) -> bool {
        let replaced = self.round.replace(old.word(), new.word());
        self.bell.ring();
        replaced
    }
}

/// The last round that a rank has entered, and how far it has come there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) number: u32,
    pub(super) step: Step,
}

/// A rank's step in a round, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    /// It has entered no round.
    None,
    /// It has entered, and may be preparing.
    Came,
    /// Its half is prepared: it does what is decided.
    Ready,
    /// Its half has failed.
    Failed,
    /// It has read the decision, and the other ranks' reasons.
    Left,
}

impl Slot {
    pub(super) fn at(&self) -> At {
        let word = self.at.load();
        let step = match word & 0xffff_ffff {
            1 => Step::Came,
            2 => Step::Ready,
            3 => Step::Failed,
            4 => Step::Left,
            _ => Step::None,
        };
        At {
            number: (word >> 32) as u32,
            step,
        }
    }

    pub(super) fn set_at(&self, at: At) {
        self.at.store(u64::from(at.number) << 32 | at.step as u64);
    }

    pub(super) fn operation(&self) -> String {
        read_text(&self.operation)
    }

    pub(super) fn set_operation(&self, text: &str) {
        write_text(&self.operation, text);
        self.digest.store(digest(text));
    }

    pub(super) fn reason(&self) -> String {
        read_text(&self.reason)
    }

    pub(super) fn set_reason(&self, text: &str) {
        write_text(&self.reason, text);
    }

    pub(super) fn pid(&self) -> u32 {
        u32::try_from(self.pid.load()).unwrap_or(0)
    }
}

pub(super) const fn is_taken(state: u64) -> bool {
    state & 1 == 1
}

/// The FNV-1a hash of a text, which is the same in all builds.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_a_round_is_read_as_it_was_written() {
        let undo = |cause| Decision::Undo(cause, MOST_RANKS - 1);
        let decisions = [Decision::Open, Decision::Finish];
        for decision in decisions.into_iter().chain(Cause::ALL.map(undo)) {
            for number in [0, 7, u32::MAX] {
                let round = Round { number, decision };
                assert_eq!(Round::of(round.word()), Some(round));
            }
        }
        for word in [3, 1 << 16 | 1, 8 << 16, u64::MAX] {
            assert_eq!(Round::of(word), None);
        }
    }
}
