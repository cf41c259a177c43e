//! What a cache holds, and how much more fits.

use super::KvCache;
use crate::error::CallError;
use crate::pool::Block;

/// A cache's figures. Sizes in bytes.
///
/// `held = live + padding + precommitted`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvCacheStats {
    /// Sequences that live.
    pub sequences: usize,
    /// Their tokens.
    pub tokens: u64,
    /// What their keys and values take; those that several show, once.
    pub live: u64,
    /// Memory that lies under the sequences; what lies under several, once.
    pub held: u64,
    /// Of that, what lies under several: what [forks](KvCache::fork) have in common.
    pub shared: u64,
    /// Of that, what they have beyond their tokens because memory comes in granules and extents:
    /// the rest of the granule that a sequence ends in, and what it was given of a larger extent
    /// that another sequence had before it.
    pub padding: u64,
    /// Of that, what was put ahead of their growth and never used; given up before anybody is
    /// refused.
    #[doc(alias = "margin")]
    pub precommitted: u64,
    /// What lies ready for the next sequence, and for others who are short of memory: all that the
    /// tenant has idle, whatever it was used for before.
    pub idle: u64,
}

/// How many tokens more fit, from three points of view.
///
/// By whole granules and by the pool's limits of bytes; those of mappings and addresses are far
/// away as a rule, and what other processes take of the device nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Admission {
    /// Without taking anything from another tenant.
    pub now: Fits,
    /// When all other tenants take as much as they may: what the guarantee leaves. It can be had
    /// once the work has passed that idle memory waits for.
    pub at_worst: Fits,
    /// With what other tenants have idle above their guarantees.
    pub taking_back: Fits,
}

/// How many tokens fit into some memory: in one new sequence, or in those that are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fits {
    /// The memory in bytes. What sequences of certain lengths take of it says
    /// [`KvCache::memory_of`].
    pub bytes: u64,
    /// The most tokens that one new sequence can have; zero if there may be no more sequences.
    pub sequence: u64,
    /// The most tokens that can be appended to every sequence that is there, each as far as it may
    /// grow at all; zero if there is none.
    pub each: u64,
}

/// A sequence and what it can grow into that nobody else could have.
struct Kept {
    tokens: u64,
    /// Bytes of its ranges, and how many have so much; few figures, since its ranges are alike.
    ranges: Vec<(u64, u64)>,
}

impl Kept {
    /// Takes a range into account.
    fn add(&mut self, bytes: u64) {
        match self.ranges.iter_mut().find(|(has, _)| *has == bytes) {
            Some((_, count)) => *count += 1,
            None => self.ranges.push((bytes, 1)),
        }
    }
}

impl KvCache {
    /// The figures now. Makes no driver call.
    #[must_use]
    pub fn stats(&self) -> KvCacheStats {
        let idle = self.tenant.idle();
        let (mut held, mut precommitted, mut revivable) = (0, 0, 0);
        let common = self.tenant.look_under(self.ranges(), |_, under| {
            held += under.held;
            precommitted += under.precommitted;
            revivable += under.held - under.precommitted - under.used;
        });
        let tokens = self.tokens();
        let live = tokens * self.geometry.token - common.repeated;
        held += common.held;
        KvCacheStats {
            sequences: self.sequences.count(),
            tokens,
            live,
            held,
            shared: common.held,
            precommitted,
            padding: held.saturating_sub(precommitted).saturating_sub(live),
            idle: idle.saturating_sub(revivable),
        }
    }

    /// How many tokens more fit. Makes no driver call but those that ask whether work has passed
    /// (`cuEventRecord`, `cuEventQuery`, `cuStreamQuery`), and those that unmap what
    /// [forks](Self::fork) have given up.
    ///
    /// # Errors
    /// [`CallError`] from the driver.
    pub fn admission(&self) -> Result<Admission, CallError> {
        let headroom = self.tenant.headroom()?;
        let present = self.sequences.iter().map(|sequence| Kept {
            tokens: sequence.tokens,
            ranges: vec![],
        });
        let mut present: Vec<Kept> = present.collect();
        self.tenant.look_under(self.ranges(), |sequence, under| {
            if let Some(kept) = present.get_mut(sequence) {
                kept.add(under.writable);
            }
        });
        Ok(Admission {
            now: self.fits(headroom.now, &present),
            at_worst: self.fits(headroom.at_worst, &present),
            taking_back: self.fits(headroom.taking_back, &present),
        })
    }

    /// The ranges of each sequence, and the bytes of tokens that each of them has.
    fn ranges(&self) -> impl Iterator<Item = (&[Block], u64)> {
        self.sequences.iter().map(|sequence| {
            let bytes = self.geometry.bytes_of(sequence.tokens);
            (sequence.blocks.as_slice(), bytes)
        })
    }

    fn fits(&self, bytes: u64, present: &[Kept]) -> Fits {
        let most = self.geometry.shape.max_tokens;
        let one_more = self.sequences.count() < self.geometry.shape.max_sequences as usize;
        let sequence = match one_more {
            true => largest(most, |tokens| self.geometry.memory_of(tokens) <= bytes),
            false => 0,
        };
        let longest = present.iter().map(|kept| most - kept.tokens).max();
        Fits {
            bytes,
            sequence,
            each: largest(longest.unwrap_or(0), |more| {
                self.growth_of(present, more) <= bytes
            }),
        }
    }

    /// Memory that every sequence takes by growing.
    fn growth_of(&self, present: &[Kept], more: u64) -> u64 {
        let most = self.geometry.shape.max_tokens;
        let growth = |kept: &Kept| -> u64 {
            let tokens = kept.tokens.saturating_add(more).min(most);
            let range = self.geometry.memory_of_range(tokens);
            let lacking = kept.ranges.iter();
            let lacking =
                lacking.map(|(has, count)| range.saturating_sub(*has).saturating_mul(*count));
            lacking.fold(0, u64::saturating_add)
        };
        present.iter().map(growth).fold(0, u64::saturating_add)
    }
}

/// The largest number up to `most` that fits, where a smaller one fits if a larger one does.
fn largest(most: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, most);
    while low < high {
        let middle = low + (high - low) / 2 + 1;
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn the_largest_that_fits() {
        for bound in 0..20 {
            assert_eq!(largest(12, |n| n <= bound), bound.min(12));
        }
        assert_eq!(largest(u64::MAX, |_| true), u64::MAX);
        assert_eq!(largest(0, |_| true), 0);
    }
}
