//! What a pool does not keep cached: all that it gives up when it is hardened, which is overwritten,
//! unmapped once its fence has passed, and its addresses put to rest; and in any pool what is left
//! of a block that was [exported](super::exported), and what a block gives up of memory that
//! [others show too](super::shared).
//!
//! Nothing here waits: a slot whose fence has not passed is looked at again by later operations, a
//! few at a time, and by the mapper's thread if there is one. Where a pool is not hardened and has
//! exported and forked nothing, all of this does nothing.

use super::budget::TenantId;
use super::locked::Locked;
use super::slot::Slot;
use super::state::State;
use crate::error::{CallError, ReserveError};
use crate::own::Stream;
use crate::region::{Fence, Round, Space, Urgency};

/// Slots that one operation looks at. A free adds one, so that what has passed is caught up with.
const LOOKS: usize = 8;

impl State {
    /// Bytes of guard on either side of a slot.
    pub(crate) fn guard(&self) -> u64 {
        self.hardening.as_ref().map_or(0, |hardened| hardened.guard)
    }

    /// What memory that is given up is filled with.
    pub(crate) fn fill(&self) -> Option<u8> {
        self.hardening.as_ref()?.fill
    }

    /// Blocks that are gone and whose addresses rest, and the bytes of those.
    pub(crate) fn resting(&self) -> (u64, u64) {
        let hardening = self.hardening.as_ref();
        hardening.map_or((0, 0), |hardened| {
            (hardened.resting.count(), hardened.resting.bytes())
        })
    }

    /// Overwrites what lies behind the first `from` bytes of a slot, which a block has just given
    /// up, behind the work of its home stream. Not what others show too, nor if another stream or a
    /// lease may still use it, nor if it was exported, since whoever imported it may still read it,
    /// nor while the stream captures: the fill would become part of the graph.
    pub(crate) fn overwrite(&self, slot: &mut Slot, home: Option<&Stream>, from: u64) {
        let (Some(byte), Some(home)) = (self.fill(), home) else {
            return;
        };
        let (from, to) = (from.max(slot.bound()), slot.space.bytes());
        let alone = slot.leases == 0 && !slot.exported && slot.fence.precedes(home);
        if from >= to || !alone || self.capturing > 0 || home.is_capturing().unwrap_or(true) {
            return;
        }
        match slot.space.fill(home, from, byte, to - from) {
            Ok(()) => {
                // The fence was made before the fill was queued.
                slot.fence.merge(Fence::stream(home.clone()));
                slot.space.blank(from);
            }
            Err(error) => tracing::debug!(%error, "what a block gave up was not overwritten"),
        }
        // If the block grows over it again, that is noted anew.
        if let Some(block) = &mut slot.block {
            block.noted = block.noted.min(from);
        }
    }

    /// Puts a slot in its place, and has it looked after, sooner than those that wait already, if
    /// it has memory or addresses that are not to be kept.
    pub(crate) fn lay_down(&mut self, id: TenantId, index: usize, mut slot: Box<Slot>) {
        if self.is_to_purge(&slot) && !slot.purging {
            slot.purging = true;
            self.purging.push_front((id, index));
        }
        self.put_slot(id, index, slot);
    }

    /// Whether a slot has something that is not to be kept cached.
    fn is_to_purge(&self, slot: &Slot) -> bool {
        let gives = match self.hardening {
            Some(_) => slot.is_vacant() || slot.has_spare(),
            None => slot.exported && slot.is_vacant(),
        };
        gives || slot.has_parting()
    }

    /// Whether something waits for its fence.
    pub(crate) fn has_purging(&self) -> bool {
        !self.purging.is_empty()
    }
}

impl Locked<'_> {
    /// Unmaps what a few slots have to give up, as far as their fences have passed; how many were
    /// done with. What is left is the mapper's to look after.
    #[inline]
    pub(crate) fn purge_some(&mut self) -> usize {
        if self.purging.is_empty() {
            return 0;
        }
        self.purge(LOOKS)
    }

    /// The same with all slots.
    pub(crate) fn purge_all(&mut self) {
        self.purge(usize::MAX);
    }

    fn purge(&mut self, looks: usize) -> usize {
        // Of a context that is lost nothing is reused.
        if self.device.lost().is_some() || self.device.forked().is_some() {
            return 0;
        }
        let mut done = 0;
        let round = Round::begin(&self.device);
        for _ in 0..looks.min(self.purging.len()) {
            let Some((id, index)) = self.purging.pop_front() else {
                break;
            };
            let outcome = self.purge_slot(id, index, &round);
            if let Ok(true) = outcome {
                done += 1;
                continue;
            }
            // To the end of the queue, so that one that waits long holds up no other.
            self.purging.push_back((id, index));
            if let Err(error) = outcome {
                // It stays charged to its tenant.
                tracing::warn!(%error, "memory that was given up stays mapped for now");
                break;
            }
        }
        self.release_marked();
        if self.has_purging()
            && let Some(precommit) = &mut self.precommit
        {
            precommit.call(Urgency::Soon);
        }
        done
    }

    /// Unmaps what a slot has to give up, and lets its addresses rest if that was all of it. False
    /// if its fence has not passed.
    fn purge_slot(&mut self, id: TenantId, index: usize, round: &Round) -> Result<bool, CallError> {
        if self.is_out(id, index) {
            return Ok(false);
        }
        if self
            .slot(id, index)
            .is_some_and(|slot| !self.is_to_purge(slot))
        {
            // Nobody else shows its memory any more, or a lease keeps it, whose end lists the slot
            // again.
            if let Some(slot) = self.slot_mut(id, index) {
                slot.purging = false;
            }
            self.collect_if_draining(id);
            return Ok(true);
        }
        let state: &mut State = self;
        let (capturing, needs) = (state.capturing, &mut state.needs_synchronise);
        let tenancy = state.tenants.get_mut(&id);
        // Another slot may have its number by now.
        let slot = tenancy.and_then(|tenancy| tenancy.slot_mut(index));
        let Some(slot) = slot.filter(|slot| slot.purging) else {
            return Ok(true);
        };
        let gives = slot.has_spare() || slot.has_parting();
        if gives && !State::poll_in(capturing, needs, &mut slot.fence, round) {
            return Ok(false);
        }
        let Some(mut slot) = self.take_out(id, index) else {
            return Ok(true);
        };
        let outcome = match slot.proof() {
            Some(proof) => {
                let taken = self.take_spare((id, index), &mut slot, proof);
                taken.and_then(|()| self.part(id, index, &mut slot, proof))
            }
            None => Ok(()),
        };
        slot.purging = outcome.is_err();
        if slot.is_vacant() && slot.space.bytes() == 0 {
            self.put_away(id, index, slot);
            self.forget_if_drained(id);
        } else {
            self.put_slot(id, index, slot);
        }
        outcome.map(|()| true)
    }

    /// Gives the addresses of a slot that is in no place back. What is stuck in it is kept.
    pub(crate) fn drop_slot(&mut self, id: TenantId, index: usize, slot: Box<Slot>) {
        self.vacate(id, index);
        // Reserved they stay with what is stuck, or with a neighbour that is in use.
        self.budget.disown_addresses(id, slot.space.addresses());
        if slot.space.stuck_count() > 0 {
            self.quarantine.1.push(slot.space);
        } else {
            let freed = self.unlocked(|| slot.space.give_back());
            self.budget.refund_disowned(freed);
        }
    }

    /// Lets the addresses of an empty slot that was taken out rest, where the pool does that; else
    /// they go back to the driver.
    pub(crate) fn put_away(&mut self, id: TenantId, index: usize, slot: Box<Slot>) {
        let stuck = slot.space.stuck_count() > 0;
        if stuck || self.hardening.is_none() {
            return self.drop_slot(id, index, slot);
        }
        self.vacate(id, index);
        self.budget.disown_addresses(id, slot.space.addresses());
        if let Some(hardening) = &mut self.hardening {
            hardening.resting.add(slot.space);
        }
        while self.rests_too_much() && self.return_oldest_resting() {}
    }

    fn rests_too_much(&self) -> bool {
        let hardening = self.hardening.as_ref();
        hardening.is_some_and(|hardening| hardening.resting.is_over())
    }

    /// Gives the addresses that have rested longest back to the driver; false if there are none.
    fn return_oldest_resting(&mut self) -> bool {
        let hardening = self.hardening.as_mut();
        let Some(space) = hardening.and_then(|hardening| hardening.resting.oldest()) else {
            return false;
        };
        // Those of blocks that lie side by side go with the last of them.
        let freed = self.unlocked(|| space.give_back());
        self.budget.refund_disowned(freed);
        true
    }

    /// Gives resting addresses back until `bytes` may be reserved, or none rest.
    pub(crate) fn return_resting_for(&mut self, bytes: u64) {
        while self.budget.addresses_left() < bytes && self.return_oldest_resting() {}
    }

    /// Reserves so many ranges side by side, whose addresses were charged. Where the driver has none
    /// left, those that rest go first.
    pub(crate) fn reserve(
        &mut self,
        size: u64,
        guard: u64,
        count: u64,
    ) -> Result<Vec<Space>, ReserveError> {
        let core = self.core();
        loop {
            let reserved = self.unlocked(|| Space::row(&core.device, size, guard, count));
            match reserved {
                Err(ReserveError::Call { cause, .. })
                    if cause.is_out_of_memory() && self.return_oldest_resting() => {}
                outcome => return outcome,
            }
        }
    }
}
