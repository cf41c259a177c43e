//! Purging: unmapping memory that is not kept cached. In a hardened pool that is all memory that
//! blocks give up. In any pool it is the memory of unregistered tenants, the memory left of an
//! [exported](crate::pool::blocks::exported) block, and memory that a block gives up and [other slots map
//! too](crate::pool::blocks::sharing::shared).
//!
//! Nothing here waits: a slot whose fence is incomplete is checked again by later operations, a few
//! slots at a time, and by the mapper's thread if any. Memory of unregistered tenants delays no
//! other tenant: it is checked when an operation has put back a slot of such a tenant, by the
//! mapper, and by requests that lack memory.
//!
//! Keeps I-9.

mod freeing;
mod take;
mod withdraw;

use crate::error::{CallError, MemoryError};
use crate::extents::{Round, Space, TakenOut};
use crate::pool::accounts::TenantId;
use crate::pool::blocks::Blocks;
use crate::pool::blocks::slots::{PurgeQueue, Slot, SlotId, Slots, Tenancy};
use crate::pool::core::Locked;

/// The slots that one operation checks. A free adds one slot, so operations catch up with complete
/// fences.
const LOOKS: usize = 8;

impl Blocks {
    /// Returns the bytes of addresses without memory on each side of a block.
    pub(in crate::pool::blocks) fn guard(&self) -> u64 {
        let hardening = self.hardening.as_ref();
        hardening.map_or(0, |hardening| hardening.guard)
    }

    /// Returns the number of resting spaces and the bytes of their addresses.
    pub(in crate::pool) fn resting(&self) -> (u64, u64) {
        let hardening = self.hardening.as_ref();
        hardening.map_or((0, 0), |hardening| {
            (hardening.resting.count(), hardening.resting.bytes())
        })
    }

    fn rests_too_much(&self) -> bool {
        let hardening = self.hardening.as_ref();
        hardening.is_some_and(|hardening| hardening.resting.is_over())
    }

    fn oldest_resting(&mut self) -> Option<Space> {
        self.hardening.as_mut()?.resting.oldest()
    }

    /// Lets an empty slot, which is out, serve blocks again as a place of its row, which keeps its
    /// addresses in any case. Returns `false` if it is in no row, or serves no block any more.
    fn serves_its_row(&self, slot: &mut Slot) -> bool {
        let SlotId { tenant, index } = slot.id;
        let tenancy = self.slots.of(tenant);
        let in_row = tenancy.is_some_and(|it| it.rows.has(index) && !it.standing.drains);
        let serves = in_row && !slot.single && !slot.broken;
        if serves {
            // What was exported, merged or lent is not there any more.
            (slot.exported, slot.merged, slot.lent) = (false, false, 0);
        }
        serves
    }
}

/// A slot of a queue that is being looked at. If it is not purged, also because the driver panics, it
/// goes to the end of the queue, and holds up no other.
struct LookedAt<'b, 'a> {
    state: &'b mut Locked<'a>,
    queue: PurgeQueue,
    id: SlotId,
    stays: bool,
}

impl Drop for LookedAt<'_, '_> {
    fn drop(&mut self) {
        if self.stays {
            self.state.blocks.queues.of(self.queue).push_back(self.id);
        }
    }
}

impl Locked<'_> {
    /// Purges a few slots whose fences are complete. Returns their number. The mapper handles the
    /// rest.
    #[inline]
    pub(super) fn purge_some(&mut self) -> usize {
        if self.blocks.queues.is_empty(PurgeQueue::Registered) {
            return 0;
        }
        self.purge(PurgeQueue::Registered, LOOKS)
    }

    /// Purges a few slots of draining tenants whose fences are complete. Returns their number.
    pub(super) fn purge_draining(&mut self) -> usize {
        self.purge(PurgeQueue::Draining, LOOKS)
    }

    /// Purges all slots whose fences are complete.
    pub(crate) fn purge_all(&mut self) {
        self.purge(PurgeQueue::Registered, usize::MAX);
        self.purge(PurgeQueue::Draining, usize::MAX);
        self.purge_holders();
    }

    /// Unmaps shared memory that slots have given up, if its fences are complete, to find out which
    /// memory belongs to one slot only.
    pub(in crate::pool) fn part_all(&mut self) {
        let shares = |(_, tenancy): (_, &Tenancy)| tenancy.share_table.bytes() > 0;
        if self.blocks.slots.iter().any(shares) {
            self.purge_all();
        }
    }

    /// Does work that was put off until slots are in their places: frees blocks whose slots were
    /// out, reclaims unused memory of draining tenants, and releases exported or shared memory.
    pub(in crate::pool) fn finish_deferred(&mut self) {
        (self.memory.has_deferred, self.blocks.has_deferred) = (false, false);
        self.blocks.free_late();
        // Beside the new slots, checks some that have waited longer.
        let looks = self.blocks.queues.take_listed() + LOOKS;
        self.purge(PurgeQueue::Draining, looks);
        self.purge_holders();
        self.release_marked();
        // Slots listed meanwhile are purged when another operation ends, not at once and without
        // end.
        self.blocks.has_deferred |= self.blocks.queues.has_listed();
        self.memory.has_deferred |= self.memory.supply.has_marked();
    }

    fn purge(&mut self, queue: PurgeQueue, looks: usize) -> usize {
        if self.blocks.queues.is_empty(queue) || self.memory.device.forked().is_some() {
            return 0;
        }
        let mut done = 0;
        let round = Round::begin(&self.memory.device);
        for _ in 0..looks.min(self.blocks.queues.of(queue).len()) {
            let Some(id) = self.blocks.queues.of(queue).pop_front() else {
                break;
            };
            let mut looked_at = LookedAt {
                state: self,
                queue,
                id,
                stays: true,
            };
            let outcome = looked_at.state.purge_slot(id, &round);
            looked_at.stays = !matches!(outcome, Ok(true));
            drop(looked_at);
            match outcome {
                Ok(purged) => done += usize::from(purged),
                Err(error) => {
                    // The memory stays charged to its tenant.
                    log!(warn, %error, "memory that was given up stays mapped for now");
                    break;
                }
            }
        }
        self.release_marked();
        let left = !self.blocks.queues.is_empty(queue) && self.memory.device.lost().is_none();
        if left {
            self.blocks.call_mapper();
        }
        done
    }

    /// Unmaps the memory that a slot has to give up, and [puts an empty slot away](Self::put_away).
    /// Returns `false` if its fence is incomplete.
    fn purge_slot(&mut self, id: SlotId, round: &Round) -> Result<bool, CallError> {
        let (memory, blocks) = self.halves();
        if blocks.slots.is_out(id) {
            return Ok(false);
        }
        let tenancy = blocks.slots.of_mut(id.tenant);
        let drains = tenancy.as_ref().is_some_and(|it| it.standing.drains);
        // Another slot may have the number by now.
        let slot = tenancy.and_then(|tenancy| tenancy.slot_mut(id.index));
        let Some(slot) = slot.filter(|slot| slot.purging) else {
            return Ok(true);
        };
        if !slot.is_to_purge(blocks.hardening.is_some() || drains) {
            // No other slot maps its memory any more, or a lease keeps it and lists the slot again
            // when it ends.
            slot.purging = false;
            return Ok(true);
        }
        let gives = slot.has_spare() || slot.has_parting();
        // On a lost context no memory is reused: only empty slots go, with their tenant.
        if memory.device.lost().is_some() && (gives || !drains) {
            return Ok(false);
        }
        if gives && !memory.gate.poll_in(&mut slot.fence, round) {
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
        if slot.is_vacant() && slot.space.bytes() == 0 && !self.blocks.serves_its_row(&mut slot) {
            self.put_away(slot);
        } else if slot.purging {
            self.blocks.put_unlisted(slot);
        } else {
            self.blocks.put_slot(slot);
        }
        outcome.map(|()| true)
    }

    /// Unmaps all memory of a tenant, each slot behind its fence. Memory whose fence cannot be
    /// proved complete, or that cannot be unmapped, stays; the first reason is the error.
    pub(in crate::pool) fn empty_slots(&mut self, id: TenantId) -> Result<(), CallError> {
        let indices: Vec<usize> = match self.blocks.slots.of(id) {
            Some(tenancy) => tenancy.indices().collect(),
            None => return Ok(()),
        };
        let mut outcome = Ok(());
        for index in indices {
            let Some(mut slot) = self.take_out(SlotId { tenant: id, index }) else {
                continue;
            };
            match self.strip(&mut slot) {
                Ok(()) => self.drop_slot(slot),
                Err(error) => {
                    self.blocks.put_slot(slot);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        outcome
    }

    fn strip(&mut self, slot: &mut Slot) -> Result<(), CallError> {
        let mut taken = TakenOut::default();
        let stripped = self.unlocked(|| {
            slot.fence.wait()?;
            let completed = slot.fence.completed(&mut slot.space);
            completed.ok_or(CallError::InUse)?.take_all(&mut taken)
        });
        self.abandon(slot, taken);
        stripped
    }

    /// Drops a slot that is in no place, and frees its addresses. Stuck mappings are kept.
    pub(in crate::pool::blocks) fn drop_slot(&mut self, slot: Box<Slot>) {
        // The addresses stay reserved with stuck mappings, or with a neighbor in use.
        self.disown(&slot);
        let slot = *slot;
        self.give_space_back(slot.space);
        // With these the last handles to streams and events may be dropped, which makes driver
        // calls.
        self.unlocked(move || drop((slot.fence, slot.kept, slot.block)));
    }

    /// Puts the addresses of an empty slot, which is out, to rest in a hardened pool, or else frees
    /// them.
    fn put_away(&mut self, slot: Box<Slot>) {
        let stuck = slot.space.stuck_count() > 0;
        if stuck || self.blocks.hardening.is_none() {
            return self.drop_slot(slot);
        }
        self.disown(&slot);
        if let Some(hardening) = &mut self.blocks.hardening {
            hardening.resting.add(slot.space);
        }
        while self.blocks.rests_too_much() && self.return_oldest_resting() {}
    }

    /// Removes a slot, which is out, and charges its addresses to no tenant.
    fn disown(&mut self, slot: &Slot) {
        let (tenant, addresses) = (slot.id.tenant, slot.space.addresses());
        self.memory.budget.disown_addresses(tenant, addresses);
        self.remove_slot(slot.id);
    }

    pub(super) fn remove_slot(&mut self, id: SlotId) {
        self.blocks.slots.remove(id);
        self.forget_if_drained(id.tenant);
    }

    /// Frees the addresses that have rested longest; returns `false` if there are none.
    fn return_oldest_resting(&mut self) -> bool {
        let Some(space) = self.blocks.oldest_resting() else {
            return false;
        };
        // Addresses of blocks that are side by side go back with the last of them.
        self.give_space_back(space);
        true
    }

    /// Gives up addresses of empty, unused slots, and resting addresses, until `bytes` may be
    /// reserved.
    pub(in crate::pool) fn give_addresses(&mut self, bytes: u64) {
        self.purge_all();
        for id in self.blocks.slots.tenants() {
            self.drop_empty_slots(id, bytes);
        }
        self.return_resting_for(bytes);
    }

    /// Gives up the addresses of a tenant's empty, unused slots until `wanted` bytes may be
    /// reserved.
    fn drop_empty_slots(&mut self, id: TenantId, wanted: u64) {
        let Some(tenancy) = self.blocks.slots.of(id) else {
            return;
        };
        for together in tenancy.bare() {
            if self.memory.budget.totals().left.addresses >= wanted {
                break;
            }
            // The lock is released between slots.
            let slot_id = |index| SlotId { tenant: id, index };
            let bare = |slots: &Slots, index| slots.get(slot_id(index)).is_some_and(Slot::is_bare);
            let all = &self.blocks.slots;
            if !together.iter().all(|&index| bare(all, index)) {
                continue;
            }
            for index in together {
                let slots = &mut self.blocks.slots;
                if bare(slots, index)
                    && let Some(slot) = slots.take(slot_id(index))
                {
                    self.put_away(slot);
                }
            }
        }
    }

    /// Frees resting addresses until `bytes` may be reserved, or none rest.
    pub(in crate::pool::blocks) fn return_resting_for(&mut self, bytes: u64) {
        while self.memory.budget.totals().left.addresses < bytes && self.return_oldest_resting() {}
    }

    /// Reserves `count` ranges side by side, whose addresses were charged, for the devices that the
    /// pool is open to. If the driver has none left, frees resting addresses first.
    pub(super) fn reserve(
        &mut self,
        size: u64,
        guard: u64,
        count: u64,
    ) -> Result<Vec<Space>, MemoryError> {
        let core = self.core();
        loop {
            let reserved = self.unlocked(|| Space::row(&core.device, size, guard, count));
            match reserved {
                Ok(spaces) => {
                    let opened = spaces.map(|space| space.open_to(core.guests.iter().cloned()));
                    return Ok(opened.collect());
                }
                Err(MemoryError::Range { cause, .. })
                    if cause.is_out_of_memory() && self.return_oldest_resting() => {}
                Err(error) => return Err(error),
            }
        }
    }
}
