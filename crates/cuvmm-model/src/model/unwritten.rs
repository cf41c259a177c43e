//! Reads of bytes that were never written, recorded if the options ask for it.
//!
//! A copy on a device copies the knowledge of its source and counts as no read: only a copy to the
//! host and a test's kernel read. Memory that others may write counts as written: host memory,
//! memory that the program accesses directly, and memory that was exported or imported.

use super::allocation_table::Kind;
use super::backing::{Backing, Place};
use super::resolve::Piece;
use super::shadow::{Shadow, Unwritten};
use super::state::State;
use cuvmm_driver::{DeviceAddress, LocationKind, Ordinal};

impl<B: Backing> State<B> {
    /// Returns `true` if only this machine writes the bytes at a place.
    fn is_shadowed(&self, place: Place) -> bool {
        match place {
            Place::Memory(key, _) => self.physicals.memories.get(&key).is_some_and(|memory| {
                let device = memory.location.kind == LocationKind::DEVICE;
                device && !memory.exported && memory.owner.is_some()
            }),
            Place::Allocation(address) => {
                let found = self.allocations.containing(address);
                found.is_some_and(|(_, found)| matches!(found.kind, Kind::Plain | Kind::Pool))
            }
        }
    }

    pub(crate) fn note_write(&mut self, place: Place, size: u64) {
        if let Some(shadow) = &mut self.shadow {
            shadow.write(place, size);
        }
    }

    pub(crate) fn note_copy(&mut self, to: Place, from: Place, size: u64) {
        let known = self.shadow.is_some() && self.is_shadowed(from);
        match &mut self.shadow {
            Some(shadow) if known => shadow.copy(to, from, size),
            Some(shadow) => shadow.write(to, size),
            None => {}
        }
    }

    pub(crate) fn note_read(
        &mut self,
        device: i32,
        start: u64,
        pieces: &[Piece],
        work: &'static str,
    ) {
        if self.shadow.is_none() {
            return;
        }
        let (mut at, mut first, mut missing) = (start, None, 0);
        for piece in pieces {
            let shadowed = self.is_shadowed(piece.place);
            if let Some(shadow) = self.shadow.as_mut().filter(|_| shadowed)
                && let Some((offset, count)) = shadow.unwritten(piece.place, piece.size)
            {
                first = first.or(Some(at + offset));
                missing += count;
            }
            at += piece.size;
        }
        if let (Some(address), Some(shadow)) = (first, &mut self.shadow) {
            shadow.record(Unwritten {
                address: DeviceAddress(address),
                size: at - start,
                unwritten: missing,
                device: Ordinal(device),
                work,
            });
        }
    }

    pub(crate) fn take_unwritten(&mut self) -> Vec<Unwritten> {
        self.shadow.as_mut().map(Shadow::take).unwrap_or_default()
    }
}
