//! Spreading of precommits over the tokens that still fit in a sequence.

use std::ops::Range;

/// The number of a sequence's ranges that have precommitted memory.
#[derive(Debug, Default)]
pub(super) struct Spread {
    /// The number of tokens over which the precommits are spread. Zero until the sequence comes
    /// near its end.
    over: u64,
    pub(super) given: u32,
}

impl Spread {
    /// Returns the ranges whose turn it is, for a sequence in which `left` more tokens fit. `phase`
    /// makes sequences that are alike take turns.
    pub(super) fn next(&mut self, left: u64, ranges: usize, phase: u64) -> Range<usize> {
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

    pub(super) const fn end(&mut self) {
        self.given = u32::MAX;
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
