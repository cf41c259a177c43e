//! Figures of a paged cache.

use std::fmt;

use super::PagedKv;
use crate::display::{Bytes, Count};
use crate::error::PagedKvError;

/// Figures of a paged cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct PagedStats {
    /// Block numbers.
    pub blocks: u32,
    /// Blocks in use, without pinned ones.
    pub in_use: u32,
    /// Blocks that are reserved and not in use.
    pub reserved: u32,
    /// Blocks that are always backed.
    pub pinned: u32,
    /// Blocks released by steps that are still being prepared.
    pub leaving: u32,
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Bytes of extents that these blocks touch, and those that a [request](PagedKv::back_async) was
    /// granted and has not taken: memory that the pool does not take.
    pub committed: u64,
    /// The part of the committed bytes that only such requests have: it comes free if they are dropped.
    pub granted: u64,
    /// Bytes that the cache gets when it wakes from [sleep](crate::sleep#paged-caches), or while it is
    /// falling asleep or waking. It has then no committed bytes.
    pub asleep: u64,
    /// Bytes of memory held: committed, and withdrawn but not yet taken by the pool.
    pub held: u64,
    /// Bytes of withdrawn memory, which the pool takes once the work on it is complete.
    pub withdrawn: u64,
    /// The part of the withdrawn memory that was mapped ahead of use and that no block has used yet.
    pub precommitted: u64,
    /// Mappings in use.
    pub mappings: u64,
    /// Bytes of addresses.
    pub reserved_addresses: u64,
}

impl fmt::Display for PagedStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = Count(self.blocks, "block");
        write!(
            f,
            "{} of {blocks} of {} in use",
            self.in_use,
            Bytes(self.block_bytes)
        )?;
        let counts = [
            (self.reserved, "reserved"),
            (self.pinned, "pinned"),
            (self.leaving, "leaving"),
        ];
        for (number, what) in counts.into_iter().filter(|&(number, _)| number > 0) {
            write!(f, ", {number} {what}")?;
        }
        write!(f, ": {} committed", Bytes(self.committed))?;
        let sizes = [
            (self.granted, "of it granted to requests"),
            (self.withdrawn, "withdrawn"),
            (self.precommitted, "of that precommitted"),
            (self.asleep, "asleep"),
        ];
        for (bytes, what) in sizes.into_iter().filter(|&(bytes, _)| bytes > 0) {
            write!(f, ", {} {what}", Bytes(bytes))?;
        }
        write!(f, ", {}", Count(self.mappings, "mapping"))
    }
}

impl PagedKv {
    /// Returns the figures of the cache. Makes no driver call.
    ///
    /// # Errors
    /// [`PagedKvError`] in a forked child.
    pub fn stats(&self) -> Result<PagedStats, PagedKvError> {
        let state = self.lock()?;
        let [in_use, reserved, pinned, leaving] = state.counts();
        let region = &state.region;
        let figures = region.lent_figures();
        let committed = match state.rest.is_awake() {
            true => region.committed(),
            false => 0,
        };
        Ok(PagedStats {
            blocks: state.blocks(),
            in_use,
            reserved,
            pinned,
            leaving,
            block_bytes: self.geometry.block_bytes,
            committed,
            granted: state.planes.used_by(state.requests.granted()),
            asleep: region.committed() - committed,
            held: figures.held,
            withdrawn: figures.withdrawn,
            precommitted: figures.ahead,
            mappings: figures.mappings,
            reserved_addresses: region.size(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::PagedStats;

    #[test]
    fn figures_are_a_line_without_what_is_zero() {
        let mut figures = PagedStats {
            blocks: 64,
            in_use: 3,
            block_bytes: 2 << 20,
            committed: 16 << 20,
            mappings: 1,
            ..PagedStats::default()
        };
        let text = "3 of 64 blocks of 2 MiB in use: 16 MiB committed, 1 mapping";
        assert_eq!(figures.to_string(), text);
        figures.pinned = 1;
        figures.leaving = 2;
        figures.withdrawn = 32 << 20;
        figures.precommitted = 16 << 20;
        figures.mappings = 3;
        assert_eq!(
            figures.to_string(),
            "3 of 64 blocks of 2 MiB in use, 1 pinned, 2 leaving: 16 MiB committed, \
             32 MiB withdrawn, 16 MiB of that precommitted, 3 mappings"
        );
    }
}
