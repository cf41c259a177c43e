//! The layout of the ledger's file: a header, a charge and a ticket for each process, one slot for
//! each process, and one entry for each exported block.
//!
//! Charges and tickets lie apart from the slots because every charge reads all of them. The file
//! has a fixed size and consists of words only, so every content is valid to read. Values are
//! checked where they are used.

use super::bell::Bell;
use super::charge::{COUNT_BITS, Count, MOST};
use super::word::{Word, read_text, write_text};

pub(super) const SLOTS: usize = 128;

/// The first word of every ledger: "cuvmmlgr" in ASCII.
pub(super) const MAGIC: u64 = u64::from_be_bytes(*b"cuvmmlgr");

/// The version of the layout. A ledger of another version is refused.
pub(super) const VERSION: u64 = 7;

pub(super) const EXPORTS: usize = 256;

/// In bytes.
pub(super) const NAME: usize = 64;

#[repr(C)]
pub(super) struct Layout {
    pub(super) header: Header,
    /// See [`charge`](super::charge).
    pub(super) charges: [Word; SLOTS],
    /// The number of each process's oldest waiting request, 0 if none waits. Lower numbers wait
    /// longer.
    pub(super) tickets: [Word; SLOTS],
    pub(super) slots: [Slot; SLOTS],
    pub(super) exports: [Export; EXPORTS],
}

#[repr(C)]
pub(super) struct Header {
    /// [`MAGIC`], written last when the file is made.
    pub(super) magic: Word,
    pub(super) version: Word,
    /// In bytes.
    pub(super) granule: Word,
    pub(super) device: [Word; 2],
    /// The limit that the processes have [agreed](Agreed) on.
    pub(super) agreed: Word,
    /// The number given to the last waiting request; see [`Layout::tickets`].
    pub(super) last_ticket: Word,
    /// Wakes the ledger threads: a process needs memory.
    pub(super) wanted: Bell,
    /// Wakes waiting requests: a process refunded memory.
    pub(super) given: Bell,
    /// Nanoseconds in which at least one process has waited for memory, added by the process with
    /// the oldest request; see [`stall`](super::stall).
    pub(super) stalled: Word,
    /// Nanoseconds in which each running process with memory was stalled in full.
    pub(super) stalled_full: Word,
    pub(super) unused: [Word; 53],
}

/// The part that belongs to one process. Only the holder of the slot's lock writes it, except for
/// the state of a slot whose owner is dead. In a free slot the other words mean nothing.
#[repr(C)]
pub(super) struct Slot {
    /// [`State`] in the low byte, and above it how often the slot was taken (its generation).
    pub(super) state: Word,
    pub(super) pid: Word,
    /// When the process started, in clock ticks since boot (field 22 of `/proc/PID/stat`), or 0 if
    /// it could not read that field.
    pub(super) started: Word,
    /// A number for the namespaces of `pid` and `started`.
    pub(super) pid_namespace: Word,
    pub(super) uid: Word,
    /// Granules that the process always keeps charged.
    pub(super) guarantee: Word,
    pub(super) limit: Word,
    /// An `i64`. Of processes equally far above their guarantees, lower priorities release first.
    pub(super) priority: Word,
    /// Bytes that the process's pools have from the driver. The driver's memory pools count with
    /// what they were last seen to hold.
    pub(super) obtained: Word,
    /// Granules that the process could release without waiting, as it last found.
    pub(super) idle: Word,
    /// Granules that the waiting request lacks.
    pub(super) want: Word,
    /// Advanced while the request waits, so that other processes notice its end.
    pub(super) renewed: Word,
    /// How often the waiting request has asked other processes for memory.
    pub(super) round: Word,
    /// Nanoseconds in which at least one request of the process has waited for memory.
    pub(super) stalled: Word,
    /// Advanced at least once a second by a process that runs.
    pub(super) beat: Word,
    /// UTF-8, padded with zeros.
    pub(super) name: [Word; NAME / 8],
    /// Bytes of the device that no pool of the ledger has, as the process last measured.
    pub(super) foreign: Word,
    /// Bytes that pools of the ledger can have, as the process last measured; 0 if it has not.
    pub(super) usable: Word,
    /// Milliseconds after the end of the process for which the driver may still have its memory.
    pub(super) lingers: Word,
    /// 0 if the process is not stalled, 1 if some of its requests wait, 2 if it is stalled in full.
    /// See [`stall`](super::stall).
    pub(super) stall: Word,
    /// Nanoseconds in which the process was stalled in full.
    pub(super) stalled_full: Word,
    /// Nanoseconds for which the oldest waiting request had waited when it last tried.
    pub(super) waited: Word,
    pub(super) averages: [Word; 6],
    /// The averages of the ledger's stall times, as this process has computed them.
    pub(super) ledger_averages: [Word; 6],
    /// How often the process has computed the averages.
    pub(super) averaged: Word,
    /// Granules that were charged past waiting requests; see [`passing`](super::passing).
    pub(super) passed: Word,
    pub(super) unused: [Word; 21],
}

/// See [`exports`](super::exports).
#[repr(C)]
pub(super) struct Export {
    /// The kind of the entry, its owner's slot, how often the closed entry was named, and how often the
    /// entry was taken.
    pub(super) state: Word,
    /// The granules of the block, written by its owner only.
    pub(super) granules: Word,
    /// One bit for each slot in the low halves, sequence numbers in the high ones.
    pub(super) holders: [Word; SLOTS / 32],
    pub(super) unused: [Word; 2],
}

const _: () = {
    assert!(size_of::<Export>() == 64);
    assert!(size_of::<Header>() == 512);
    assert!(size_of::<Slot>() == 512);
};

/// In bytes.
#[cfg(test)]
pub(super) const SIZE: u64 = size_of::<Layout>() as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Live,
    /// The owner is dead or has released its lock, and the driver may still have its memory.
    Dying,
    /// The owner has left or ended, and other processes have memory that it exported.
    Lending,
}

impl Layout {
    /// Returns the bytes that the pools of a slot's process have from the driver, or, for a lending
    /// slot, those that other processes have.
    pub(super) fn obtained(&self, index: usize) -> u64 {
        let (Some(slot), Some(charge)) = (self.slots.get(index), self.charges.get(index)) else {
            return 0;
        };
        match slot.state().0 {
            State::Free => 0,
            State::Live | State::Dying => slot.obtained.load(),
            State::Lending => {
                let granules = Count::of(charge.load()).charged();
                granules.saturating_mul(self.header.granule.load())
            }
        }
    }
}

/// The word of the limit: the most granules that all processes together may be charged, and above
/// that number how often a process has joined. See [`joining`](super::joining).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Agreed(u64);

impl Agreed {
    pub(super) const fn of(word: u64) -> Self {
        Self(word)
    }

    pub(super) const fn limit(self) -> u64 {
        self.0 & MOST
    }
}

impl Header {
    pub(super) fn agreed(&self) -> Agreed {
        Agreed::of(self.agreed.load())
    }

    pub(super) fn limit(&self) -> u64 {
        self.agreed().limit()
    }

    /// Replaces the limit; returns `false` if the word was not `found`.
    pub(super) fn set_limit(&self, found: Agreed, granules: u64) -> bool {
        let joined = found.0 & !MOST;
        self.agreed.replace(found.0, joined | granules.min(MOST))
    }

    /// Counts a process that has joined. Returns the limit.
    pub(super) fn count_in(&self) -> u64 {
        Agreed::of(self.agreed.add(1 << COUNT_BITS)).limit()
    }
}

impl Slot {
    /// Returns the state, and how often the slot was taken. An unknown value counts as free: the
    /// charge of a slot counts in any state.
    pub(super) fn state(&self) -> (State, u64) {
        let word = self.state.load();
        let state = match word & 0xff {
            1 => State::Live,
            2 => State::Dying,
            3 => State::Lending,
            _ => State::Free,
        };
        (state, word >> 8)
    }

    pub(super) fn set_state(&self, state: State, generation: u64) {
        self.state.store(state_word((state, generation)));
    }

    pub(super) fn replace_state(&self, from: (State, u64), to: (State, u64)) -> bool {
        self.state.replace(state_word(from), state_word(to))
    }

    pub(super) fn name(&self) -> String {
        read_text(&self.name)
    }

    pub(super) fn set_name(&self, name: &str) {
        write_text(&self.name, name);
    }
}

const fn state_word((state, generation): (State, u64)) -> u64 {
    let state = match state {
        State::Free => 0,
        State::Live => 1,
        State::Dying => 2,
        State::Lending => 3,
    };
    (generation << 8) | state
}

/// Returns the beginning of a new file; the rest is zeros.
pub(super) fn first_bytes(granule: u64, device: [u8; 16]) -> [u8; 40] {
    let [high, low] = uuid_words(device);
    let mut bytes = [0; 40];
    for (bytes, word) in bytes
        .chunks_exact_mut(8)
        .zip([MAGIC, VERSION, granule, high, low])
    {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

pub(super) const fn uuid_words(uuid: [u8; 16]) -> [u64; 2] {
    let both = u128::from_be_bytes(uuid);
    [(both >> 64) as u64, both as u64]
}

impl Header {
    /// Returns the UUID of the device.
    pub(super) fn uuid(&self) -> [u8; 16] {
        let [high, low] = [&self.device[0], &self.device[1]].map(|word| u128::from(word.load()));
        (high << 64 | low).to_be_bytes()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A slot as in a new file.
    pub(crate) fn slot() -> Box<Slot> {
        let word = || Word::new(0);
        Box::new(Slot {
            state: word(),
            pid: word(),
            started: word(),
            pid_namespace: word(),
            uid: word(),
            guarantee: word(),
            limit: word(),
            priority: word(),
            obtained: word(),
            idle: word(),
            want: word(),
            renewed: word(),
            round: word(),
            stalled: word(),
            beat: word(),
            foreign: word(),
            usable: word(),
            lingers: word(),
            stall: word(),
            stalled_full: word(),
            waited: word(),
            averages: std::array::from_fn(|_| word()),
            ledger_averages: std::array::from_fn(|_| word()),
            averaged: word(),
            passed: word(),
            name: std::array::from_fn(|_| word()),
            unused: std::array::from_fn(|_| word()),
        })
    }

    #[test]
    fn a_name_is_cut_between_characters_and_shown_without_control_characters() {
        let slot = slot();
        slot.set_name(&"é".repeat(40));
        assert_eq!(slot.name(), "é".repeat(32));
        slot.set_name("a\u{1b}[31mb");
        assert_eq!(slot.name(), "a[31mb");
        slot.name[0].store(u64::from_le_bytes(*b"ok\xff\xfe\0\0\0\0"));
        assert_eq!(slot.name(), "ok\u{fffd}\u{fffd}");
    }

    #[test]
    fn a_state_that_is_none_is_free() {
        let slot = slot();
        let states = [State::Live, State::Dying, State::Lending, State::Free];
        for (state, generation) in states.into_iter().zip(6..) {
            slot.set_state(state, generation);
            assert_eq!(slot.state(), (state, generation));
        }
        let (dying, free) = ((State::Dying, 9), (State::Free, 10));
        assert!(!slot.replace_state(dying, free), "it is free");
        assert!(slot.replace_state((State::Free, 9), dying) && slot.replace_state(dying, free));
        assert!(!slot.replace_state(dying, free), "another generation");
        assert_eq!(slot.state(), free);
        slot.state.store(u64::MAX);
        assert_eq!(slot.state().0, State::Free);
    }

    #[test]
    fn a_file_fits_in_few_pages() {
        assert_eq!(SIZE, 512 + 2 * 8 * 128 + 128 * 512 + 256 * 64);
    }
}
