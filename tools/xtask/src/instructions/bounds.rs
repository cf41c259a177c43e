//! The paths that are counted, and their bounds.
//!
//! A bound is about 15 % above the measured count, which allows for another compiler or C library
//! and not for a regression. The paths that include the model's own work have bounds 3 % above. A change that shortens a path lowers both figures.

use anyhow::{Result, ensure};

/// The maximum ratio of a path's count with 100,000 live blocks of 1,000 tenants to its count with
/// 100 blocks of one tenant.
pub(crate) const CROWDED: f64 = 1.5;

/// The part of its instructions by which a path in a ledger may differ from the path without one: a map
/// with other keys takes a few more or less.
const SAME: f64 = 0.001;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    pub(crate) name: &'static str,
    case: &'static str,
    /// The number of operations between two marks.
    batch: u64,
    /// The number of stretches between marks. One is enough where a stretch has many instructions: two more that
    /// are not counted come first, and later ones take nearly as many.
    rounds: u64,
    /// The maximum number of instructions per operation.
    pub(crate) bound: u32,
    /// The count measured when the bound was set.
    measured: u32,
    /// `true` if the path is also counted in a crowd.
    pub(crate) crowded: bool,
    /// `true` if the path is also counted with a pool in a ledger, where it must take as many
    /// instructions.
    pub(crate) in_ledger: bool,
}

#[rustfmt::skip]
pub(crate) const PATHS: &[Path] = &[
    // Allocate and free, on a home stream.
    Path { name: "warm",            case: "warm",            batch: 64, rounds: 1,  measured: 496, bound: 570, crowded: true, in_ledger: true },
    Path { name: "warm-64-live",    case: "warm-batch",      batch: 64, rounds: 1,  measured: 522, bound: 600, crowded: true, in_ledger: true },
    // Allocate and free, with an idle block of another size of the same class.
    Path { name: "other-size",      case: "other-size",      batch: 16, rounds: 1,  measured: 4920, bound: 5510, crowded: true, in_ledger: false },
    // The two halves of the path through the pool's lock, without other idle blocks, and with 64 of
    // them.
    Path { name: "allocate-locked", case: "allocate-locked", batch: 1,  rounds: 16, measured: 2449, bound: 2740, crowded: true, in_ledger: true },
    Path { name: "allocate-of-64",  case: "allocate-locked", batch: 64, rounds: 1,  measured: 4126, bound: 4740, crowded: false, in_ledger: false },
    Path { name: "free-locked",     case: "free-locked",     batch: 1,  rounds: 16, measured: 1028, bound: 1190, crowded: true, in_ledger: true },
    Path { name: "free-of-64",      case: "free-locked",     batch: 64, rounds: 1,  measured: 1345, bound: 1540, crowded: false, in_ledger: false },
    // Growth by a granule into existing precommitted memory.
    Path { name: "grow",            case: "grow",            batch: 32, rounds: 3,  measured: 276, bound: 315, crowded: true, in_ledger: true },
    // A tile among 1,024 and 16,384, including the model's own work; a cache's figures per range,
    // with 128 and 1,024 ranges.
    Path { name: "tile",            case: "tile",            batch: 4,  rounds: 1,  measured: 35_890, bound: 41_000, crowded: true, in_ledger: false },
    Path { name: "kv-stats",        case: "kv-stats",        batch: 1024, rounds: 1, measured: 176, bound: 210, crowded: true, in_ledger: false },
    // A block of a paged cache backed and released, of 256 and alone, where its extent is there; and
    // only backed.
    Path { name: "paged-back",      case: "paged-back",      batch: 256, rounds: 1, measured: 230, bound: 250, crowded: true, in_ledger: false },
    Path { name: "paged-back-one",  case: "paged-back",      batch: 1,  rounds: 16, measured: 702, bound: 800, crowded: false, in_ledger: false },
    Path { name: "paged-backed",    case: "paged-backed",    batch: 256, rounds: 1, measured: 90, bound: 103, crowded: true, in_ledger: false },
    Path { name: "paged-backed-one", case: "paged-backed",   batch: 1,  rounds: 16, measured: 361, bound: 415, crowded: false, in_ledger: false },
    // The longest sections under a pool's lock, per slot, with 400 slots of 100 tenants, half of
    // them idle: computing the headroom, and the pool's statistics.
    Path { name: "headroom",        case: "headroom",        batch: 400, rounds: 1, measured: 1597, bound: 1836, crowded: false, in_ledger: false },
    Path { name: "pool-stats",      case: "pool-stats",      batch: 400, rounds: 1, measured: 714, bound: 820, crowded: false, in_ledger: false },
    Path { name: "kv-admission",    case: "kv-admission",    batch: 1024, rounds: 1, measured: 357, bound: 408, crowded: true, in_ledger: false },
    // Paths that map and unmap, with the model's own work: an extent reclaimed among 10,000 freed slots
    // of 100 tenants; a block with new memory; an allocation of a heap that has nothing free; a block put
    // to sleep; a granule of a region committed, and withdrawn.
    Path { name: "reclaim",         case: "reclaim",         batch: 1,  rounds: 1,  measured: 180_654, bound: 186_100, crowded: false, in_ledger: false },
    Path { name: "cold",            case: "cold",            batch: 8,  rounds: 1,  measured: 21_764, bound: 22_400, crowded: false, in_ledger: false },
    Path { name: "heap-miss",       case: "heap-miss",       batch: 8,  rounds: 1,  measured: 27_232, bound: 28_050, crowded: false, in_ledger: false },
    Path { name: "sleep",           case: "sleep",           batch: 16, rounds: 1,  measured: 11_604, bound: 11_950, crowded: false, in_ledger: false },
    Path { name: "region-commit",   case: "commit",          batch: 8,  rounds: 1,  measured: 20_988, bound: 21_620, crowded: false, in_ledger: false },
    Path { name: "region-decommit", case: "decommit",        batch: 8,  rounds: 1,  measured: 4983, bound: 5135, crowded: false, in_ledger: false },
    // 1,024 elements appended to a vector with memory for them, with the copy.
    Path { name: "vec-extend",      case: "extend",          batch: 16, rounds: 1,  measured: 10_475, bound: 10_790, crowded: false, in_ledger: false },
    // A future that waits granted a block that was freed, on the mapper's thread. The C library's allocator
    // takes 980 to 1,340 of them, by what the other thread freed last.
    Path { name: "future",          case: "future",          batch: 16, rounds: 1,  measured: 7240, bound: 7640, crowded: false, in_ledger: false },
    // A charge to a ledger with 128 slots and its refund, while no request waits.
    Path { name: "charge",          case: "charge-in-ledger", batch: 64, rounds: 1, measured: 3339, bound: 3840, crowded: false, in_ledger: false },
];

/// The surroundings of a path while it is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    /// A hundred blocks of one tenant.
    Few,
    /// 100,000 blocks of 1,000 tenants.
    Crowd,
    /// A hundred blocks of one tenant, with the pool in a ledger.
    Ledger,
}

impl Path {
    pub(crate) fn arguments(&self, setting: Setting) -> [String; 4] {
        let (batch, rounds) = (self.batch.to_string(), self.rounds.to_string());
        let (end, crowd) = match setting {
            Setting::Few => ("", "few"),
            Setting::Crowd => ("", "many"),
            Setting::Ledger => ("-in-ledger", "few"),
        };
        [self.case.to_owned() + end, crowd.to_owned(), batch, rounds]
    }

    /// Returns what is wrong if the path takes another number of instructions in a ledger.
    pub(crate) fn difference(&self, without: f64, within: f64) -> Option<String> {
        let more = within - without;
        (more.abs() > SAME * without).then(|| {
            let name = self.name;
            format!("{name} takes {within:.1} instructions in a ledger, {without:.1} without")
        })
    }

    /// Computes the instructions per operation from those of all stretches, the first of which is
    /// empty.
    pub(crate) fn each(&self, stretches: &[u64]) -> Result<f64> {
        let rounds = stretches.len().saturating_sub(1) as u64;
        ensure!(
            rounds == self.rounds,
            "{} ended after {rounds} of {} rounds",
            self.name,
            self.rounds
        );
        let empty = stretches.first().copied().unwrap_or_default();
        let work: u64 = stretches.iter().skip(1).sum();
        let work = work.saturating_sub(rounds * empty);
        Ok(work as f64 / (rounds * self.batch) as f64)
    }

    pub(crate) fn complaint(&self, count: f64) -> Option<String> {
        let Self {
            name,
            measured,
            bound,
            ..
        } = self;
        (count > f64::from(*bound)).then(|| {
            format!(
                "{name} takes {count:.0} instructions, more than {bound}; it once took {measured}"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_near_what_was_measured() {
        for path in PATHS {
            let room = f64::from(path.bound) / f64::from(path.measured);
            assert!((1.02..1.2).contains(&room), "{}: {room}", path.name);
        }
    }

    #[test]
    fn marks_cost_nothing() {
        let path = Path {
            rounds: 3,
            ..PATHS[0]
        };
        let batch = path.batch;
        let each = path.each(&[20, 20 + 5 * batch, 20 + 7 * batch, 20 + 6 * batch]);
        assert_eq!(each.expect("all rounds"), 6.0);
        assert!(path.each(&[20, 30, 30]).is_err(), "a round is missing");
        assert!(path.each(&[]).is_err());
    }

    #[test]
    fn in_a_ledger_a_path_takes_as_many() {
        let path = &PATHS[0];
        assert_eq!(path.difference(496.0, 496.4), None);
        for other in [490.0, 497.0] {
            assert!(path.difference(496.0, other).is_some());
        }
        assert_eq!(path.arguments(Setting::Ledger)[0], "warm-in-ledger");
    }

    #[test]
    fn over_the_bound() {
        let path = &PATHS[0];
        let bound = f64::from(path.bound);
        assert_eq!(path.complaint(bound), None);
        assert!(path.complaint(bound + 1.0).is_some());
    }
}
