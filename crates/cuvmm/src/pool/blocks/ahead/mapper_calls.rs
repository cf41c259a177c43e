//! The calls to a pool's mapper: for blocks that run low on precommitted memory, and for the free
//! target.
//!
//! The mapper's thread is woken when the lock is released.

use super::pace::Precommit;
use crate::extents::{Urgency, Waker};
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{Occupant, SlotId};
use crate::pool::memory::Memory;

impl Precommit {
    /// Queues a block that runs low on precommitted memory. Its slot has `bytes` of memory.
    pub(in crate::pool::blocks) fn look_at(
        &mut self,
        slot: SlotId,
        block: &mut Occupant,
        bytes: u64,
    ) {
        let low = bytes.saturating_sub(block.used) < block.pace.low && bytes < block.most;
        if low && !block.pace.called && !self.waker.is_dead() {
            block.pace.called = true;
            self.growing.push_back(slot);
            self.call(block.pace.wake());
        }
    }
}

impl Blocks {
    pub(in crate::pool::blocks) fn request_precommit(&mut self, id: SlotId) {
        let tenancy = self.slots.of_mut(id.tenant);
        let Some(slot) = tenancy.and_then(|tenancy| tenancy.slot_mut(id.index)) else {
            return;
        };
        let bytes = slot.space.bytes();
        if let (Some(block), Some(precommit)) = (&mut slot.block, &mut self.precommit) {
            precommit.look_at(id, block, bytes);
        }
    }

    /// Calls the mapper if blocks run low whose slots were out when it came.
    pub(in crate::pool::blocks) fn request_growth(&mut self) {
        let growing = self.precommit.as_ref().map(|it| !it.growing.is_empty());
        if growing == Some(true) {
            self.call_mapper();
        }
    }

    /// Calls the mapper, which comes when it has nothing more urgent to do. Returns `false` if the
    /// pool has none.
    pub(in crate::pool) fn call_mapper(&mut self) -> bool {
        let Some(precommit) = &mut self.precommit else {
            return false;
        };
        precommit.call(Urgency::Soon);
        true
    }

    /// Returns the bytes that the mapper keeps free.
    pub(in crate::pool) fn free_target(&self) -> u64 {
        self.precommit.as_ref().map_or(0, |it| it.free_target)
    }

    pub(in crate::pool) fn take_urgency(&mut self) -> Option<(Waker, Urgency)> {
        self.precommit.as_mut()?.take_urgency()
    }

    /// Returns `true` if a block that is to use `size` bytes must wait for memory that the mapper
    /// is placing.
    pub(in crate::pool) fn waits_for_mapper(&self, id: SlotId, size: u64) -> bool {
        let slot = self.slots.get(id);
        slot.is_some_and(|slot| slot.is_busy() && slot.space.bytes() < size)
    }

    /// Returns the bytes that are missing to the free target.
    pub(super) fn lacks_free(&self, memory: &Memory) -> u64 {
        let there = memory.supply.free() + memory.budget.totals().left.bytes;
        self.free_target().saturating_sub(there)
    }

    /// Calls the mapper if the free target lacks memory. Free memory beyond a limit is reclaimed
    /// when the operation ends.
    pub(in crate::pool) fn request_free_memory(&mut self, memory: &Memory) {
        self.has_deferred |= memory.lowered;
        if self.lacks_free(memory) > 0 {
            self.call_mapper();
        }
    }
}
