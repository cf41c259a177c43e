//! Waking blocks: charged and marked first, then furnished bit by bit, and awake when all of them are.
//!
//! Memory comes by the way of an allocation: idle memory is taken back for it, hooks are asked, and
//! if it is not enough nothing has changed. A failure takes all of it out again.
//!
//! No byte is copied here.

use std::time::Instant;

use super::asleep::{Bed, Choice, Chosen, Tally};
use super::budget::TenantId;
use super::commit::Fit;
use super::slot::{Place, Slot};
use super::slumber::Slumber;
use super::state::State;
use super::tenant::Tenant;
use crate::error::{AllocateError, CommitError, WakeError};
use crate::own::Stream;
use crate::region::{Fence, wait_for};
use crate::store::{HostStore, Saved};

/// A block that is being woken. Dropped before that is done, it sleeps on, with what was kept of it.
#[derive(Debug)]
pub(crate) struct Rising {
    bed: Option<Bed>,
    /// What was kept of it.
    saved: Option<Saved>,
    /// Whether what is placed reads as zero.
    zeroed: bool,
    home: Option<Stream>,
    /// Whether the home stream has been told to zero some of it.
    filled: bool,
}

impl Tenant {
    /// Chooses the blocks that are to wake, and charges for them.
    pub(crate) fn rise(
        &self,
        choice: Choice<'_>,
        until: Option<Instant>,
    ) -> Result<Vec<Rising>, WakeError> {
        let owner = self.owner();
        let (core, id) = (&owner.core, owner.tenant);
        core.device.own_process()?;
        let bytes = core.lock().asleep(id, choice);
        let chosen = core.insist(id, bytes, until, |mut state| {
            let outcome = state.rouse(id, choice);
            (state, outcome)
        });
        let chosen = chosen.map_err(|cause| WakeError::Memory { bytes, cause })??;
        let rising = chosen.into_iter().map(|(chosen, mut rising)| {
            rising.bed = Some(Bed::of(core, chosen));
            rising
        });
        Ok(rising.collect())
    }
}

impl Rising {
    /// The block's size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bed.as_ref().map_or(0, |bed| bed.bytes)
    }

    /// The same in whole granules.
    pub(crate) fn used(&self) -> u64 {
        self.bed.as_ref().map_or(0, |bed| bed.used)
    }

    /// Where something was kept of it.
    pub(crate) fn kept_in(&self) -> Option<HostStore> {
        self.saved.as_ref().map(Saved::store)
    }

    /// How many bytes were kept of it.
    pub(crate) fn kept(&self) -> u64 {
        self.saved.as_ref().map_or(0, Saved::bytes)
    }

    /// Where it lies and what was kept of it, to be copied there.
    pub(crate) fn contents(&mut self) -> Option<(&Bed, &mut Saved)> {
        self.bed.as_ref().zip(self.saved.as_mut())
    }

    /// Places all that it lacks where nothing was kept.
    pub(crate) fn furnish(&mut self) -> Result<(), AllocateError> {
        let (zeroed, home) = (self.zeroed, self.home.clone());
        let Some(bed) = &self.bed else { return Ok(()) };
        let mut state = bed.lease.core().lock();
        let step = (bed.used, u64::MAX);
        let (_, filled) = state.furnish_next(bed.lease.place(), step, home.as_ref(), zeroed)?;
        self.filled |= filled;
        Ok(())
    }

    /// It has its memory again, which shows what was kept of it.
    pub(crate) fn wake(mut self) {
        if let Some(bed) = self.bed.take() {
            let mut state = bed.lease.core().lock();
            state.settle_awake(bed.lease.place(), self.saved.is_some());
        }
    }
}

impl Bed {
    /// Places the next extent of a block that wakes, to be copied to at once; returns up to where
    /// there is memory.
    pub(crate) fn furnish_next(&self) -> Result<u64, AllocateError> {
        let mut state = self.lease.core().lock();
        let largest = state.largest_under(self.lease.place());
        let step = (self.used, largest);
        let (end, _) = state.furnish_next(self.lease.place(), step, None, false)?;
        Ok(end)
    }
}

impl Drop for Rising {
    fn drop(&mut self) {
        let Some(bed) = self.bed.take() else { return };
        // Nothing is unmapped under a fill.
        let home = self.home.take().filter(|_| self.filled);
        let filling = home.filter(|home| wait_for(home).is_err_and(|failed| !failed.ended));
        let copying = self.saved.as_mut().map_or(&[][..], Saved::unfinished);
        let running = Fence::streams(filling.into_iter().chain(copying.iter().cloned()).collect());
        let mut state = bed.lease.core().lock();
        state.relapse(bed.lease.place(), bed.used, self.saved.take(), running);
        drop(state);
        bed.lease.core().announce();
    }
}

impl State {
    /// Bytes that waking the chosen blocks takes.
    fn asleep(&self, id: TenantId, choice: Choice<'_>) -> u64 {
        let sleepers = self.choose(id, choice, |slumber| {
            matches!(slumber, Slumber::Asleep { .. })
        });
        let slots = sleepers.iter().filter_map(|&index| self.slot(id, index));
        slots
            .filter_map(|slot| Some(slot.block.as_ref()?.used))
            .sum()
    }

    /// Charges for the chosen blocks of a tenant that sleep, and marks them as moving.
    fn rouse(
        &mut self,
        id: TenantId,
        choice: Choice<'_>,
    ) -> Result<Result<Vec<(Chosen, Rising)>, WakeError>, AllocateError> {
        if self.capturing > 0 {
            return Ok(Err(WakeError::Capturing));
        }
        self.check_usable(id)?;
        let moving = self.choose(id, choice, |slumber| {
            matches!(slumber, Slumber::Moving { .. })
        });
        let mut busy = Tally::default();
        for slot in moving.iter().filter_map(|&index| self.slot(id, index)) {
            busy.add(slot);
        }
        if busy.blocks > 0 {
            let Tally { blocks, bytes } = busy;
            return Ok(Err(WakeError::Busy { blocks, bytes }));
        }
        let total = self.asleep(id, choice);
        self.make_room(id, total)?;
        self.budget.charge(id, total);
        let sleepers = self.choose(id, choice, |slumber| {
            matches!(slumber, Slumber::Asleep { .. })
        });
        let risen = sleepers
            .into_iter()
            .filter_map(|index| self.raise(id, index));
        Ok(Ok(risen.collect()))
    }

    /// Marks a sleeping block that was charged for as moving.
    fn raise(&mut self, id: TenantId, index: usize) -> Option<(Chosen, Rising)> {
        let slot = self.slot_mut(id, index)?;
        let block = slot.block.as_ref()?;
        let (zeroed, home, owed) = (block.zeroed, block.home.clone(), block.used);
        let saved = match &mut slot.slumber {
            Slumber::Asleep { saved } => saved.take(),
            _ => None,
        };
        let aside = Vec::new();
        let filling = Fence::passed();
        let moving = Slumber::Moving {
            aside,
            owed,
            filling,
        };
        let chosen = self.mark(id, index, moving)?;
        let rising = Rising {
            bed: None,
            saved,
            zeroed,
            home,
            filled: false,
        };
        Some((chosen, rising))
    }

    /// The largest extent that may lie under a block.
    fn largest_under(&self, place: &Place) -> u64 {
        let slot = self.slot(place.tenant, place.slot);
        slot.map_or(self.policy.largest_extent, |slot| slot.class.largest)
    }

    /// Places what a moving block of `used` bytes lacks, at most one extent of `most` bytes or all;
    /// returns up to where there is memory, and whether the home stream zeroes some of it.
    fn furnish_next(
        &mut self,
        place: &Place,
        (used, most): (u64, u64),
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<(u64, bool), AllocateError> {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return Ok((used, false));
        };
        let begun = slot.space.bytes();
        let left = used.saturating_sub(begun);
        let bytes = match most {
            u64::MAX => left,
            most => self.device.granule().extent_within(left, most),
        };
        let furnished = self.furnish_moving(id, &mut slot, (begun, begun + bytes), home, zeroed);
        let end = slot.space.bytes();
        self.put_slot(id, index, slot);
        Ok((end, furnished?))
    }

    /// Places charged memory in a range of a moving block's slot, with no other tenant's data in it.
    fn furnish_moving(
        &mut self,
        id: TenantId,
        slot: &mut Slot,
        (begun, end): (u64, u64),
        home: Option<&Stream>,
        zeroed: bool,
    ) -> Result<bool, AllocateError> {
        if begun >= end {
            return Ok(false);
        }
        let stuck = slot.space.stuck_in(begun, end);
        if stuck > 0 {
            let start = begun;
            return Err(CommitError::Quarantined {
                start,
                end,
                bytes: stuck,
            }
            .into());
        }
        self.place(id, slot, begun, end - begun, true)?;
        if let Slumber::Moving { owed, .. } = &mut slot.slumber {
            *owed = owed.saturating_sub(end - begun);
        }
        let fit = Fit {
            zeros: None,
            ..Fit::new(end, home, zeroed)
        };
        self.cleanse(id, slot, begun, &fit).map_err(|unfinished| {
            // The roll-back takes out what it can.
            if let Slumber::Moving { filling, .. } = &mut slot.slumber {
                filling.merge(unfinished.running);
            }
            unfinished.error
        })
    }

    /// A moving block has all its memory.
    fn settle_awake(&mut self, place: &Place, restored: bool) {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return;
        };
        slot.slumber = Slumber::Awake;
        slot.touched = self.tick();
        slot.space.settle(0);
        let bytes = slot.space.bytes();
        if let Some(block) = &mut slot.block {
            block.reach = bytes;
            block.stained = slot.space.stain(0, block.used, id.0);
            if restored && block.zeroed {
                // What the last granule holds behind what was kept is not zero for certain.
                block.ever = block.ever.max(block.used);
            }
        }
        self.put_slot(id, index, slot);
        self.heed_sleepers(id);
    }

    /// A moving block is to sleep on: what it was given and what was charged go back. What a stream
    /// may still be filling or copying to stays where it is, and is quarantined.
    fn relapse(&mut self, place: &Place, used: u64, saved: Option<Saved>, mut filling: Fence) {
        let (id, index) = (place.tenant, place.slot);
        let Some(mut slot) = self.take_slot(id, index) else {
            return;
        };
        let count = slot.space.count();
        if let Slumber::Moving { filling: known, .. } = std::mem::take(&mut slot.slumber) {
            filling.merge(known);
        }
        self.uncommit(&mut slot, 0, filling.proof());
        slot.fence.merge(filling);
        self.budget.refund(id, used);
        self.budget.refund_mappings(id, count);
        slot.receded();
        slot.slumber = match slot.block {
            Some(_) => Slumber::Asleep { saved },
            None => Slumber::Awake,
        };
        self.put_slot(id, index, slot);
        self.heed_sleepers(id);
    }
}
