//! Making a block's memory its own from some byte on, so that it can be written there: what it
//! shows of [shared memory](super::shared) behind that is unmapped, and the extent that the byte lies in
//! gives way to memory of its own with the same bytes before it, or is opened if nobody else shows
//! it any more.
//!
//! Addresses stay, so that work which may use them has to have passed first. The copy comes from
//! where another block shows the extent, behind what the home stream has queued.

use std::cell::Cell;

use super::budget::TenantId;
use super::core::{Core, Locked};
use super::fills::{Unfinished, is_capturing};
use super::ids::{BlockPlace, SlotId};
use super::slot::Slot;
use super::state::State;
use super::wait::{Attempt, Wait};
use crate::error::{BlockError, CallError, MemoryError};
use crate::own::Access;
use crate::region::{Extent, Fence, LastWriter, TakenOut};

/// A block's slot, and from where on its memory is to be its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) slot: SlotId,
    pub(super) from: u64,
}

/// A block among several that were asked for, and why nothing was done with it.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) index: usize,
    pub(super) cause: BlockError,
}

impl Refused {
    /// The error for users, who gave a size with each block.
    pub(super) fn with_size(self, size: impl Fn(usize) -> Option<u64>) -> BlockError {
        let Self { index, cause } = self;
        let size = size(index).unwrap_or(0);
        let cause = Box::new(cause);
        BlockError::Refused { index, size, cause }
    }
}

/// How far one call has come.
#[derive(Debug, Default)]
struct Progress {
    /// The fences cover the work that was queued when it began.
    fenced: Cell<bool>,
    /// The block that was refused.
    refused: Cell<usize>,
}

impl Core {
    /// Makes memory its own that blocks of a tenant, which are to have so many bytes each, would else
    /// grow over and not be able to write.
    pub(super) fn unshare_cuts(
        &self,
        tenant: TenantId,
        wanted: &[(BlockPlace, u64)],
        wait: Wait,
    ) -> Result<(), Refused> {
        let slots = wanted.iter().map(|(place, size)| (place.slot, *size));
        let state = self.await_slots(self.lock(), slots);
        let (mut indices, mut cut) = (Vec::new(), Vec::new());
        for (index, (place, size)) in wanted.iter().enumerate() {
            let step = state.cut_in(place, *size);
            if let Some(step) = step.map_err(|cause| Refused { index, cause })? {
                indices.push(index);
                cut.push(step);
            }
        }
        Self::let_go(state);
        if cut.is_empty() {
            return Ok(());
        }
        let made = self.unshare(tenant, &cut, wait);
        made.map_err(|Refused { index, cause }| Refused {
            index: indices.get(index).copied().unwrap_or_default(),
            cause,
        })
    }

    pub(super) fn unshare(
        &self,
        tenant: TenantId,
        steps: &[Step],
        wait: Wait,
    ) -> Result<(), Refused> {
        let progress = Progress {
            // The work that counts is what was queued when a future's request was attempted first.
            fenced: Cell::new(matches!(wait, Wait::Turn { begun: true, .. })),
            refused: Cell::default(),
        };
        let slots = steps.iter().map(|step| (step.slot, 0));
        let state = self.await_slots(self.lock(), slots);
        let bytes: u64 = steps.iter().map(|step| state.replaced(step)).sum();
        Self::let_go(state);
        let made = self.request(tenant, bytes, wait, |state| {
            self.attempt_to_unshare(state, steps, &progress)
        });
        let index = progress.refused.get();
        made.map_err(|cause| Refused { index, cause })
    }

    fn attempt_to_unshare<'a>(
        &'a self,
        mut state: Locked<'a>,
        steps: &[Step],
        progress: &Progress,
    ) -> Attempt<'a, ()> {
        // Whoever is alone by now needs nothing.
        state.part_all();
        // The mapper may be placing something behind what is to go.
        state = self.await_slots(state, steps.iter().map(|step| (step.slot, u64::MAX)));
        if !progress.fenced.replace(true) {
            steps.iter().for_each(|step| state.fence(step));
        }
        let mut steps_and_indices = steps.iter().enumerate();
        let mut outcome = steps_and_indices.try_for_each(|(index, step)| {
            progress.refused.set(index);
            state.check_unused(step)
        });
        for (index, step) in steps.iter().enumerate() {
            if outcome.is_err() {
                break;
            }
            progress.refused.set(index);
            loop {
                // The lock was let go for an earlier one, whose copy may read what this one shows.
                state = self.await_slot(state, step.slot);
                let made = state.check_unused(step);
                match made.and_then(|()| state.unshare_slot(step)) {
                    // Other operations have all slots that could be copied from.
                    Ok(false) => state = state.wait(&self.settled, None),
                    made => {
                        outcome = made.map(drop);
                        break;
                    }
                }
            }
        }
        (state, outcome)
    }
}

impl State {
    /// From where on a block that can grow to so many bytes has to get memory of its own before.
    /// One that is just falling asleep does not grow: it may stay awake, and show the same as before.
    fn cut_in(&self, place: &BlockPlace, size: u64) -> Result<Option<Step>, BlockError> {
        let slot = self.slot(place.slot);
        let Some((slot, block)) = slot.and_then(|slot| Some((slot, slot.block.as_ref()?))) else {
            return Ok(None);
        };
        let from = block.requested;
        if !slot.is_cut() || size <= from || size > place.capacity {
            return Ok(None);
        }
        match slot.sleep_state.is_awake() {
            true => Ok(Some(Step {
                slot: place.slot,
                from,
            })),
            false => Err(MemoryError::Asleep { size: from }.into()),
        }
    }

    /// How much memory of its own a block gets instead of what it shares.
    fn replaced(&self, step: &Step) -> u64 {
        let slot = self.slot(step.slot).filter(|slot| slot.shared > step.from);
        let replaced = slot.and_then(|slot| {
            let extent = slot.space.bounds_around(step.from)?;
            Some(slot.used().saturating_sub(extent.start))
        });
        replaced.unwrap_or(0)
    }

    /// Has the work that is queued by now pass before other memory is put under a block.
    fn fence(&mut self, step: &Step) {
        let slot = self.slot_mut(step.slot);
        if let Some(slot) = slot.filter(|slot| slot.bound() > step.from) {
            slot.fence_work();
        }
    }

    /// Whether it has, and no lease keeps the memory where it is.
    fn check_unused(&mut self, step: &Step) -> Result<(), BlockError> {
        let (capturing, needs) = (self.capturing, &mut self.needs_synchronise);
        let tenancy = self.tenants.get_mut(&step.slot.tenant);
        let slot = tenancy.and_then(|tenancy| tenancy.slot_mut(step.slot.index));
        let Some(slot) = slot.filter(|slot| slot.bound() > step.from) else {
            return Ok(());
        };
        if Self::poll(capturing, needs, &mut slot.fence)? && slot.leases == 0 {
            return Ok(());
        }
        let bytes = slot.bound() - step.from;
        if capturing > 0 {
            let shortage = self.shortage(step.slot.tenant, bytes, 0);
            return Err(BlockError::Capturing(shortage));
        }
        let slot = self.slot(step.slot);
        Err(BlockError::SharedInUse {
            offset: step.from,
            bytes,
            others: slot.map_or(0, |slot| self.count_others(slot, step.from)),
        })
    }
}

impl Locked<'_> {
    /// Makes memory of a slot, which is in its place, its own. False if other operations have all
    /// slots that it could be copied from.
    fn unshare_slot(&mut self, step: &Step) -> Result<bool, BlockError> {
        self.check_usable(step.slot.tenant)?;
        let made = self.with_slot_out(step.slot, |state, slot| state.own_from(slot, step.from));
        made.unwrap_or(Ok(true))
    }

    /// The same with a slot that is out. Its fence has passed.
    fn own_from(&mut self, slot: &mut Slot, from: u64) -> Result<bool, BlockError> {
        if slot.bound() <= from {
            return Ok(true);
        }
        if !slot.is_unused() {
            return Err(CallError::InUse.into());
        }
        self.take_unused(slot)?;
        // What is left of it is the extent that the byte lies in.
        let (Some(extent), to) = (slot.space.extent_around(from), slot.used()) else {
            return Ok(true);
        };
        if slot.shared <= from {
            return self.open(slot, extent);
        }
        let (id, bytes) = (slot.id.tenant, to.saturating_sub(extent.offset));
        // The copy would become a part of the graph, and nothing would have been copied. The lock may
        // have been let go since the fence was asked.
        if self.capturing > 0 || is_capturing(slot.home())? {
            return Err(BlockError::Capturing(self.shortage(id, bytes, 0)));
        }
        self.make_room(id, bytes)?;
        let others = self.others_of(slot, extent);
        if others.is_empty() {
            // It turned out to have it alone.
            if let Some(tenancy) = self.tenants.get_mut(&id) {
                tenancy.share_table.settle(slot);
            }
            self.renew(slot);
            return self.open(slot, extent);
        }
        let Some(mut source) = others.iter().find_map(|&other| self.take_out(other)) else {
            return match others.iter().any(|&other| self.is_out(other)) {
                true => Ok(false),
                // Lost to a panic.
                false => Err(CallError::InUse.into()),
            };
        };
        let owned = self.exchange_for_own(slot, (extent, to), &mut source);
        self.put_slot(source);
        owned.map(|()| true)
    }

    /// The other slots that show an extent which a slot shows.
    fn others_of(&self, slot: &Slot, extent: Extent) -> Vec<SlotId> {
        let SlotId { tenant, index } = slot.id;
        let handle = slot.space.handle_at(extent.offset);
        let (Some(handle), Some(tenancy)) = (handle, self.tenants.get(&tenant)) else {
            return Vec::new();
        };
        let others = tenancy.share_table.others_of(handle, index);
        others.map(|index| SlotId { tenant, index }).collect()
    }

    /// Puts memory of a slot's own where it shows a shared extent, with the same bytes before `to`.
    fn exchange_for_own(
        &mut self,
        slot: &mut Slot,
        (extent, to): (Extent, u64),
        source: &mut Slot,
    ) -> Result<(), BlockError> {
        let (offset, mut old) = (extent.offset, TakenOut::default());
        self.unlocked(|| slot.completed()?.take_out([offset], &mut old))?;
        let shared = std::mem::replace(&mut slot.shared, offset);
        let copied = self.copy_to_own(slot, (offset, to.saturating_sub(offset)), source);
        let outcome = match copied {
            Ok(()) => Ok(()),
            Err(Unfinished { error, running }) if !running.is_complete() => {
                // It may not be written before the copy has passed: that is asked when it is wanted
                // again.
                slot.fence.merge(running);
                Err(error)
            }
            Err(failed) => {
                self.put_shared_back(slot, old)?;
                slot.shared = shared;
                return Err(failed.error);
            }
        };
        self.abandon(slot, old);
        if outcome.is_ok() {
            slot.lent = slot.lent.min(offset);
        }
        slot.space.settle(offset);
        let noted = slot.space.note_writer(offset, to, slot.id.tenant.0);
        slot.touched = self.tick();
        if let Some(block) = &mut slot.block {
            block.noted = block.noted.max(noted);
        }
        outcome
    }

    /// Puts a shared extent back where it was. If even that fails, the block has lost it.
    fn put_shared_back(&mut self, slot: &mut Slot, old: TakenOut) -> Result<(), BlockError> {
        let bytes = old.bytes();
        let Err(lost) = self.unlocked(|| slot.space.put_back(old)) else {
            return Ok(());
        };
        let offset = lost.offset;
        let cause = self.lose(slot, lost);
        slot.broken = true;
        Err(BlockError::Lost {
            address: slot.space.address(),
            offset,
            bytes,
            cause,
        })
    }

    /// Opens an extent that a slot has alone.
    fn open(&mut self, slot: &mut Slot, extent: Extent) -> Result<bool, BlockError> {
        let opened = self.unlocked(|| slot.space.cap(extent.offset, Access::ReadWrite));
        opened?;
        slot.lent = slot.lent.min(extent.offset);
        Ok(true)
    }

    /// Places memory of a slot's own where a shared extent was, and copies its first bytes there.
    fn copy_to_own(
        &mut self,
        slot: &mut Slot,
        (offset, bytes): (u64, u64),
        source: &mut Slot,
    ) -> Result<(), Unfinished> {
        // All of it is overwritten by the copy: there is nothing to scrub.
        self.commit(slot, offset, bytes, true)?;
        // Another tenant may have written to it before, and if the copy fails so may this one.
        let several = LastWriter::SEVERAL;
        slot.space.note_writer(offset, offset + bytes, several);
        let home = slot.home().cloned();
        let copied = self.copy_between(source, slot, (offset, bytes), home.as_ref());
        copied.inspect_err(|failed| {
            if failed.running.is_complete() {
                self.uncommit(slot, offset, &Fence::complete());
            }
        })
    }
}
