//! The reservations of a heap, and the mappings in them by their addresses.

use std::collections::BTreeMap;

use crate::device::Device;
use crate::error::{CallError, MemoryError};
use crate::extents::{PlaceError, Placed, Space, Target, Unmapped};
use crate::own::Stream;

#[derive(Debug, Default)]
pub(super) struct Spaces(BTreeMap<u64, Space>);

/// A reservation, to map in without the heap's lock.
pub(super) struct Part {
    base: u64,
    target: Target,
}

impl Part {
    /// Maps a physical at an address that no other operation uses.
    pub(super) fn place(&self, at: u64, unmapped: Unmapped) -> Result<Placed, PlaceError> {
        self.target.place(at - self.base, unmapped)
    }
}

impl Spaces {
    pub(super) fn at(&self, at: u64) -> Option<&Space> {
        let (_, space) = self.0.range(..=at).next_back()?;
        Some(space)
    }

    fn at_mut(&mut self, at: u64) -> Option<(u64, &mut Space)> {
        let (&base, space) = self.0.range_mut(..=at).next_back()?;
        Some((at - base, space))
    }

    pub(super) fn add(&mut self, space: Space) {
        self.0.insert(space.address().0, space);
    }

    pub(super) fn take(&mut self, start: u64) -> Option<Space> {
        self.0.remove(&start)
    }

    pub(super) fn take_all(&mut self) -> Vec<Space> {
        std::mem::take(&mut self.0).into_values().collect()
    }

    pub(super) fn part(&self, at: u64) -> Option<Part> {
        let space = self.at(at)?;
        Some(Part {
            base: space.address().0,
            target: space.target(),
        })
    }

    pub(super) fn adopt(&mut self, placed: Placed) {
        if let Some((_, space)) = self.at_mut(placed.address().0) {
            space.adopt(placed);
        }
    }

    pub(super) fn remove(&mut self, at: u64) -> Option<Placed> {
        let (offset, space) = self.at_mut(at)?;
        space.remove(offset)
    }

    pub(super) fn has(&self, at: u64) -> bool {
        let space = self.at(at);
        space.is_some_and(|space| space.bounds_around(at - space.address().0).is_some())
    }

    /// Returns the bytes at an address that a stuck mapping has for good.
    pub(super) fn stuck_at(&self, at: u64, size: u64) -> u64 {
        let space = self.at(at);
        space.map_or(0, |space| {
            let offset = at - space.address().0;
            space.stuck_in(offset, offset + size)
        })
    }

    /// Returns the devices with access to all reservations.
    pub(super) fn users(&self) -> Vec<Device> {
        let first = self.0.values().next();
        first.map_or_else(Vec::new, |space| space.users().cloned().collect())
    }

    /// Zeroes `size` mapped bytes at an address (`cuMemsetD8Async`).
    pub(super) fn zero(&self, stream: &Stream, at: u64, size: u64) -> Result<(), MemoryError> {
        let space = self.at(at).ok_or(CallError::InUse)?;
        space.fill(stream, at - space.address().0, 0, size)
    }
}
