//! Resolving a range of addresses to bytes, with the check of a device's access.

use super::allocation_table::Kind;
use super::backing::{Backing, Place};
use super::rights::Who;
use super::state::State;
use super::work::Use;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) place: Place,
    pub(crate) size: u64,
}

impl<B: Backing> State<B> {
    /// Returns the bytes behind a range, which may span several mappings.
    ///
    /// Returns `None` if a part is not mapped or the device lacks the access. Only the page table
    /// is checked, never the hardware. Memory of pools must be accessible to the device of `pools`,
    /// if one is named.
    pub(crate) fn resolve(
        &self,
        device: i32,
        pools: Option<i32>,
        start: u64,
        size: u64,
        how: Use,
    ) -> Option<Vec<Piece>> {
        let end = start.checked_add(size)?;
        let mut pieces = Vec::with_capacity(1);
        let mut at = start;
        while at < end {
            let (place, piece_end) = self.place(device, pools, at, how)?;
            let size = piece_end.min(end) - at;
            pieces.push(Piece { place, size });
            at += size;
        }
        Some(pieces)
    }

    /// Like [`resolve`](Self::resolve), but returns `None` for memory that the program accesses
    /// directly.
    ///
    /// A test's kernel and `peek` do not access such memory: they are safe to call, and a program
    /// may hold references into it.
    pub(crate) fn resolve_apart(
        &self,
        device: i32,
        start: u64,
        size: u64,
        how: Use,
    ) -> Option<Vec<Piece>> {
        let pieces = self.resolve(device, Some(device), start, size, how)?;
        let apart = |piece: &Piece| match piece.place {
            Place::Memory(..) => true,
            Place::Allocation(address) => {
                let found = self.allocations.containing(address);
                found.is_some_and(|(_, allocation)| !allocation.kind.is_touchable())
            }
        };
        pieces.iter().all(apart).then_some(pieces)
    }

    /// Returns the place of an address and the end of its mapping or allocation.
    fn place(&self, device: i32, pools: Option<i32>, at: u64, how: Use) -> Option<(Place, u64)> {
        if let Some((start, mapping)) = self.mappings.containing(at) {
            let enough = how.allowed(mapping.rights.of(Who::Device(device)));
            let physical = self.physicals.by_handle.get(&mapping.handle)?;
            let place = Place::Memory(physical.memory, at - start);
            return enough.then_some((place, start + mapping.size));
        }
        let (start, allocation) = self.allocations.containing(at)?;
        // Every device may access managed memory.
        if let (Some(pool), Some(device)) = (allocation.pool, pools)
            && allocation.kind != Kind::Managed
        {
            let rights = &self.pools.by_key.get(&pool)?.rights;
            if !how.allowed(rights.of(Who::Device(device))) {
                return None;
            }
        }
        let place = match allocation.memory {
            Some((memory, offset)) => Place::Memory(memory, offset + (at - start)),
            None => Place::Allocation(at),
        };
        Some((place, start + allocation.size))
    }
}
