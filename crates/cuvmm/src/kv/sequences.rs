//! The sequences of a cache, by numbers that are never reused.

use std::fmt;

use super::TOKENS;
use super::spread::Spread;
use crate::error::{ArgumentError, BlockError, KvCacheError};
use crate::pool::Block;

/// The name of a sequence. Its number is never reused, in any cache of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId {
    index: u32,
    number: u64,
}

impl SequenceId {
    /// Returns the number of the sequence, as shown in errors.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.number
    }

    pub(super) const fn failed(self, cause: BlockError) -> KvCacheError {
        KvCacheError::Block {
            sequence: self.number,
            cause,
        }
    }

    /// Returns a number whose remainder, for any modulus, spreads the sequences of a cache.
    pub(super) fn phase(self) -> u64 {
        // Fibonacci hashing: consecutive indices are mapped far apart.
        u64::from(self.index).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32
    }
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.number)
    }
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) tokens: u64,
    /// The number of tokens that fit in its blocks without growth.
    pub(super) room: u64,
    /// The mapper was notified that it grows.
    pub(super) growth_notified: bool,
    /// The ranges that have precommitted memory.
    pub(super) spread: Spread,
    /// The number of tokens whose rows may be shared with another sequence.
    pub(super) fixed: u64,
    /// It was truncated within those tokens: the memory after its last token may be shared, and
    /// must not be used.
    pub(super) cut: bool,
    pub(super) blocks: Vec<Block>,
}

impl Sequence {
    pub(super) const fn needs_growth(&self) -> bool {
        self.tokens > self.room
    }

    /// Returns an error if `tokens` is zero or more than it has.
    pub(super) fn check_tokens(&self, tokens: u64) -> Result<(), KvCacheError> {
        ArgumentError::not_zero(TOKENS, tokens)?;
        match tokens <= self.tokens {
            true => Ok(()),
            false => Err(self.beyond_end(tokens)),
        }
    }

    pub(super) const fn beyond_end(&self, tokens: u64) -> KvCacheError {
        KvCacheError::BeyondEnd {
            sequence: self.id.number,
            tokens,
            held: self.tokens,
        }
    }

    /// Returns `true` if its blocks must grow within `lead` more tokens and the mapper was not
    /// notified.
    pub(super) const fn is_due(&self, lead: u64) -> bool {
        !self.growth_notified && self.tokens + lead > self.room
    }
}

#[derive(Debug, Default)]
pub(super) struct Sequences {
    places: Vec<Option<Sequence>>,
    vacant: Vec<u32>,
}

impl Sequences {
    pub(super) const fn count(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.places.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.places.iter_mut().flatten()
    }

    pub(super) fn get(&self, id: SequenceId) -> Result<&Sequence, KvCacheError> {
        let place = self.places.get(id.index as usize);
        let sequence = place.and_then(Option::as_ref);
        sequence.filter(|found| found.id == id).ok_or(gone(id))
    }

    pub(super) fn get_mut(&mut self, id: SequenceId) -> Result<&mut Sequence, KvCacheError> {
        let place = self.places.get_mut(id.index as usize);
        let sequence = place.and_then(Option::as_mut);
        sequence.filter(|found| found.id == id).ok_or(gone(id))
    }

    /// Inserts a sequence under a number that was never used.
    pub(super) fn insert(
        &mut self,
        number: u64,
        tokens: u64,
        room: u64,
        blocks: Vec<Block>,
    ) -> Result<SequenceId, KvCacheError> {
        let index = match self.vacant.pop() {
            Some(index) => index,
            None => {
                let held = self.places.len();
                let index = u32::try_from(held);
                let index = index.map_err(|_| ArgumentError::TooLarge {
                    what: "sequences",
                    value: held as u64,
                    most: u32::MAX.into(),
                })?;
                self.places.push(None);
                index
            }
        };
        let id = SequenceId { index, number };
        if let Some(place) = self.places.get_mut(index as usize) {
            *place = Some(Sequence {
                id,
                tokens,
                room,
                growth_notified: false,
                spread: Spread::default(),
                fixed: 0,
                cut: false,
                blocks,
            });
        }
        Ok(id)
    }

    pub(super) fn remove(&mut self, id: SequenceId) -> Result<Sequence, KvCacheError> {
        let place = self.places.get_mut(id.index as usize);
        let found = place.filter(|place| place.as_ref().is_some_and(|found| found.id == id));
        let sequence = found.and_then(Option::take).ok_or(gone(id))?;
        self.vacant.push(id.index);
        Ok(sequence)
    }
}

const fn gone(id: SequenceId) -> KvCacheError {
    KvCacheError::NoSuchSequence(id.number)
}
