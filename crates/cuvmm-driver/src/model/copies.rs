//! Which bytes a range of addresses means, and whether a device may use them.

use super::access::Who;
use super::answer::{Answer, INVALID_VALUE, require};
use super::backing::{Backing, Place};
use super::mappings::Mapping;
use super::state::State;
use super::work::Work;
use crate::{AccessFlags, DeviceAddress, Ordinal, StreamHandle};

/// What is going to be done to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

impl Use {
    /// Whether a right is enough for it.
    pub(crate) fn allowed(self, right: AccessFlags) -> bool {
        match self {
            Self::Read => right != AccessFlags::NONE,
            Self::Write => right == AccessFlags::READ_WRITE,
        }
    }
}

/// A run of bytes that lies in one piece.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) place: Place,
    pub(crate) size: u64,
}

impl<B: Backing> State<B> {
    /// The bytes behind a range, over as many mappings as it takes. Nothing when any of it is
    /// not mapped, or the device lacks the right. The page table is asked, never the hardware.
    pub(crate) fn resolve(
        &self,
        device: i32,
        start: u64,
        size: u64,
        how: Use,
    ) -> Option<Vec<Piece>> {
        let end = start.checked_add(size)?;
        let mut pieces = Vec::with_capacity(1);
        let mut at = start;
        while at < end {
            let (place, piece_end) = self.place(device, at, how)?;
            let size = piece_end.min(end) - at;
            pieces.push(Piece { place, size });
            at += size;
        }
        Some(pieces)
    }

    /// As [`resolve`](Self::resolve), but not for memory that the program touches directly. A
    /// test's kernel and a test's look stay away from it, because they are safe to call, and a
    /// program may hold references into it.
    pub(crate) fn resolve_apart(
        &self,
        device: i32,
        start: u64,
        size: u64,
        how: Use,
    ) -> Option<Vec<Piece>> {
        let pieces = self.resolve(device, start, size, how)?;
        let apart = |piece: &Piece| match piece.place {
            Place::Memory(..) => true,
            Place::Allocation(address) => {
                let found = self.allocations.containing(address);
                found.is_some_and(|(_, allocation)| !allocation.kind.is_touchable())
            }
        };
        pieces.iter().all(apart).then_some(pieces)
    }

    /// The place of one address, and where what it lies in ends.
    fn place(&self, device: i32, at: u64, how: Use) -> Option<(Place, u64)> {
        if let Some((start, mapping)) = self.mappings.containing(at) {
            let enough = how.allowed(mapping.rights.of(Who::Device(device)));
            let physical = self.physicals.by_handle.get(&mapping.handle)?;
            let place = Place::Memory(physical.memory, at - start);
            return enough.then_some((place, start + mapping.size));
        }
        let (start, allocation) = self.allocations.containing(at)?;
        Some((Place::Allocation(at), start + allocation.size))
    }

    /// The check that copies and fills make at the call: it refuses and harms nothing.
    fn check(&self, device: i32, start: DeviceAddress, size: u64, how: Use) -> Answer {
        self.resolve(device, start.0, size, how)
            .map(drop)
            .ok_or(INVALID_VALUE)
    }

    /// Whether a range begins where the host's processors have no access, and whether it goes on
    /// where they have, or the other way round.
    fn sides(&self, start: DeviceAddress, size: u64) -> (bool, bool) {
        let closed = |mapping: &Mapping| mapping.rights.of(Who::Host) == AccessFlags::NONE;
        let mut sides = self
            .mappings
            .touching(start.0, size)
            .map(|(_, mapping)| closed(mapping));
        let first = sides.next().unwrap_or(false);
        (first, sides.any(|side| side != first))
    }

    /// Copies between the program and a range of both sides, which the real driver dies of.
    fn check_one_side(&self, start: DeviceAddress, size: u64) -> Answer {
        let (_, crosses) = self.sides(start, size);
        require(!crosses, INVALID_VALUE)
    }

    pub(crate) fn fill(
        &mut self,
        device: Ordinal,
        destination: DeviceAddress,
        byte: u8,
        size: u64,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        self.check(device.0, destination, size, Use::Write)?;
        let (closed, crosses) = self.sides(destination, size);
        require(!(closed && crosses), INVALID_VALUE)?;
        self.submit(
            device,
            stream,
            Work::Fill {
                to: destination.0,
                byte,
                size,
            },
        )?;
        Ok(())
    }

    pub(crate) fn copy_on_device(
        &mut self,
        device: Ordinal,
        destination: DeviceAddress,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Answer {
        self.context(device)?;
        self.check(device.0, source, size, Use::Read)?;
        self.check(device.0, destination, size, Use::Write)?;
        let work = Work::Copy {
            to: destination.0,
            from: source.0,
            size,
        };
        self.submit(device, stream, work)?;
        Ok(())
    }

    pub(crate) fn copy_to_device(
        &mut self,
        device: Ordinal,
        destination: DeviceAddress,
        source: *const u8,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<Option<super::streams::Mark>> {
        self.context(device)?;
        require(size == 0 || !source.is_null(), INVALID_VALUE)?;
        self.check(device.0, destination, size, Use::Write)?;
        self.check_one_side(destination, size)?;
        let from = source.expose_provenance();
        self.submit(
            device,
            stream,
            Work::ToDevice {
                to: destination.0,
                from,
                size,
            },
        )
    }

    pub(crate) fn copy_to_host(
        &mut self,
        device: Ordinal,
        destination: *mut u8,
        source: DeviceAddress,
        size: u64,
        stream: StreamHandle,
    ) -> Answer<Option<super::streams::Mark>> {
        self.context(device)?;
        require(size == 0 || !destination.is_null(), INVALID_VALUE)?;
        self.check(device.0, source, size, Use::Read)?;
        self.check_one_side(source, size)?;
        let to = destination.expose_provenance();
        self.submit(
            device,
            stream,
            Work::ToHost {
                to,
                from: source.0,
                size,
            },
        )
    }
}
