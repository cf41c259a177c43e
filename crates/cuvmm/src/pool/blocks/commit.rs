//! Placing memory under a slot: charge, gather, place, scrub. On failure nothing changes.

use std::ops::Range;

use super::fills::Unfinished;
use super::slots::Slot;
use crate::error::{BlockError, MemoryError};
use crate::extents::{Fence, LastWriter, Unmapped};
use crate::own::Stream;
use crate::pool::accounts::{Amount, Charge, TenantId};
use crate::pool::core::Locked;
use crate::pool::memory::Scrub;
use crate::pool::supply::Obtained;

#[cfg(doc)]
use crate::extents::Space;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit<'a> {
    pub(crate) to: u64,
    /// The offset up to which memory is placed. Memory beyond `to` is precommitted.
    pub(crate) end: u64,
    pub(crate) home: Option<&'a Stream>,
    /// `true` if new memory must read as zero.
    pub(crate) zeroed: bool,
    /// The range that has memory already and must read as zero.
    pub(crate) zeros: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedMemory {
    /// The offset up to which there was memory before.
    pub(crate) begun: u64,
    /// `true` if work that zeroes some of the memory is queued on the home stream.
    pub(crate) filled: bool,
}

/// Memory gathered for a slot and not mapped yet.
#[derive(Debug)]
#[must_use = "it is placed or put back"]
pub(super) struct Gathered {
    physicals: Vec<Unmapped>,
    /// The charge for the mappings to come.
    mappings: Charge,
}

/// A charge for memory that is being obtained. The drop of this value ends the charge, also after a panic
/// of the driver.
pub(super) struct Charging<'b, 'a>(pub(super) &'b mut Locked<'a>, pub(super) Option<Charge>);

impl Charging<'_, '_> {
    pub(super) fn take(mut self) -> Option<Charge> {
        self.1.take()
    }
}

impl Drop for Charging<'_, '_> {
    fn drop(&mut self) {
        self.0.memory.budget.refund(self.1.take());
    }
}

impl<'a> Fit<'a> {
    pub(super) fn new(used: u64, home: Option<&'a Stream>, zeroed: bool) -> Self {
        Self {
            to: used,
            end: used,
            home,
            zeroed,
            zeros: zeroed.then_some((0, used)),
        }
    }

    /// Returns `true` if memory may be taken from other tenants: not for precommitted memory.
    const fn claims(&self) -> bool {
        self.end == self.to
    }
}

impl Slot {
    /// Refuses to place memory where a mapping is stuck or extents lie behind lost memory.
    pub(super) fn check_free(&self, begun: u64, bytes: u64) -> Result<(), MemoryError> {
        let end = begun + bytes;
        let here = self.space.extents_in(begun, end).map(|extent| extent.size);
        let bytes = self.space.stuck_in(begun, end) + here.sum::<u64>();
        match bytes {
            0 => Ok(()),
            _ => Err(MemoryError::Quarantined {
                range: begun..end,
                bytes,
            }),
        }
    }
}

impl Locked<'_> {
    /// Prepares a slot, which is out, for a block: places memory up to the end of `fit`, removes
    /// the data of other tenants, and writes zeros where they are owed. The memory may be charged
    /// already. On failure the slot is as before, except for quarantined memory. The placed memory
    /// is [fresh](Space::settle) until the whole operation has succeeded.
    pub(super) fn place_memory(
        &mut self,
        slot: &mut Slot,
        fit: &Fit<'_>,
        charge: Option<Charge>,
    ) -> Result<PlacedMemory, BlockError> {
        let begun = slot.space.bytes();
        if fit.end > begun {
            let bytes = fit.end - begun;
            self.commit(slot, (begun, bytes), fit.claims(), charge)?;
        } else {
            self.memory.budget.refund(charge);
        }
        match self.scrub_stale(slot, begun, fit) {
            Ok(filled) => Ok(PlacedMemory { begun, filled }),
            Err(Unfinished { error, running }) => {
                self.uncommit(slot, begun, &running);
                // Work may also be writing to the slot's earlier memory.
                slot.fence.merge(running);
                Err(error)
            }
        }
    }

    /// Places `bytes` from an offset on in a slot that is out, charged and gathered first. Nothing
    /// may be mapped there.
    fn commit(
        &mut self,
        slot: &mut Slot,
        (begun, bytes): (u64, u64),
        claims: bool,
        charge: Option<Charge>,
    ) -> Result<(), BlockError> {
        let free = slot.check_free(begun, bytes);
        let charge = match (charge, free) {
            (Some(charge), Ok(())) => charge,
            (None, Ok(())) => self.obtain(slot.id.tenant, bytes, slot.purpose())?,
            (charge, Err(error)) => {
                self.memory.budget.refund(charge);
                return Err(error.into());
            }
        };
        let charging = Charging(self, Some(charge));
        let gathered = (charging.0).gather_to_place(slot, begun..begun + bytes, claims);
        let gathered = gathered.map_err(|error| error.without_charge(bytes))?;
        let charge = charging.take();
        self.place_gathered(slot, begun, gathered, charge)
    }

    /// Places `bytes` that are charged, from an offset on in a slot that is out.
    pub(super) fn place(
        &mut self,
        slot: &mut Slot,
        begun: u64,
        bytes: u64,
        claims: bool,
    ) -> Result<(), BlockError> {
        let gathered = self.gather_to_place(slot, begun..begun + bytes, claims)?;
        self.place_gathered(slot, begun, gathered, None)
    }

    /// Gathers charged memory for a range of a slot that is out.
    pub(super) fn gather_to_place(
        &mut self,
        slot: &Slot,
        range: Range<u64>,
        claims: bool,
    ) -> Result<Gathered, BlockError> {
        let id = slot.id.tenant;
        let physicals = self.gather(id, range, slot.class.sizes, claims)?;
        let count = physicals.len() as u64;
        let obtained = Obtained(self, physicals);
        obtained.0.make_mapping_room(id, count, claims)?;
        let physicals = obtained.take();
        let mappings = self.memory.budget.charge(Some(id), Amount::mappings(count));
        Ok(Gathered {
            physicals,
            mappings,
        })
    }

    pub(super) fn put_gathered_back(&mut self, gathered: Gathered) {
        self.memory.budget.refund(gathered.mappings);
        self.put_back(gathered.physicals);
    }

    /// Maps gathered memory, and keeps its charge, if it is not kept yet. A failure ends the charge. After
    /// a panic of the driver, which may have mapped the memory, it stays.
    pub(super) fn place_gathered(
        &mut self,
        slot: &mut Slot,
        begun: u64,
        gathered: Gathered,
        charge: Option<Charge>,
    ) -> Result<(), BlockError> {
        let (physicals, mappings) = (gathered.physicals, gathered.mappings);
        let count = physicals.len() as u64;
        let bytes = physicals.iter().map(Unmapped::size).sum();
        let Err(failed) = self.unlocked(|| slot.space.place(begun, physicals)) else {
            self.memory.budget.keep(mappings);
            if let Some(charge) = charge {
                self.blocks.slots.renew(slot);
                self.memory.budget.keep(charge);
            }
            return Ok(());
        };
        self.memory.budget.refund(mappings);
        self.memory.budget.refund(charge);
        let stuck_count = count - failed.physicals.len() as u64;
        self.set_aside(slot, failed.stuck, stuck_count);
        self.put_back(failed.physicals);
        Err(self.not_placed(slot.id.tenant, bytes, failed.error))
    }

    pub(in crate::pool) fn not_placed(
        &self,
        id: TenantId,
        bytes: u64,
        error: MemoryError,
    ) -> BlockError {
        match error.call() {
            Some(cause) if cause.is_out_of_memory() => self.driver_out_of_memory(id, bytes, *cause),
            _ => error.into(),
        }
    }

    pub(in crate::pool) fn make_mapping_room(
        &mut self,
        id: TenantId,
        count: u64,
        claims: bool,
    ) -> Result<(), BlockError> {
        if claims
            && let Some(missing) = count
                .checked_sub(self.memory.budget.totals().left.mappings)
                .filter(|&n| n > 0)
        {
            self.take_back_mappings(id, missing)?;
        }
        if self.memory.budget.totals().left.mappings < count {
            return Err(BlockError::OutOfMappings {
                wanted: count,
                held: self.memory.budget.totals().mappings,
                limit: self.memory.budget.totals().limits.mappings,
            });
        }
        Ok(())
    }

    /// Zeroes the memory behind `begun` that another tenant wrote to, and all written memory if the
    /// block must read as zero, before the new owner's work. In a pool that overwrites freed
    /// memory, also zeroes memory that could not be overwritten, unless a stream captures. Returns
    /// `true` if the zeroing is still queued on the home stream.
    pub(super) fn scrub_stale(
        &mut self,
        slot: &mut Slot,
        begun: u64,
        fit: &Fit<'_>,
    ) -> Result<bool, Unfinished> {
        let id = slot.id.tenant;
        let scrubs = self.memory.policy.scrub != Scrub::Never;
        let owed = |last_writer: LastWriter| fit.zeroed || (scrubs && last_writer.by != id.0);
        let overwrites = self.blocks.fill().is_some();
        let mut must = false;
        let revived = fit.zeros.map_or((0, 0), |(from, to)| (from, to.min(begun)));
        let placed = (begun, slot.space.bytes());
        let mut to_scrub: Option<(u64, u64)> = None;
        for (from, to) in [revived, placed] {
            if from >= to {
                continue;
            }
            for (offset, size, last_writer) in slot.space.noted(from, to) {
                let owed = owed(last_writer);
                if owed || (overwrites && !last_writer.blank) {
                    must |= owed;
                    let start = to_scrub.map_or(offset, |(start, _)| start);
                    to_scrub = Some((start, offset + size));
                }
            }
        }
        let Some((start, end)) = to_scrub else {
            return Ok(false);
        };
        match self.zero(slot, start, end - start, fit.home) {
            Err(failed) if !must && failed.is_of_capture() => return Ok(false),
            zeroed => zeroed?,
        }
        // Precommitted memory must not be unmapped under the fill.
        if let Some(home) = fit.home.filter(|_| end > fit.to) {
            slot.fence.merge(Fence::stream(home.clone()));
        }
        Ok(fit.home.is_some())
    }
}
