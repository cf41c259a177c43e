//! Statistics of a heap.

use std::fmt;

use super::core::State;
use crate::display::{Bytes, Count};

/// A heap's statistics, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct HeapStats {
    /// The sizes of all live allocations, as requested.
    pub live: u64,
    /// The highest value that `live` had when it was read, or when memory was allocated that no
    /// stream cache had.
    pub peak_live: u64,
    /// Memory of all extents. While the heap sleeps it has none: this, `free`, `pending_free`,
    /// `largest_run` and `mappings` are 0.
    pub held: u64,
    /// The highest value that `held` ever had.
    pub peak_held: u64,
    /// The part of `held` that is free.
    pub free: u64,
    /// The part of `free` whose work is not known to be complete.
    pub pending_free: u64,
    /// The longest free range of addresses.
    pub largest_run: u64,
    /// Live allocations.
    pub allocations: u64,
    /// Extents.
    pub extents: u64,
    /// Mappings of extents. An extent may have several.
    pub mappings: u64,
    /// Ranges of addresses with mappings side by side.
    pub windows: u64,
    /// Mappings that were ever made.
    pub mapped: u64,
    /// Allocations made of memory in several places.
    pub stitches: u64,
    /// The memory that the heap gets when it wakes; 0 while it is awake.
    pub asleep: u64,
    /// Stream waits queued so that one stream could use another's memory.
    pub stream_waits: u64,
}

impl fmt::Display for HeapStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let allocations = Count(self.allocations, "allocation");
        let (live, held) = (Bytes(self.live), Bytes(self.held));
        write!(
            f,
            "{live} in {allocations} of {held} held, at most {}",
            Bytes(self.peak_held)
        )?;
        let (free, pending) = (Bytes(self.free), Bytes(self.pending_free));
        let run = Bytes(self.largest_run);
        write!(f, "; {free} free ({pending} pending, longest run {run})")?;
        if self.asleep > 0 {
            write!(f, ", {} asleep", Bytes(self.asleep))?;
        }
        let extents = Count(self.extents, "extent");
        write!(f, "; {extents} with {}", Count(self.mappings, "mapping"))
    }
}

impl HeapStats {
    pub(super) fn of(state: &State) -> Self {
        let (large, small, counts) = (&state.large, &state.small, &state.counts);
        let free = large.free() + small.free_bytes();
        let ever = Self {
            live: counts.live,
            peak_live: counts.peak_live,
            peak_held: counts.peak_held,
            allocations: counts.allocations,
            extents: large.extents().count() as u64,
            windows: large.windows(),
            mapped: counts.mapped,
            stitches: counts.stitches,
            stream_waits: counts.waits,
            ..Self::default()
        };
        if !state.rest.is_charged() {
            return Self {
                asleep: large.held(),
                ..ever
            };
        }
        Self {
            held: large.held(),
            free,
            pending_free: free - large.ready() - small.ready(),
            largest_run: large.runs.longest().max(small.longest()),
            mappings: large.mappings(),
            ..ever
        }
    }
}

#[cfg(test)]
mod tests {
    use super::HeapStats;

    #[test]
    fn figures_are_a_line() {
        let mut figures = HeapStats {
            live: 3 << 20,
            held: 4 << 20,
            peak_held: 8 << 20,
            free: 1 << 20,
            largest_run: 1 << 20,
            allocations: 1,
            extents: 2,
            mappings: 2,
            ..HeapStats::default()
        };
        let shown = "3 MiB in 1 allocation of 4 MiB held, at most 8 MiB; 1 MiB free (0 B pending, \
                     longest run 1 MiB); 2 extents with 2 mappings";
        assert_eq!(figures.to_string(), shown);
        figures.asleep = 2 << 20;
        assert!(figures.to_string().contains("), 2 MiB asleep; "));
    }
}
