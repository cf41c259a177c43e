//! Memory for sequences that are about to outgrow what they have.
//!
//! All ranges of a sequence end at the same token, as do those of sequences that began alike:
//! without precommit one step would map memory for all of them. A [mapper](crate::Mapper) of the
//! pool is notified in time. Without a mapper, the ranges get memory in turn, over the tokens that
//! still fit.

use super::KvCache;
use super::sequences::Sequence;
use super::spread::Spread;

impl Sequence {
    /// Returns `true` if ranges may get precommitted memory: the end of the sequence's memory is
    /// within `lead` tokens, and is not at `most`.
    pub(super) const fn is_near(&self, lead: u64, most: u64) -> bool {
        let near = self.tokens + lead > self.room && self.room < most;
        near && (self.spread.given as usize) < self.blocks.len() && !self.cut
    }

    /// Restarts the spreading after the sequence's memory has changed.
    pub(super) fn spread_anew(&mut self) {
        self.spread = Spread::default();
    }
}

impl KvCache {
    /// Notifies the mapper of sequences that are about to enter a new granule for the first time.
    /// After that the pool observes their growth itself.
    pub(super) fn notify_growth(&mut self, which: impl Fn(&Sequence) -> bool) {
        let lead = self.geometry.lead();
        let due = |sequence: &&mut Sequence| which(sequence) && sequence.is_due(lead);
        let due = self.sequences.iter_mut().filter(due).flat_map(|sequence| {
            sequence.growth_notified = true;
            &sequence.blocks
        });
        let mut due = due.peekable();
        if due.peek().is_some() {
            self.tenant.notify_growth(due);
        }
    }

    /// Precommits memory for the ranges whose turn it is. After a failure it is tried again only
    /// when the sequences have grown; that growth reports what is missing.
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

    /// Returns `true` if this cache precommits memory itself: its sequences have several ranges,
    /// and the pool has no mapper.
    pub(super) fn spreads(&self) -> bool {
        self.geometry.ranges > 1 && !self.tenant.has_mapper()
    }
}
