//! Small allocations, which share granules, as measured: those of up to half a granule begin at
//! multiples of 512 bytes in memory that the first of them takes from the device and the last gives
//! back.

use std::collections::BTreeMap;

use super::allocation_table::Kind;
use super::device_state::Owner;
use super::space::Space;

/// The multiple that the size of a small allocation is rounded up to.
pub(crate) const PIECE: u64 = 512;

/// A granule that small allocations of one kind and owner share.
#[derive(Debug)]
pub(crate) struct Slab {
    kind: Kind,
    device: i32,
    pub(crate) owner: Option<Owner>,
    free: Space,
    pieces: usize,
}

/// The granules that small allocations share, by address.
#[derive(Debug, Default)]
pub(crate) struct Slabs {
    by_start: BTreeMap<u64, Slab>,
}

impl Slabs {
    /// Takes a piece of a granule that has room for it, and returns the granule and the piece.
    pub(crate) fn take(&mut self, kind: Kind, device: i32, size: u64) -> Option<(u64, u64)> {
        let fitting = |slab: &&mut Slab| slab.kind == kind && slab.device == device;
        for (&start, slab) in &mut self.by_start {
            if !fitting(&slab) {
                continue;
            }
            if let Some(place) = slab.free.allocate(size, PIECE) {
                slab.pieces += 1;
                return Some((start, place));
            }
        }
        None
    }

    /// Adds a granule.
    pub(crate) fn add(
        &mut self,
        kind: Kind,
        device: i32,
        owner: Option<Owner>,
        (start, size): (u64, u64),
    ) {
        let slab = Slab {
            kind,
            device,
            owner,
            free: Space::new(start..start + size),
            pieces: 0,
        };
        self.by_start.insert(start, slab);
    }

    /// Gives a piece back, and returns the granule if that was the last piece of it.
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

    #[test]
    fn pieces_share_a_granule_until_the_last_is_gone() {
        let mut slabs = Slabs::default();
        assert_eq!(slabs.take(Kind::Plain, 0, 512), None);
        slabs.add(Kind::Plain, 0, None, (1 << 20, 2048));
        let first = slabs.take(Kind::Plain, 0, 512);
        assert_eq!(first, Some((1 << 20, 1 << 20)));
        assert_eq!(
            slabs.take(Kind::Plain, 0, 1024),
            Some((1 << 20, (1 << 20) + 512))
        );
        assert_eq!(slabs.take(Kind::Plain, 0, 1024), None);
        assert_eq!(slabs.take(Kind::Pinned, 0, 512), None);
        assert_eq!(slabs.take(Kind::Plain, 1, 512), None);
        assert!(slabs.give_back(1 << 20, 1 << 20, 512).is_none());
        assert_eq!(slabs.take(Kind::Plain, 0, 512), first);
        assert!(slabs.give_back(1 << 20, (1 << 20) + 512, 1024).is_none());
        assert!(slabs.give_back(1 << 20, 1 << 20, 512).is_some());
    }
}
