//! Traces made by a law of sizes.
//!
//! All laws have one rule: before an allocation that would exceed the cap of live bytes, live
//! allocations are freed, each chosen uniformly at random, until it fits. Random numbers come from
//! SplitMix64 with the seed: first the size, then the stream, then the victims. A number below `n`
//! is a remainder by `n`; a number in 0..1 has the upper 53 bits. Sizes are cut to multiples of 512
//! bytes.

use rand::{Rng as _, SeedableRng as _};
use rand_xoshiro::SplitMix64;

use super::trace::{Operation, Trace};

const MIB: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Law {
    /// 1 to 512 MiB, each size as likely as any other; 32 GiB live, 4,000 allocations
    #[default]
    Uniform,
    /// From 8 to 512 MiB in even steps, each times 0.75 to 1.25; 32 GiB live, 4,000 allocations
    Growing,
    /// Log-normal about 1 MiB with a standard deviation of 1.5 in the logarithm, at most 64 MiB;
    /// 4 GiB live, 40,000 allocations
    Small,
    /// Lengths of 128 to 4,096 tokens, times 16, 64 or 128 KiB; 48 GiB live, 4,000 allocations
    Sequences,
    /// 1 to 512 MiB as in `uniform`, on four streams whose shares move; 32 GiB live, 4,000
    /// allocations
    Streams,
}

struct Random(SplitMix64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.next_u64() % bound
    }

    /// Returns a number in 0..1.
    fn fraction(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a normally distributed number (Box-Muller, the cosine).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.fraction().max(1e-12).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.fraction()).cos()
    }
}

impl Law {
    /// Returns the cap of live bytes and the number of allocations.
    const fn bounds(self) -> (u64, u64) {
        match self {
            Self::Uniform | Self::Growing | Self::Streams => (32 << 30, 4_000),
            Self::Small => (4 << 30, 40_000),
            Self::Sequences => (48 << 30, 4_000),
        }
    }

    /// Returns a size at `progress` (0 to 1) of the trace.
    fn size(self, random: &mut Random, progress: f64) -> u64 {
        let size = match self {
            Self::Uniform | Self::Streams => MIB + random.below(511 * MIB),
            Self::Growing => {
                let even = 504.0_f64.mul_add(progress, 8.0);
                (even * 0.5_f64.mul_add(random.fraction(), 0.75) * MIB as f64) as u64
            }
            Self::Small => {
                let size = (1.5 * random.normal()).exp() * MIB as f64;
                (size as u64).min(64 * MIB)
            }
            Self::Sequences => {
                let tokens = 128 + random.below(3_969);
                let kib = [16, 64, 128][random.below(3) as usize];
                tokens * (kib << 10)
            }
        };
        (size / 512 * 512).max(512)
    }

    /// Returns the stream of allocation `at` of `count`. The trace has eight phases of equal
    /// length. In phase p, three of four allocations are on stream p modulo 4, and the others on
    /// one of the other three.
    fn stream(self, random: &mut Random, at: u64, count: u64) -> u64 {
        if self != Self::Streams {
            return 0;
        }
        let phase = at * 8 / count;
        let further = match random.below(4) {
            0..3 => 0,
            _ => 1 + random.below(3),
        };
        (phase + further) % 4
    }

    pub(super) fn trace(self, seed: u64) -> Trace {
        let mut random = Random(SplitMix64::seed_from_u64(seed));
        let (cap, count) = self.bounds();
        let mut trace = Trace::default();
        let (mut live, mut bytes): (Vec<(u64, u64)>, u64) = (Vec::new(), 0);
        for id in 0..count {
            let size = self.size(&mut random, id as f64 / count as f64);
            let stream = self.stream(&mut random, id, count);
            while bytes + size > cap && !live.is_empty() {
                let victim = random.below(live.len() as u64) as usize;
                let (id, size) = live.swap_remove(victim);
                bytes -= size;
                trace.operations.push(Operation::Free { id });
            }
            trace
                .operations
                .push(Operation::Allocate { id, size, stream });
            live.push((id, size));
            bytes += size;
        }
        trace
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn a_seed_makes_one_trace_within_the_cap() {
        for law in Law::value_variants() {
            let (first, again) = (law.trace(1), law.trace(1));
            assert_eq!(first.operations, again.operations, "{law:?}");
            assert_ne!(first.operations, law.trace(2).operations, "{law:?}");
            let mut sizes = std::collections::HashMap::new();
            let (mut live, mut peak) = (0, 0);
            for operation in first.operations {
                match operation {
                    Operation::Allocate { id, size, .. } => {
                        sizes.insert(id, size);
                        live += size;
                    }
                    Operation::Free { id } => live -= sizes.remove(&id).unwrap_or_default(),
                }
                peak = peak.max(live);
            }
            let cap = law.bounds().0;
            assert!(peak <= cap && peak > cap / 10 * 9, "{law:?}: {peak}");
        }
    }

    #[test]
    fn the_shares_of_streams_move() {
        let mut counts = [[0_u64; 4]; 8];
        let mut seen = 0;
        for operation in Law::Streams.trace(5).operations {
            if let Operation::Allocate { stream, .. } = operation {
                counts[seen / 500][stream as usize] += 1;
                seen += 1;
            }
        }
        for (phase, counts) in counts.iter().enumerate() {
            for (stream, &count) in counts.iter().enumerate() {
                let (least, most) = match stream == phase % 4 {
                    true => (335, 415),
                    false => (20, 65),
                };
                assert!((least..most).contains(&count), "{phase}: {counts:?}");
            }
        }
    }
}
