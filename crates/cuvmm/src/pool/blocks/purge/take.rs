//! Taking memory out of slots: it is unmapped, accounted for, and given up if no other slot maps
//! it.

use crate::error::{CallError, MemoryError};
use crate::extents::{Extent, Fence, NotPutBack, Stuck, TakenOut};
use crate::pool::accounts::Amount;
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{Slot, SlotId};
use crate::pool::core::Locked;

impl Locked<'_> {
    /// Takes out the memory placed behind `begun` in a slot that is out, and refunds it. Only
    /// `running` may still use it: if that is incomplete, all the memory is quarantined, otherwise
    /// only stuck memory.
    pub(in crate::pool::blocks) fn uncommit(
        &mut self,
        slot: &mut Slot,
        begun: u64,
        running: &Fence,
    ) {
        if slot.space.last_offset().is_none_or(|last| last < begun) {
            return;
        }
        let (taken, stuck) = self.unlocked(|| slot.space.empty_from(begun, running));
        stuck.into_iter().for_each(|stuck| self.stuck(slot, stuck));
        self.abandon(slot, taken);
    }

    /// Accounts for extents that a slot, which is out, has lost in a failed roll-back; returns the
    /// reason.
    pub(in crate::pool::blocks) fn lose(
        &mut self,
        slot: &mut Slot,
        lost: NotPutBack,
    ) -> MemoryError {
        let stuck = lost.stuck.into_iter();
        stuck.for_each(|stuck| self.stuck(slot, stuck));
        self.abandon(slot, lost.rest);
        lost.error
    }

    /// Accounts for extents taken out of a slot, which is out, and gives up those that no other
    /// slot maps; returns their bytes.
    pub(in crate::pool::blocks) fn abandon(&mut self, slot: &mut Slot, taken: TakenOut) -> u64 {
        let (mut own, mut left) = (Vec::new(), Amount::default());
        for (offset, unmapped) in taken.into_parts() {
            left.mappings += 1;
            let (id, memory) = (slot.id.tenant, &unmapped.physical);
            let is_last = self.blocks.leave(slot, offset, memory.as_raw());
            // Otherwise the mappings of other slots hold the memory, unless a panic lost those slots.
            if is_last || self.blocks.ends_sharing(id, memory) {
                left.bytes += unmapped.size();
                own.push(unmapped);
            }
        }
        self.memory.budget.give_up(slot.id.tenant, left);
        self.blocks.slots.renew(slot);
        self.put_back(own);
        left.bytes
    }

    /// Accounts for an extent that is stuck in a slot, which is out.
    pub(in crate::pool::blocks) fn stuck(&mut self, slot: &mut Slot, stuck: Stuck) {
        slot.broken = true;
        let bytes = match self.blocks.leave(slot, stuck.offset, stuck.handle) {
            true => stuck.size,
            // The memory belongs to other slots.
            false => 0,
        };
        let left = Amount::of(bytes, 1, 0);
        self.memory.budget.give_up(slot.id.tenant, left);
        self.memory.budget.quarantine(bytes, 1);
    }

    /// Quarantines bytes that are stuck in a slot.
    pub(in crate::pool::blocks) fn set_aside(
        &mut self,
        slot: &mut Slot,
        bytes: u64,
        mappings: u64,
    ) {
        if bytes > 0 {
            slot.broken = true;
            self.memory.budget.quarantine(bytes, mappings);
        }
    }

    /// Unmaps extents of a slot that is out, the last first, up to one that the driver refuses, and
    /// keeps their memory if it may be kept; returns the bytes.
    pub(in crate::pool::blocks) fn take_extents(
        &mut self,
        slot: &mut Slot,
        at: Vec<u64>,
    ) -> (u64, Result<(), CallError>) {
        let mut taken = TakenOut::default();
        let outcome = self.unlocked(|| slot.completed()?.take_out(at, &mut taken));
        taken.settle();
        let bytes = taken.bytes();
        self.abandon(slot, taken);
        (bytes, outcome)
    }

    /// Takes all memory from a slot, which is out, that its block does not use: reclaimable memory,
    /// and memory that other slots map too.
    pub(in crate::pool::blocks) fn take_unused(
        &mut self,
        slot: &mut Slot,
    ) -> Result<(), CallError> {
        let unused = slot.spare().chain(slot.parting());
        let at: Vec<u64> = unused.map(|extent| extent.offset).collect();
        match at.is_empty() {
            true => Ok(()),
            false => self.take_extents(slot, at).1,
        }
    }
    /// Takes those of a slot's extents, the last first, that can still be reclaimed.
    pub(in crate::pool) fn reclaim_extents(
        &mut self,
        id: SlotId,
        at: &[u64],
    ) -> (u64, Result<(), CallError>) {
        let gives = |slot: &Slot| slot.is_unused() && slot.has_spare();
        if !self.blocks.slots.get(id).is_some_and(gives) {
            return (0, Ok(()));
        }
        let taken = self.with_slot_out(id, |state, slot| {
            // Last first and without a hole: the mapper may have placed more memory behind the
            // planned extents, and the slot may have been used and freed again.
            let spare = slot.spare().map(|extent| extent.offset);
            let at = spare.zip(at).take_while(|(spare, at)| spare == *at);
            let at = at.map(|(spare, _)| spare).collect();
            state.take_extents(slot, at)
        });
        taken.unwrap_or((0, Ok(())))
    }
}

impl Blocks {
    /// Returns the extents that can be reclaimed from a slot if `is_complete` finds its fence complete,
    /// the last first.
    pub(in crate::pool) fn reclaimable(
        &mut self,
        id: SlotId,
        is_complete: impl FnOnce(&mut Fence) -> bool,
    ) -> impl Iterator<Item = Extent> {
        let slot = self.slots.get_mut(id);
        // A block that grew into its precommitted memory may still be listed.
        let slot = slot.and_then(|slot| {
            let gives = slot.has_spare() && is_complete(&mut slot.fence);
            gives.then_some(&*slot)
        });
        slot.into_iter().flat_map(Slot::spare)
    }
}
