//! Small allocations, which share granules, as measured: allocations of up to half a granule begin
//! at multiples of 512 bytes in memory that the first one takes from the device and the last one
//! frees. Those of a memory pool share a step of the pool, whose bytes the pool counts.

use std::collections::BTreeMap;

use super::allocation_table::Kind;
use super::backing::MemoryKey;
use super::device_state::Owner;
use super::pool_table::PoolKey;
use super::space::Space;

/// The unit of the size of a small allocation.
pub(crate) const PIECE: u64 = 512;

/// The kind and place that allocations of one granule have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharers {
    pub(crate) kind: Kind,
    pub(crate) device: i32,
    pub(crate) pool: Option<PoolKey>,
}

#[derive(Debug)]
pub(crate) struct Slab {
    sharers: Sharers,
    pub(crate) owner: Option<Owner>,
    /// The granule's place in the memory of a shareable pool.
    memory: Option<(MemoryKey, u64)>,
    free: Space,
    pieces: usize,
}

/// An allocation's address, the shared granule that it is a piece of, and its place in the memory
/// of a shareable pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) address: u64,
    pub(crate) slab: Option<u64>,
    pub(crate) memory: Option<(MemoryKey, u64)>,
}

#[derive(Debug, Default)]
pub(crate) struct Slabs {
    by_start: BTreeMap<u64, Slab>,
}

impl Slabs {
    pub(crate) fn take(&mut self, sharers: Sharers, size: u64) -> Option<Piece> {
        for (&slab, shared) in &mut self.by_start {
            if shared.sharers != sharers {
                continue;
            }
            if let Some(address) = shared.free.allocate(size, PIECE) {
                shared.pieces += 1;
                let offset = |(key, offset)| (key, offset + (address - slab));
                return Some(Piece {
                    address,
                    slab: Some(slab),
                    memory: shared.memory.map(offset),
                });
            }
        }
        None
    }

    pub(crate) fn add(
        &mut self,
        sharers: Sharers,
        owner: Option<Owner>,
        granule: &Piece,
        size: u64,
    ) {
        let start = granule.address;
        let slab = Slab {
            sharers,
            owner,
            memory: granule.memory,
            free: Space::new(start..start + size),
            pieces: 0,
        };
        self.by_start.insert(start, slab);
    }

    /// Frees a piece, and returns the granule after its last piece.
    pub(crate) fn give_back(&mut self, start: u64, piece: u64, size: u64) -> Option<Slab> {
        let slab = self.by_start.get_mut(&start)?;
        slab.free.give_back(piece, size);
        slab.pieces -= 1;
        if slab.pieces > 0 {
            return None;
        }
        self.by_start.remove(&start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sharers = Sharers {
        kind: Kind::Plain,
        device: 0,
        pool: None,
    };

    #[test]
    fn pieces_share_a_granule_until_the_last_is_gone() {
        let mut slabs = Slabs::default();
        let take = |slabs: &mut Slabs, sharers, size| {
            let piece = slabs.take(sharers, size);
            piece.map(|piece| (piece.slab, piece.address))
        };
        assert_eq!(take(&mut slabs, PLAIN, 512), None);
        let granule = Piece {
            address: 1 << 20,
            slab: None,
            memory: None,
        };
        slabs.add(PLAIN, None, &granule, 2048);
        let first = take(&mut slabs, PLAIN, 512);
        assert_eq!(first, Some((Some(1 << 20), 1 << 20)));
        let second = Some((Some(1 << 20), (1 << 20) + 512));
        assert_eq!(take(&mut slabs, PLAIN, 1024), second);
        assert_eq!(take(&mut slabs, PLAIN, 1024), None);
        let pinned = Sharers {
            kind: Kind::Pinned,
            ..PLAIN
        };
        let far = Sharers { device: 1, ..PLAIN };
        let pooled = Sharers {
            pool: Some(PoolKey(0)),
            ..PLAIN
        };
        for other in [pinned, far, pooled] {
            assert_eq!(take(&mut slabs, other, 512), None);
        }
        assert!(slabs.give_back(1 << 20, 1 << 20, 512).is_none());
        assert_eq!(take(&mut slabs, PLAIN, 512), first);
        assert!(slabs.give_back(1 << 20, (1 << 20) + 512, 1024).is_none());
        assert!(slabs.give_back(1 << 20, 1 << 20, 512).is_some());
    }
}
