//! The committed memory of a region in a tenant goes to the pool, and other memory takes its place
//! later. The owner of the region sleeps meanwhile, and what is committed stays so.
//!
//! The owner has a copy of each physical while it moves, so that a failure can map it again. A mapping
//! that a panic of the driver leaves has another: the pool then quarantines the memory.
//!
//! No byte is copied here.
//!
//! Keeps I-108 and I-125.

use std::ops::Range;

use super::Region;
use super::holder::ANYWHERE;
use crate::error::{BlockError, CallError, MemoryError};
use crate::extents::{Fence, LastWriter, Unmapped};
use crate::own::{Access, Physical, Stream};
use crate::pool::{Given, GivenUp, HolderId};

/// Physicals, each with the offset at which it is mapped, or was.
pub(crate) type MemoryInUse = Vec<(u64, Physical)>;

impl Region {
    /// Returns a fence over the work of a stream and that which the region has noted.
    pub(crate) fn work_after(&self, stream: &Stream) -> Fence {
        self.and_noted(Fence::stream(stream.clone()))
    }

    /// Notes work of streams that is queued by now.
    pub(crate) fn note_queued(&self, streams: Vec<Stream>) {
        self.register.noted().queued(Fence::streams(streams));
    }

    /// Returns the memory that is committed.
    pub(crate) fn memory_in_use(&self) -> MemoryInUse {
        let parts = self.space.parts_in(0, self.size());
        let parts = parts.map(|(extent, physical)| (extent.offset, physical.clone()));
        parts.collect()
    }

    /// Unmaps all committed memory that only the work of a fence uses, up to the first refusal of the
    /// driver (`cuMemUnmap`).
    pub(crate) fn unmap_in_use(&mut self, work: &Fence) -> Result<(), CallError> {
        if let Some(family) = self.supply.family()
            && let Err(error) = family.shared.poll()
        {
            log!(debug, %error, "withdrawn memory could not be polled: it stays for now");
        }
        let memory = self.memory_in_use();
        let mut completed = work.completed(&mut self.space).ok_or(CallError::InUse)?;
        let mut offsets = memory.iter().map(|&(offset, _)| offset);
        offsets.try_for_each(|offset| completed.withdraw(offset).map(drop))
    }

    /// Maps memory again where it is missing. Asks the driver twice.
    pub(crate) fn map_again(&mut self, memory: &[(u64, Physical)]) -> Result<(), MemoryError> {
        for (offset, physical) in memory {
            if self.space.bounds_around(*offset).is_some() {
                continue;
            }
            let used = self.used(physical.clone());
            let placed = self
                .space
                .place_back(*offset, vec![used], Access::ReadWrite);
            placed.map_err(|failed| failed.error)?;
        }
        Ok(())
    }

    /// Notes that the tenant may have used a physical.
    fn used(&self, physical: Physical) -> Unmapped {
        let by = self.supply.family().map(|family| family.tenant.writer());
        Unmapped {
            physical,
            last_writer: by.map(|by| LastWriter { by, blank: false }),
            fresh: false,
        }
    }

    /// Gives all memory to the pool, committed memory included, of which this is a copy. What of it
    /// is mapped still is unmapped, or quarantined as by [`give_back_lent`](Self::give_back_lent).
    /// Makes no driver call while the thread panics.
    pub(crate) fn give_up_asleep(
        &mut self,
        memory: MemoryInUse,
        running: impl FnOnce(&Self) -> Fence,
        release: bool,
    ) -> GivenUp {
        let memory = memory.into_iter().map(|(at, it)| (at, self.used(it)));
        let memory = memory.collect();
        let mut asleep = StaysAsleep {
            region: self,
            memory,
        };
        let panics = std::thread::panicking();
        if !panics {
            asleep.empty(running);
        }
        let given = asleep.give_up(release);
        drop(asleep);
        let Some(family) = self.supply.family().filter(|_| !panics) else {
            return given;
        };
        let unused = |given: &mut Given| family.shared.give_in(&ANYWHERE, u64::MAX, given);
        let unused = family.give_up_asleep(release, unused);
        GivenUp {
            bytes: given.bytes + unused.bytes,
            refused: given.refused + unused.refused,
        }
    }

    /// Returns the holder that memory is lent to when the owner wakes.
    pub(crate) fn holder(&self) -> Option<HolderId> {
        self.supply.family().map(|family| family.holder)
    }

    /// Counts memory that was lent for the owner to wake.
    pub(crate) fn add_lent(&self, lent: &[Unmapped]) {
        if let Some(family) = self.supply.family() {
            family.shared.add(lent);
            family.shared.set_asleep(0);
        }
    }

    /// Maps memory that was lent at an offset, and returns `true` if it was used before.
    pub(crate) fn place_woken(&mut self, offset: u64, lent: &Unmapped) -> Result<bool, BlockError> {
        let copy = Unmapped {
            physical: lent.physical.clone(),
            last_writer: lent.last_writer,
            fresh: false,
        };
        match (self.space.place(offset, vec![copy]), self.supply.family()) {
            (Ok(()), _) => Ok(lent.last_writer.is_some()),
            (Err(failed), Some(family)) => Err(family.tenant.not_placed(failed.error)),
            (Err(failed), None) => Err(failed.error.into()),
        }
    }

    /// Zeroes the extents at some offsets, and waits (`cuMemsetD8Async`).
    pub(crate) fn clear_woken(&self, offsets: &[u64]) -> Result<(), BlockError> {
        let Some(family) = self.supply.family() else {
            return Ok(());
        };
        let extents = offsets
            .iter()
            .filter_map(|&at| self.space.bounds_around(at));
        let extents: Vec<Range<u64>> = extents.collect();
        let cleared = family.clear(&self.space, &extents);
        cleared.map_err(|(error, _)| error)
    }

    /// Returns a fence over all fills with zeros.
    pub(crate) fn fills(&self) -> Fence {
        let family = self.supply.family();
        family.map_or_else(Fence::complete, |family| family.fills())
    }

    /// Unmaps memory that was lent for the owner to wake, which only the work of a fence uses, and
    /// gives it back. What the driver refuses twice to unmap is quarantined, and so is all while the
    /// work is not complete, and all that is mapped when the driver panics.
    pub(crate) fn give_back_lent(
        &mut self,
        lent: Vec<(u64, Unmapped)>,
        running: impl FnOnce(&Self) -> Fence,
    ) {
        // Bytes of the tenant may lie over those of another.
        let used = |unmapped| Unmapped {
            last_writer: Some(LastWriter {
                by: LastWriter::SEVERAL,
                blank: false,
            }),
            fresh: false,
            ..unmapped
        };
        let lent = lent.into_iter().map(|(at, unmapped)| (at, used(unmapped)));
        let memory = lent.collect();
        let mut asleep = StaysAsleep {
            region: self,
            memory,
        };
        asleep.empty(running);
    }
}

/// A region whose owner sleeps, and memory of it by its offsets. The drop gives the memory up, also
/// after a panic of the driver: what is mapped then is quarantined.
struct StaysAsleep<'a> {
    region: &'a mut Region,
    memory: Vec<(u64, Unmapped)>,
}

impl StaysAsleep<'_> {
    /// Unmaps what only the work of a fence uses.
    fn empty(&mut self, running: impl FnOnce(&Region) -> Fence) {
        if !self.memory.is_empty() {
            let running = running(self.region);
            drop(self.region.space.empty_from(0, &running));
        }
    }

    fn give_up(&mut self, release: bool) -> GivenUp {
        let memory = std::mem::take(&mut self.memory);
        let Some(family) = self.region.supply.family().filter(|_| !memory.is_empty()) else {
            return GivenUp::default();
        };
        let space = &mut self.region.space;
        let mapped: Vec<u64> = space.extents().map(|it| it.offset).collect();
        mapped.into_iter().for_each(|at| space.quarantine(at));
        let is_free = |&(at, size): &(u64, u64)| space.stuck_in(at, at + size) == 0;
        let extents = memory.iter().map(|(at, unmapped)| (*at, unmapped.size()));
        let mappings = extents.clone().filter(is_free).count() as u64;
        family
            .shared
            .set_asleep(extents.map(|(_, size)| size).sum());
        let memory = memory.into_iter().map(|(_, unmapped)| unmapped).collect();
        let given = Given {
            extents: family.shared.end(memory),
            mappings,
            ..Given::default()
        };
        family.give_up_asleep(release, |all| *all = given)
    }
}

impl Drop for StaysAsleep<'_> {
    fn drop(&mut self) {
        self.give_up(false);
    }
}
