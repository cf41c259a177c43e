//! Memory for sequences that are about to outgrow what they have, before they do.
//!
//! All ranges of a sequence end at the same token, and so do those of sequences that began alike:
//! without more, one step would map memory for all of them. A [mapper](crate::Mapper) of the pool is
//! told of them in time. Where there is none, a sequence of several ranges gets memory for one after
//! the other, over the tokens that it has room for still.

use super::KvCache;
use super::sequences::Sequence;
use super::spread::Spread;

impl Sequence {
    /// Whether ranges may be given memory ahead: it ends within `lead` tokens, which is not at
    /// `most`.
    pub(super) const fn is_near(&self, lead: u64, most: u64) -> bool {
        let near = self.tokens + lead > self.room && self.room < most;
        near && (self.spread.given as usize) < self.blocks.len() && !self.cut
    }

    /// Its memory has changed: it is spread anew.
    pub(super) fn spread_anew(&mut self) {
        self.spread = Spread::default();
    }
}

impl KvCache {
    /// Tells the mapper of sequences that are about to enter a new granule: later, after they have,
    /// the pool sees by itself how fast they grow.
    pub(super) fn foresee(&mut self, which: impl Fn(&Sequence) -> bool) {
        let lead = self.geometry.lead();
        let due = |sequence: &&mut Sequence| which(sequence) && sequence.is_due(lead);
        let due = self.sequences.iter_mut().filter(due).flat_map(|sequence| {
            sequence.foreseen = true;
            &sequence.blocks
        });
        let mut due = due.peekable();
        if due.peek().is_some() {
            self.tenant.foresee(due);
        }
    }

    /// Gives the ranges whose turn it is memory ahead of their use. Where it cannot be had it is not
    /// tried again before the sequences have grown, which says what is missing.
    pub(super) fn precommit(&mut self) {
        let (lead, most) = (self.geometry.lead(), self.geometry.shape.max_tokens);
        let mut blocks = vec![];
        for sequence in self.sequences.iter_mut() {
            if sequence.is_near(lead, most) {
                let left = sequence.room.saturating_sub(sequence.tokens);
                let (ranges, phase) = (sequence.blocks.len(), sequence.id.phase());
                let due = sequence.spread.next(left, ranges, phase);
                blocks.extend(sequence.blocks.get(due).into_iter().flatten());
            }
        }
        if blocks.is_empty() || self.tenant.precommit(blocks) {
            return;
        }
        for sequence in self.sequences.iter_mut() {
            if sequence.is_near(lead, most) {
                sequence.spread.end();
            }
        }
    }

    /// Whether memory is committed ahead of sequences here: they have several ranges, and no mapper
    /// does it.
    pub(super) fn spreads(&self) -> bool {
        self.geometry.ranges > 1 && !self.tenant.has_mapper()
    }
}
