//! What a pool does not keep cached: all that it gives up when it is hardened, which is overwritten,
//! unmapped once its fence has passed, and its addresses put to rest; and in any pool what tenants
//! have that were unregistered, what is left of a block that was [exported](super::exported), and
//! what a block gives up of memory that [others show too](super::shared).
//!
//! Nothing here waits: a slot whose fence has not passed is looked at again by later operations, a
//! few at a time, and by the mapper's thread if there is one. What tenants leave that were
//! unregistered delays nobody else: it is looked at when an operation has put back a slot of such a
//! tenant, by the mapper, and by whoever lacks memory.

use std::collections::VecDeque;

use super::budget::TenantId;
use super::core::Locked;
use super::ids::SlotId;
use super::slot::Slot;
use super::state::State;
use super::tenancy::Tenancy;
use crate::error::{CallError, MemoryError};
use crate::region::{Round, Space, Urgency};

/// Slots that one operation looks at. A free adds one, so that what has passed is caught up with.
const LOOKS: usize = 8;

impl State {
    /// Bytes of guard on either side of a slot.
    pub(crate) fn guard(&self) -> u64 {
        self.hardening.as_ref().map_or(0, |hardened| hardened.guard)
    }

    /// Blocks that are gone and whose addresses rest, and the bytes of those.
    pub(crate) fn resting(&self) -> (u64, u64) {
        let hardening = self.hardening.as_ref();
        hardening.map_or((0, 0), |hardened| {
            (hardened.resting.count(), hardened.resting.bytes())
        })
    }

    /// Has everything looked after that a tenant which begins to drain does not use.
    pub(super) fn list_all(&mut self, id: TenantId) {
        let Some(tenancy) = self.tenants.get(&id) else {
            return;
        };
        for index in tenancy.indices().collect::<Vec<_>>() {
            self.with_slot(SlotId { tenant: id, index }, |_, _| ());
        }
    }

    /// A slot's number is free, and its addresses are no tenant's.
    fn disown(&mut self, slot: &Slot) {
        let tenant = slot.id.tenant;
        self.budget.disown_addresses(tenant, slot.space.addresses());
        self.vacate(slot.id);
    }
}

/// A list of slots to be purged.
type Queue = fn(&mut State) -> &mut VecDeque<SlotId>;

impl Locked<'_> {
    /// Unmaps what a few slots have to give up, as far as their fences have passed; how many were
    /// done with. What is left is the mapper's to look after.
    #[inline]
    pub(crate) fn purge_some(&mut self) -> usize {
        if self.purging.is_empty() {
            return 0;
        }
        self.purge(|state| &mut state.purging, LOOKS)
    }

    /// Unmaps what a few slots of draining tenants have, as far as their fences have passed; how many
    /// were done with.
    pub(super) fn purge_draining(&mut self) -> usize {
        self.purge(|state| &mut state.draining, LOOKS)
    }

    /// Unmaps what all slots have to give up, as far as their fences have passed.
    pub(crate) fn purge_all(&mut self) {
        self.purge(|state| &mut state.purging, usize::MAX);
        self.purge(|state| &mut state.draining, usize::MAX);
    }

    /// Unmaps what slots have given up of memory that others show too, as far as their fences have
    /// passed: then it is known whose it is.
    pub(super) fn part_all(&mut self) {
        let shares = |tenancy: &Tenancy| tenancy.share_table.bytes() > 0;
        if self.tenants.values().any(shares) {
            self.purge_all();
        }
    }

    /// Does what was put off until slots are in their places: frees blocks whose slots were out, takes
    /// back what draining tenants do not use, and gives to the driver what others may still have.
    pub(super) fn finish_behind(&mut self) {
        self.has_behind = false;
        self.free_late();
        // Some that wait longer, too.
        let looks = std::mem::take(&mut self.listed) + LOOKS;
        self.purge(|state| &mut state.draining, looks);
        self.release_marked();
        // What came meanwhile is looked after when another operation ends, not at once and for ever.
        self.has_behind |= self.listed > 0 || !self.to_release.is_empty();
    }

    fn purge(&mut self, queue: Queue, looks: usize) -> usize {
        if queue(self).is_empty() || self.device.forked().is_some() {
            return 0;
        }
        let mut done = 0;
        let round = Round::begin(&self.device);
        for _ in 0..looks.min(queue(self).len()) {
            let Some(id) = queue(self).pop_front() else {
                break;
            };
            let outcome = self.purge_slot(id, &round);
            if let Ok(true) = outcome {
                done += 1;
                continue;
            }
            // To the end of the queue, so that one that waits long holds up no other.
            queue(self).push_back(id);
            if let Err(error) = outcome {
                // It stays charged to its tenant.
                tracing::warn!(%error, "memory that was given up stays mapped for now");
                break;
            }
        }
        self.release_marked();
        let left = !queue(self).is_empty() && self.device.lost().is_none();
        if let Some(precommit) = self.precommit.as_mut().filter(|_| left) {
            precommit.call(Urgency::Soon);
        }
        done
    }

    /// Unmaps what a slot has to give up, and lets its addresses rest if that was all of it. False
    /// if its fence has not passed.
    fn purge_slot(&mut self, id: SlotId, round: &Round) -> Result<bool, CallError> {
        if self.is_out(id) {
            return Ok(false);
        }
        let tenancy = self.tenants.get(&id.tenant);
        let drains = tenancy.is_some_and(|tenancy| !tenancy.registered);
        let (lost, hardened) = (self.device.lost().is_some(), self.hardening.is_some());
        let state: &mut State = self;
        let (capturing, needs) = (state.capturing, &mut state.needs_synchronise);
        let tenancy = state.tenants.get_mut(&id.tenant);
        let slot = tenancy.and_then(|tenancy| tenancy.slot_mut(id.index));
        // Another slot may have its number by now.
        let Some(slot) = slot.filter(|slot| slot.purging) else {
            return Ok(true);
        };
        if !slot.is_to_purge(hardened || drains) {
            // No other slot shows its memory any more, or a lease keeps it, whose end lists the slot
            // again.
            slot.purging = false;
            return Ok(true);
        }
        let gives = slot.has_spare() || slot.has_parting();
        // Of a context that is lost nothing is reused: only what is empty goes, with its tenant.
        if lost && (gives || !drains) {
            return Ok(false);
        }
        if gives && !State::poll_in(capturing, needs, &mut slot.fence, round) {
            return Ok(false);
        }
        let Some(mut slot) = self.take_out(id) else {
            return Ok(true);
        };
        let outcome = match slot.is_unused() {
            true => self.take_unused(&mut slot),
            false => Ok(()),
        };
        slot.purging = outcome.is_err();
        if slot.is_vacant() && slot.space.bytes() == 0 {
            self.put_away(slot);
        } else if slot.purging {
            self.put_unlisted(slot);
        } else {
            self.put_slot(slot);
        }
        outcome.map(|()| true)
    }

    /// Gives the addresses of a slot that is in no place back. What is stuck in it is kept.
    pub(crate) fn drop_slot(&mut self, slot: Box<Slot>) {
        // Reserved they stay with what is stuck, or with a neighbour that is in use.
        self.disown(&slot);
        if slot.space.stuck_count() > 0 {
            self.quarantine.1.push(slot.space);
        } else {
            let freed = self.unlocked(|| slot.space.give_back());
            self.budget.refund_disowned(freed);
        }
    }

    /// Lets the addresses of an empty slot that was taken out rest, where the pool does that; else
    /// they go back to the driver.
    pub(crate) fn put_away(&mut self, slot: Box<Slot>) {
        let stuck = slot.space.stuck_count() > 0;
        if stuck || self.hardening.is_none() {
            return self.drop_slot(slot);
        }
        self.disown(&slot);
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
    ) -> Result<Vec<Space>, MemoryError> {
        let core = self.core();
        loop {
            let reserved = self.unlocked(|| Space::row(&core.device, size, guard, count));
            match reserved {
                Err(MemoryError::Range { cause, .. })
                    if cause.is_out_of_memory() && self.return_oldest_resting() => {}
                outcome => return outcome,
            }
        }
    }
}
