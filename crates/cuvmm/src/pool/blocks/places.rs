//! Slots in their places: taken for work, put back, and listed for the memory that they can give.

use super::Blocks;
use super::slots::{Slot, SlotId};
use crate::pool::accounts::TenantId;

impl Blocks {
    /// Returns `true` if no memory that blocks give up is kept cached.
    pub(in crate::pool) const fn are_hardened(&self) -> bool {
        self.hardening.is_some()
    }

    pub(in crate::pool) fn tick(&self) -> u64 {
        self.clock.tick()
    }

    /// Takes a slot, works on it, and puts it back: no work done for the slot can take memory from
    /// it. Returns `None` if there is no such slot, or if it is out.
    pub(super) fn with_slot<T>(
        &mut self,
        id: SlotId,
        work: impl FnOnce(&mut Slot) -> T,
    ) -> Option<T> {
        let mut slot = self.slots.take(id)?;
        let done = work(&mut slot);
        self.put_slot(slot);
        Some(done)
    }

    /// Puts a slot in its place, and lists it for the memory that it can give and, if some must not
    /// be kept, to be [purged](super::purge).
    pub(in crate::pool) fn put_slot(&mut self, mut slot: Box<Slot>) {
        if slot.sleep_state.is_awake() {
            slot.memory_taken();
        }
        let Some(tenancy) = self.slots.of_mut(slot.id.tenant) else {
            return;
        };
        let standing = tenancy.standing;
        // Memory beyond a lowered limit is reclaimed as it becomes free.
        self.has_deferred |= standing.lowered && slot.has_spare();
        if slot.is_to_purge(self.hardening.is_some() || standing.drains) {
            self.queues.list(&mut slot, standing.drains);
            // A slot of a draining tenant is purged when the operation ends.
            self.has_deferred |= standing.drains;
        }
        tenancy.put(slot);
    }

    /// Puts back a listed slot that could not be purged.
    pub(super) fn put_unlisted(&mut self, mut slot: Box<Slot>) {
        slot.memory_taken();
        self.slots.put(slot);
    }

    /// Lets a tenant's freed blocks bypass the stream caches, or not, after a block of it fell
    /// asleep or woke.
    pub(super) fn update_bypass(&self, id: TenantId) {
        if let Some(tenancy) = self.slots.of(id) {
            tenancy.update_bypass();
        }
    }
}
