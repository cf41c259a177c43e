//! The granules behind allocations: pieces of shared granules, and whole ones.

use super::allocation_table::Allocation;
use super::answer::{Answer, OUT_OF_MEMORY};
use super::backing::{Backing, Part};
use super::device_state::Owner;
use super::pool_table::{PoolKey, STEP};
use super::slabs::{Piece, Sharers};
use super::state::State;

impl<B: Backing> State<B> {
    /// Takes a piece of a granule that small allocations share. `granules` takes a new granule.
    pub(crate) fn take_piece(
        &mut self,
        sharers: Sharers,
        owner: Option<Owner>,
        bytes: u64,
        granules: impl FnOnce(&mut Self, u64) -> Answer<Piece>,
    ) -> Answer<Piece> {
        if let Some(found) = self.slabs.take(sharers, bytes) {
            return Ok(found);
        }
        let size = self.slab_size(sharers.pool);
        let start = granules(self, size)?;
        self.slabs.add(sharers, owner, &start, size);
        self.slabs.take(sharers, bytes).ok_or(OUT_OF_MEMORY)
    }

    /// Returns the size of the memory that small allocations share: a granule, or a step of a pool.
    fn slab_size(&self, pool: Option<PoolKey>) -> u64 {
        match pool {
            Some(_) => STEP,
            None => self.rules.granularity,
        }
    }

    /// With their beginning in the memory of a shareable pool.
    pub(crate) fn granules_of(&self, address: u64, allocation: &Allocation) -> Part {
        let granule = self.rules.granularity;
        let start = match (allocation.slab, allocation.memory) {
            (Some(slab), _) => slab,
            // Shared memory is mapped in whole granules, and an importer may use a piece of one.
            (None, Some(_)) => address - address % granule,
            (None, None) => address,
        };
        let lead = address - start;
        let size = match allocation.slab {
            Some(_) => self.slab_size(allocation.pool),
            None => (lead + allocation.taken).next_multiple_of(granule),
        };
        Part {
            address: start,
            size,
            offset: allocation.memory.map_or(0, |(_, offset)| offset - lead),
        }
    }
}
