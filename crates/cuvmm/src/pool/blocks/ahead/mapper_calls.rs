//! The calls to a pool's mapper: for blocks that run low on precommitted memory, and for the free
//! target.
//!
//! The mapper's thread is woken when the lock is released.

use super::pace::Precommit;
use crate::extents::{Urgency, Waker};
use crate::pool::blocks::slots::{Occupant, SlotId};
use crate::pool::state::State;

impl Precommit {
    /// Queues a block that runs low on precommitted memory. Its slot has `bytes` of memory.
    pub(crate) fn look_at(&mut self, slot: SlotId, block: &mut Occupant, bytes: u64) {
        let low = bytes.saturating_sub(block.used) < block.pace.low && bytes < block.most;
        if low && !block.pace.called && !self.waker.is_dead() {
            block.pace.called = true;
            self.growing.push_back(slot);
            self.call(block.pace.wake());
        }
    }
}

impl State {
    pub(in crate::pool) fn request_precommit(&mut self, id: SlotId) {
        let tenancy = self.blocks.slots.of_mut(id.tenant);
        let Some(slot) = tenancy.and_then(|tenancy| tenancy.slot_mut(id.index)) else {
            return;
        };
        let bytes = slot.space.bytes();
        if let (Some(block), Some(precommit)) = (&mut slot.block, &mut self.blocks.precommit) {
            precommit.look_at(id, block, bytes);
        }
    }

    /// Calls the mapper if blocks run low whose slots were out when it came.
    pub(in crate::pool) fn request_free_target(&mut self) {
        if let Some(precommit) = &mut self.blocks.precommit
            && !precommit.growing.is_empty()
        {
            precommit.call(Urgency::Soon);
        }
    }

    pub(in crate::pool) fn take_urgency(&mut self) -> Option<(Waker, Urgency)> {
        self.blocks.precommit.as_mut()?.take_urgency()
    }

    /// Returns `true` if a block that is to use `size` bytes must wait for memory that the mapper
    /// is placing.
    pub(in crate::pool) fn waits_for_mapper(&self, id: SlotId, size: u64) -> bool {
        self.blocks
            .slots
            .get(id)
            .is_some_and(|slot| slot.is_busy() && slot.space.bytes() < size)
    }

    pub(super) fn lacks_free(&self) -> u64 {
        let free_target = self
            .blocks
            .precommit
            .as_ref()
            .map_or(0, |precommit| precommit.free_target);
        free_target.saturating_sub(self.memory.supply.free() + self.memory.budget.creatable())
    }

    /// Calls the mapper if the free target lacks memory. Free memory beyond a limit is reclaimed
    /// when the operation ends.
    pub(in crate::pool) fn run_deferred(&mut self) {
        self.memory.has_deferred |= self.memory.lowered;
        let lacks = self.lacks_free() > 0;
        if let Some(precommit) = self.blocks.precommit.as_mut().filter(|_| lacks) {
            precommit.call(Urgency::Soon);
        }
    }
}
