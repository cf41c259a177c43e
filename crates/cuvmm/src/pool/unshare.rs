//! Unsharing: making a block's memory its own from some byte on, so that it can be written there.
//! The extents of [shared memory](super::shared) behind the byte are unmapped. The extent that
//! contains the byte is replaced by memory of the block's own with the same bytes before it, or
//! made writable if no other slot maps it any more.
//!
//! Addresses stay, so work that may use them must be complete first. The copy is made from another
//! block that maps the extent, behind the work queued on the home stream.

use std::cell::Cell;

use super::budget::TenantId;
use super::core::{Core, Locked};
use super::fills::Unfinished;
use super::ids::{BlockPlace, SlotId};
use super::slot::Slot;
use super::state::State;
use super::wait::{Attempt, Wait};
use crate::error::{BlockError, CallError};
use crate::ledger::Purpose;
use crate::own::Access;
use crate::region::{Extent, Fence, LastWriter, TakenOut};

/// A block's slot, and the offset from which on its memory must be its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) slot: SlotId,
    pub(super) from: u64,
}

/// The block among several that was refused, and the reason.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) index: usize,
    pub(super) cause: BlockError,
}

impl Refused {
    /// Makes the error for users, who gave a size with each block.
    pub(super) fn with_size(self, size: impl Fn(usize) -> Option<u64>) -> BlockError {
        let Self { index, cause } = self;
        let size = size(index).unwrap_or(0);
        let cause = Box::new(cause);
        BlockError::Refused { index, size, cause }
    }
}

/// The progress of one call.
#[derive(Debug, Default)]
struct Progress {
    /// `true` if the fences cover the work that was queued when the call began.
    fenced: Cell<bool>,
    /// The index of the block that was refused.
    refused: Cell<usize>,
}

impl Core {
    /// Unshares memory of blocks that are to grow to the given sizes and could otherwise not write
    /// all of it.
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
        Self::unlock(state);
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
            // The work that counts is what was queued when a future's request was first attempted.
            fenced: Cell::new(matches!(wait, Wait::Turn { begun: true, .. })),
            refused: Cell::default(),
        };
        let slots = steps.iter().map(|step| (step.slot, 0));
        let state = self.await_slots(self.lock(), slots);
        let bytes: u64 = steps.iter().map(|step| state.replaced(step)).sum();
        Self::unlock(state);
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
        // A slot that is the last to map its memory by now needs nothing.
        state.part_all();
        // The mapper may be placing memory behind the memory that has to go.
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
                // The lock was released for an earlier block, whose copy may read this block's
                // memory.
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
    /// Returns the offset from which on a block needs memory of its own before it can grow to
    /// `size` bytes. A block that is falling asleep does not grow: it may stay awake, and show the
    /// same memory as before.
    fn cut_in(&self, place: &BlockPlace, size: u64) -> Result<Option<Step>, BlockError> {
        let slot = self.slot(place.slot);
        let Some((slot, block)) = slot.and_then(|slot| Some((slot, slot.block.as_ref()?))) else {
            return Ok(None);
        };
        let from = block.requested;
        if !slot.is_truncated() || size <= from || size > place.capacity {
            return Ok(None);
        }
        slot.check_awake()?;
        let slot = place.slot;
        Ok(Some(Step { slot, from }))
    }

    /// Returns how many bytes of its own a block gets instead of shared memory.
    fn replaced(&self, step: &Step) -> u64 {
        let slot = self.slot(step.slot).filter(|slot| slot.shared > step.from);
        let replaced = slot.and_then(|slot| {
            let extent = slot.space.bounds_around(step.from)?;
            Some(slot.used().saturating_sub(extent.start))
        });
        replaced.unwrap_or(0)
    }

    /// Extends a block's fence to the work queued by now, which must be complete before other
    /// memory is put under the block.
    fn fence(&mut self, step: &Step) {
        let slot = self.slot_mut(step.slot);
        if let Some(slot) = slot.filter(|slot| slot.bound() > step.from) {
            slot.fence_work();
        }
    }

    /// Checks that the fence is complete, and that no lease keeps the memory in place.
    fn check_unused(&mut self, step: &Step) -> Result<(), BlockError> {
        let slot = self.slot_and_polls(step.slot);
        let Some((slot, polls)) = slot.filter(|(slot, _)| slot.bound() > step.from) else {
            return Ok(());
        };
        if polls.poll(&mut slot.fence)? && slot.leases == 0 {
            return Ok(());
        }
        let bytes = slot.bound() - step.from;
        if self.is_capturing() {
            return Err(self.captured(step.slot.tenant, bytes));
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
    /// Unshares memory of a slot that is in its place. Returns `false` if other operations have all
    /// slots that it could be copied from.
    fn unshare_slot(&mut self, step: &Step) -> Result<bool, BlockError> {
        self.check_usable(step.slot.tenant)?;
        let made = self.with_slot_out(step.slot, |state, slot| state.own_from(slot, step.from));
        made.unwrap_or(Ok(true))
    }

    /// Unshares memory of a slot that is out and whose fence is complete. Returns `false` if other
    /// operations have all slots that it could be copied from.
    fn own_from(&mut self, slot: &mut Slot, from: u64) -> Result<bool, BlockError> {
        if slot.bound() <= from {
            return Ok(true);
        }
        if !slot.is_unused() {
            return Err(CallError::InUse.into());
        }
        self.take_unused(slot)?;
        // The extent that contains the byte is left.
        let (Some(extent), to) = (slot.space.extent_around(from), slot.used()) else {
            return Ok(true);
        };
        if slot.shared <= from {
            return self.open(slot, extent);
        }
        let (id, bytes) = (slot.id.tenant, to.saturating_sub(extent.offset));
        // The copy would become part of the graph instead of running now. The lock may have been
        // released since the fence was polled.
        if self.captures(slot.home())? {
            return Err(self.captured(id, bytes));
        }
        self.reclaim_for(id, bytes, Purpose::Growth)?;
        let others = self.others_of(slot, extent);
        if others.is_empty() {
            // The slot is the last to map the extent.
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

    /// Returns the other slots that map an extent that a slot maps.
    fn others_of(&self, slot: &Slot, extent: Extent) -> Vec<SlotId> {
        let SlotId { tenant, index } = slot.id;
        let handle = slot.space.handle_at(extent.offset);
        let (Some(handle), Some(tenancy)) = (handle, self.tenants.get(&tenant)) else {
            return Vec::new();
        };
        let others = tenancy.share_table.others_of(handle, index);
        others.map(|index| SlotId { tenant, index }).collect()
    }

    /// Replaces a shared extent of a slot by memory of its own with the same bytes before `to`.
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
                // The memory may not be written before the copy is complete, which is checked when
                // it is next needed.
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

    /// Puts a shared extent back. If even that fails, the block has lost it.
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

    /// Makes an extent that only this slot maps writable.
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
        // The copy overwrites all of it: there is nothing to scrub.
        self.commit(slot, offset, bytes, true)?;
        // Another tenant may have written to the memory before, and if the copy fails this tenant
        // may have too.
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
