//! Memory for sequences that are about to outgrow what they have, before they do.
//!
//! All ranges of a sequence end at the same token, and so do those of sequences that began alike:
//! without more, one step would map memory for all of them. A [mapper](crate::Mapper) of the pool is
//! told of them in time. Where there is none, a sequence of several ranges gets memory for one after
//! the other, over the tokens that it has room for still.

use std::ops::Range;

use super::KvCache;
use super::sequences::Sequence;

/// How many of a sequence's ranges were given memory ahead.
#[derive(Debug, Default)]
pub(super) struct Spread {
    /// The tokens over which that is spread; zero until the sequence comes near its end.
    over: u64,
    given: u32,
}

impl Spread {
    /// The ranges whose turn it is, of a sequence that has room for `left` tokens more. `phase` lets
    /// sequences that are alike take turns.
    fn next(&mut self, left: u64, ranges: usize, phase: u64) -> Range<usize> {
        if self.over == 0 {
            self.over = left;
        }
        let over = u128::from(self.over);
        let gone = u128::from(self.over.saturating_sub(left));
        let phase = u128::from(phase).checked_rem(over).unwrap_or(0);
        let due = (gone * ranges as u128 + phase).checked_div(over);
        let due = u32::try_from(due.unwrap_or(0).min(ranges as u128));
        let begun = self.given;
        self.given = self.given.max(due.unwrap_or(u32::MAX));
        begun as usize..self.given as usize
    }

    /// Nothing more is to be given.
    const fn end(&mut self) {
        self.given = u32::MAX;
    }
}

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

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn each_range_gets_its_turn_before_the_end() {
        for ranges in [2, 64, 100] {
            for over in [1, 7, 64, 256] {
                for phase in [0, 3, 1 << 40] {
                    let mut spread = Spread::default();
                    assert_eq!(spread.next(over, ranges, phase), 0..0);
                    let mut given = 0;
                    for left in (0..over).rev() {
                        let due = spread.next(left, ranges, phase);
                        assert_eq!(due.start, given);
                        given = due.end;
                        let share = ranges.div_ceil(over as usize);
                        assert!(due.len() <= share + 1, "{ranges} over {over}: {due:?}");
                    }
                    assert_eq!(given, ranges);
                }
            }
        }
    }

    #[test]
    fn sequences_that_are_alike_take_turns() {
        let phase = |index: u64| index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let mut sequences: Vec<(Spread, u64)> = (0..256)
            .map(|index| (Spread::default(), phase(index)))
            .collect();
        let mut step = |left| -> usize {
            let due = sequences.iter_mut();
            due.map(|(spread, phase)| spread.next(left, 64, *phase).len())
                .sum()
        };
        step(256);
        let most = (0..256).rev().map(step).max();
        assert!(
            most <= Some(96),
            "{most:?} ranges in a step, where 64 is the mean"
        );
    }

    #[test]
    fn at_the_end_there_is_no_time_to_spread() {
        let mut spread = Spread::default();
        assert_eq!(spread.next(0, 64, 5), 0..0);
    }
}
