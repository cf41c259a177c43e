//! A reservation with extents, which are placed and withdrawn whole and rolled back on failure.

use std::collections::BTreeMap;
use std::ops::Range;

use cuvmm_driver::{DeviceAddress, Location, PhysicalHandle};

use super::mapped::{Mapped, StuckMappings};
use super::place::{LastWriter, PlaceError, Placed, Target, Unmapped};
use crate::device::Device;
use crate::error::MemoryError;
use crate::own::{Access, AccessGrant, ExportMark, Physical, Place, Reservation};

/// The default size of the largest extent: 1 GiB.
pub const DEFAULT_LARGEST_EXTENT: u64 = 1 << 30;

/// One extent: a physical mapped at one offset.
#[doc(alias = "MappingRecord")]
#[doc(alias = "MappedRange")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extent {
    /// The offset in the region or block, in bytes.
    pub offset: u64,
    /// The size in bytes, a power of two granules.
    pub size: u64,
    /// The first address.
    pub address: DeviceAddress,
    /// The location of the memory.
    pub location: Location,
    /// The driver's handle of the physical. The region or block owns it.
    pub handle: PhysicalHandle,
    /// The most access that any device has: read-only if forks share the memory, or if the process
    /// that shared it allows only reading.
    pub access: Access,
}

impl Extent {
    fn of(placed: &Placed) -> Self {
        let mapping = &placed.mapping;
        Self {
            offset: mapping.offset(),
            size: mapping.size(),
            address: mapping.address(),
            location: mapping.physical().location(),
            handle: mapping.physical().as_raw(),
            access: placed.most,
        }
    }

    /// Returns the offset behind the last byte.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset + self.size
    }

    /// Returns `true` if the address is one of the extent's.
    #[must_use]
    pub fn contains(&self, address: DeviceAddress) -> bool {
        address - self.address < self.size
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SpaceCounts {
    pub(crate) bytes: u64,
    pub(crate) count: u64,
    pub(crate) stuck_bytes: u64,
    pub(crate) stuck_count: u64,
}

/// A reservation whose extents all have the same grants.
#[derive(Debug)]
pub(crate) struct Space {
    /// The reservation, the grants, and the stuck mappings, which failed roll-backs and panics of the
    /// driver leave. They are never used again, and unmapped at the end of the space.
    pub(super) target: Target,
    /// In boxes, since a map makes room for eleven at once and most spaces have one.
    pub(super) extents: BTreeMap<u64, Box<Placed>>,
    bytes: u64,
    /// Reservations to copy through that had mappings after a failed roll-back.
    pub(super) beside: Vec<Self>,
}

impl Space {
    /// Reserves `size` bytes of addresses. `device` can read and write all extents.
    pub(crate) fn reserve(device: &Device, size: u64) -> Result<Self, MemoryError> {
        Ok(Self::over(Reservation::new(device, size)?))
    }

    /// Reserves `count` spaces at equal distances, each with `guard` bytes on either side that stay
    /// unmapped.
    pub(crate) fn row(
        device: &Device,
        size: u64,
        guard: u64,
        count: u64,
    ) -> Result<impl Iterator<Item = Self> + use<>, MemoryError> {
        Ok(Reservation::row(device, size, guard, count)?.map(Self::over))
    }

    fn over(reservation: Reservation) -> Self {
        Self::of(Target {
            access: vec![AccessGrant::new(reservation.device(), Access::ReadWrite)],
            reservation,
            stuck: StuckMappings::default(),
        })
    }

    const fn of(target: Target) -> Self {
        Self {
            target,
            extents: BTreeMap::new(),
            bytes: 0,
            beside: Vec::new(),
        }
    }

    pub(crate) fn open_to(mut self, guests: impl IntoIterator<Item = AccessGrant>) -> Self {
        self.target.access.extend(guests);
        self
    }

    /// Gives the devices that have access to another space the same access to this one, which is
    /// empty.
    pub(crate) fn open_like(mut self, other: &Self) -> Self {
        self.target.access.clone_from(&other.target.access);
        self
    }

    /// Returns another space at the same addresses, with all stuck mappings, at the end of this one.
    /// The addresses are freed when both spaces are dropped.
    pub(crate) fn hand_on(&mut self) -> Self {
        let mut heir = Self::of(self.target());
        heir.beside = std::mem::take(&mut self.beside);
        heir
    }

    pub(crate) fn device(&self) -> &Device {
        self.target.reservation.device()
    }

    /// The devices that have access: the space's own first, then the guests.
    pub(crate) fn users(&self) -> impl Iterator<Item = &Device> {
        self.target.access.iter().filter_map(AccessGrant::named)
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.target.reservation.address()
    }

    pub(crate) fn size(&self) -> u64 {
        self.target.reservation.size()
    }

    /// The bytes of addresses, guards included.
    pub(crate) fn addresses(&self) -> u64 {
        self.target.reservation.addresses()
    }

    /// Frees the addresses, also those that copies went through, and drops the extents. Returns the
    /// bytes of addresses that the driver has freed: none of a reservation that it refuses to free, that
    /// has mappings, or that is a row with other spaces in use.
    pub(crate) fn give_back(self) -> u64 {
        drop((self.extents, self.target.stuck));
        let beside: u64 = self.beside.into_iter().map(Self::give_back).sum();
        beside + self.target.reservation.give_back()
    }

    /// Bytes of extents, without stuck mappings.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn count(&self) -> u64 {
        self.extents.len() as u64
    }

    pub(crate) fn stuck_bytes(&self) -> u64 {
        let here = self.stuck_in(0, self.size());
        let all = |space: &Self| space.bytes + space.stuck_bytes();
        here + self.beside.iter().map(all).sum::<u64>()
    }

    pub(crate) fn stuck_count(&self) -> u64 {
        let all = |space: &Self| space.extents.len() as u64 + space.stuck_count();
        self.target.stuck.lock().len() as u64 + self.beside.iter().map(all).sum::<u64>()
    }

    pub(crate) fn footing(&self) -> SpaceCounts {
        SpaceCounts {
            bytes: self.bytes,
            count: self.count(),
            stuck_bytes: self.stuck_bytes(),
            stuck_count: self.stuck_count(),
        }
    }

    /// Bytes of stuck mappings that overlap a range.
    pub(crate) fn stuck_in(&self, start: u64, end: u64) -> u64 {
        let meets =
            |mapping: &&Mapped| mapping.offset() < end && start < mapping.offset() + mapping.size();
        let stuck = self.target.stuck.lock();
        let here = stuck.iter().filter(meets);
        here.map(|mapping| mapping.size()).sum()
    }

    /// Returns `true` if a mapping of this physical is stuck at an offset.
    pub(super) fn is_stuck(&self, offset: u64, physical: PhysicalHandle) -> bool {
        let stuck = self.target.stuck.lock();
        let mut here = stuck.iter().filter(|it| it.offset() == offset);
        here.any(|it| it.physical().as_raw() == physical)
    }

    pub(crate) fn extents(&self) -> impl DoubleEndedIterator<Item = Extent> + '_ {
        self.extents.values().map(|placed| Extent::of(placed))
    }

    pub(crate) fn last_offset(&self) -> Option<u64> {
        self.extents.last_key_value().map(|(&offset, _)| offset)
    }

    pub(crate) fn extent_around(&self, offset: u64) -> Option<Extent> {
        let (&start, placed) = self.extents.range(..=offset).next_back()?;
        (offset - start < placed.mapping.size()).then(|| Extent::of(placed))
    }

    pub(crate) fn bounds_around(&self, offset: u64) -> Option<Range<u64>> {
        let (&start, placed) = self.extents.range(..=offset).next_back()?;
        let end = start + placed.mapping.size();
        (offset < end).then_some(start..end)
    }

    pub(crate) fn extents_in(&self, start: u64, end: u64) -> impl Iterator<Item = Extent> + '_ {
        self.extents
            .range(self.covering(start, end))
            .map(|(_, placed)| Extent::of(placed))
    }

    /// The extents that overlap a range, each with the export mark of its physical.
    pub(crate) fn marked_in(
        &self,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = (Extent, ExportMark)> + '_ {
        self.extents
            .range(self.covering(start, end))
            .map(|(_, placed)| {
                let mark = placed.mapping.physical().export_mark();
                (Extent::of(placed), mark)
            })
    }

    /// Removes and returns the extents that begin in a range, still mapped.
    pub(crate) fn hand_over(&mut self, range: &Range<u64>) -> Vec<(u64, Placed)> {
        let here: Vec<u64> = self
            .extents
            .range(range.clone())
            .map(|(&at, _)| at)
            .collect();
        let mut given = vec![];
        for at in here {
            given.extend(self.remove(at).map(|placed| (at, placed)));
        }
        given
    }

    /// A range of offsets that contains the start of each extent that overlaps `start..end`.
    pub(crate) fn covering(&self, start: u64, end: u64) -> Range<u64> {
        if start >= end {
            return start..start;
        }
        let first = self
            .bounds_around(start)
            .map_or(start, |extent| extent.start);
        first..end
    }

    /// A target for another thread to place physicals in; [`Self::adopt`] takes them in.
    pub(crate) fn target(&self) -> Target {
        self.target.another()
    }

    pub(crate) fn place(
        &mut self,
        offset: u64,
        physicals: Vec<Unmapped>,
    ) -> Result<(), PlaceError> {
        self.place_for(offset, physicals, Access::ReadWrite)
    }

    /// Maps adjacent physicals from `offset` on, where no device has more access than `most`: all
    /// of them or none. What a panic of the driver leaves mapped is stuck.
    pub(crate) fn place_for(
        &mut self,
        offset: u64,
        physicals: Vec<Unmapped>,
        most: Access,
    ) -> Result<(), PlaceError> {
        let mut placed: Vec<Placed> = Vec::with_capacity(physicals.len());
        let mut physicals = physicals.into_iter();
        let mut at = offset;
        while let Some(unmapped) = physicals.next() {
            let size = unmapped.size();
            match self.target.place_for(at, unmapped, most) {
                Ok(mapped) => placed.push(mapped),
                Err(mut failed) => {
                    for earlier in placed.into_iter().rev() {
                        failed.take_out(earlier);
                    }
                    failed.physicals.extend(physicals);
                    return Err(failed);
                }
            }
            at += size;
        }
        placed.into_iter().for_each(|placed| self.adopt(placed));
        Ok(())
    }

    /// [Places](Self::place_for) physicals in a roll-back. Tries twice, so that one refusal changes
    /// nothing.
    pub(crate) fn place_back(
        &mut self,
        offset: u64,
        physicals: Vec<Unmapped>,
        most: Access,
    ) -> Result<(), PlaceError> {
        match self.place_for(offset, physicals, most) {
            Err(failed) if failed.stuck == 0 => {
                log!(warn, error = %failed.error, offset, "a roll-back is tried again");
                self.place_for(offset, failed.physicals, most)
            }
            outcome => outcome,
        }
    }

    /// Takes in an extent that was placed in a [`Target`] of this space.
    pub(crate) fn adopt(&mut self, placed: Placed) {
        self.bytes += placed.mapping.size();
        self.extents
            .insert(placed.mapping.offset(), Box::new(placed));
    }

    /// Removes an extent that is about to be unmapped or moved.
    pub(crate) fn remove(&mut self, offset: u64) -> Option<Placed> {
        let placed = self.extents.remove(&offset)?;
        self.bytes -= placed.mapping.size();
        Some(*placed)
    }

    /// The cap on every device's access to the extent at `offset`.
    pub(crate) fn most_at(&self, offset: u64) -> Access {
        self.extents
            .get(&offset)
            .map_or(Access::ReadWrite, |placed| placed.most)
    }

    pub(crate) fn physical_at(&self, offset: u64) -> Option<Physical> {
        let placed = self.extents.get(&offset)?;
        Some(placed.mapping.physical().clone())
    }

    pub(crate) fn physicals(&self) -> impl Iterator<Item = &Physical> {
        self.extents
            .values()
            .map(|placed| placed.mapping.physical())
    }

    pub(crate) fn handle_at(&self, offset: u64) -> Option<PhysicalHandle> {
        let placed = self.extents.get(&offset)?;
        Some(placed.mapping.physical().as_raw())
    }

    pub(crate) fn place_of(&self, offset: u64) -> Option<Place> {
        let placed = self.extents.get(&offset)?;
        Some(placed.mapping.physical().place())
    }

    pub(crate) fn parts_in(
        &self,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = (Extent, &Physical)> + '_ {
        let placed = self.extents.range(self.covering(start, end));
        placed.map(|(_, placed)| (Extent::of(placed), placed.mapping.physical()))
    }

    pub(crate) fn exported(&self) -> impl Iterator<Item = Extent> + '_ {
        self.parts_in(0, self.size())
            .filter(|(_, physical)| physical.is_exported())
            .map(|(extent, _)| extent)
    }

    /// Returns `true` if the physical of the extent at `offset` has another holder in this process.
    pub(crate) fn is_shared(&self, offset: u64) -> bool {
        self.extents
            .get(&offset)
            .is_some_and(|placed| placed.mapping.physical().is_shared())
    }

    /// Returns `true` if the extent at `offset` may be written and its physical has no other holder
    /// in this process.
    pub(crate) fn is_own(&self, offset: u64) -> bool {
        self.extents
            .get(&offset)
            .is_some_and(|placed| placed.is_own())
    }

    /// Notes that the operation that placed extents from `offset` on has succeeded.
    pub(crate) fn settle(&mut self, offset: u64) {
        self.extents
            .range_mut(offset..)
            .for_each(|(_, placed)| placed.fresh = false);
    }

    /// Leaves an extent that could not be unmapped mapped for good.
    pub(crate) fn quarantine(&mut self, offset: u64) {
        // What is dropped is stuck.
        drop(self.remove(offset));
    }

    /// The written parts of a range, as offset, size and last writer.
    pub(crate) fn noted(
        &self,
        start: u64,
        end: u64,
    ) -> impl Iterator<Item = (u64, u64, LastWriter)> + '_ {
        self.extents
            .range(self.covering(start, end))
            .filter_map(move |(&offset, placed)| {
                let from = offset.max(start);
                let to = (offset + placed.mapping.size()).min(end);
                Some((from, to - from, placed.last_writer?))
            })
    }

    /// Sets the last writer of the extents that overlap a range; returns the end of the last
    /// extent.
    pub(crate) fn note_writer(&mut self, start: u64, end: u64, by: u64) -> u64 {
        let range = self.covering(start, end);
        self.extents
            .range_mut(range)
            .fold(end, |_, (offset, placed)| {
                placed.last_writer = Some(LastWriter { by, blank: false });
                offset + placed.mapping.size()
            })
    }

    /// Notes that the extents that begin at `start` or behind it were overwritten.
    pub(crate) fn blank(&mut self, start: u64) {
        let extents = self.extents.range_mut(start..);
        extents
            .filter_map(|(_, placed)| placed.last_writer.as_mut())
            .for_each(|last_writer| last_writer.blank = true);
    }
}
