//! Statistics of a cache, and how many more tokens fit.

use std::fmt;

use super::KvCache;
use crate::display::{Bytes, Count};
use crate::error::CallError;
use crate::pool::Block;

/// Statistics of a cache. Sizes are in bytes.
///
/// `held = live + padding + precommitted`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct KvCacheStats {
    /// The number of sequences.
    pub sequences: usize,
    /// The number of tokens of all sequences.
    pub tokens: u64,
    /// The bytes of all keys and values. Shared ones count once.
    pub live: u64,
    /// The memory under the sequences. Shared memory counts once.
    pub held: u64,
    /// The part of `held` that several sequences share, as [forks](KvCache::fork) do.
    pub shared: u64,
    /// The part of `held` behind sequences' tokens, because memory comes in granules and extents:
    /// the rest of a sequence's last granule, and of a larger extent that another sequence used
    /// before.
    pub padding: u64,
    /// The part of `held` that was committed ahead of growth and never used. It is reclaimed before
    /// an allocation is refused.
    #[doc(alias = "margin")]
    pub precommitted: u64,
    /// The tenant's memory that is cached, pending free or leased, whatever it was used for. It
    /// serves the next sequence. Other tenants can reclaim it once its fence is complete and its
    /// leases have ended.
    pub idle: u64,
}

impl fmt::Display for KvCacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sequences = Count(self.sequences, "sequence");
        let tokens = Count(self.tokens, "token");
        let (live, held, shared) = (Bytes(self.live), Bytes(self.held), Bytes(self.shared));
        let (precommitted, idle) = (Bytes(self.precommitted), Bytes(self.idle));
        write!(f, "{sequences} of {tokens}: {live} live of {held} held ")?;
        write!(
            f,
            "({shared} shared, {precommitted} precommitted), {idle} idle"
        )
    }
}

/// The number of additional tokens that fit, under three assumptions.
///
/// The figures are in whole granules and consider the pool's limits in bytes, neither its limits in
/// mappings and addresses, which are rarely reached, nor memory of the device that other processes
/// take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Admission {
    /// If no memory is taken from other tenants.
    pub now: Fits,
    /// If all other tenants take as much as they may: what the guarantee leaves. It is available
    /// once the work that idle memory waits for is complete.
    pub at_worst: Fits,
    /// If memory that other tenants have cached above their guarantees is reclaimed.
    pub taking_back: Fits,
}

/// The number of tokens that fit in some memory: in one new sequence, or in all existing ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Fits {
    /// The memory in bytes. [`KvCache::memory_of`] gives the part that a sequence of a certain
    /// length takes.
    pub bytes: u64,
    /// The most tokens of one new sequence. Zero if no more sequences are permitted.
    pub sequence: u64,
    /// The most tokens that can be appended to every existing sequence, each up to its largest
    /// length. Zero if there are none.
    pub each: u64,
}

/// A sequence and the memory that it alone can grow into.
struct Kept {
    tokens: u64,
    /// Sizes of its ranges, and the number of ranges with each. There are few different sizes,
    /// because its ranges are alike.
    ranges: Vec<(u64, u64)>,
}

impl Kept {
    fn add(&mut self, bytes: u64) {
        match self.ranges.iter_mut().find(|(has, _)| *has == bytes) {
            Some((_, count)) => *count += 1,
            None => self.ranges.push((bytes, 1)),
        }
    }
}

impl KvCache {
    /// Returns the current statistics. Makes no driver call.
    #[must_use]
    pub fn stats(&self) -> KvCacheStats {
        let idle = self.tenant.idle();
        let (mut held, mut precommitted, mut revivable) = (0, 0, 0);
        let common = self.tenant.for_each_slot(self.ranges(), |_, under| {
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

    /// Returns how many more tokens fit. The only driver calls are those that query whether work is
    /// complete (`cuEventRecord`, `cuEventQuery`, `cuStreamQuery`), and those that unmap memory
    /// that [forks](Self::fork) have given up.
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
        self.tenant.for_each_slot(self.ranges(), |sequence, under| {
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

    /// Returns the ranges of each sequence, and the bytes of tokens in each.
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

    /// Returns the memory that all sequences take if each grows by `more` tokens.
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

/// Returns the largest number up to `most` for which `fits` is true, if `fits` is monotonic.
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
