//! Slots: places for blocks, and the lists in which the pool finds them.

mod hardened;
mod ids;
mod queues;
mod resting;
mod rows;
mod share_table;
mod sleep_state;
mod slot;
mod tenancy;

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;

use crate::pool::accounts::TenantId;

pub use hardened::Hardened;
pub(in crate::pool) use hardened::Hardening;
pub(in crate::pool::blocks) use ids::too_large;
pub(in crate::pool) use ids::{BYTES, BlockPlace, SlotId};
pub(in crate::pool) use queues::{PurgeQueue, PurgeQueues};
pub(in crate::pool) use share_table::Sharers;
pub(in crate::pool) use sleep_state::SleepState;
pub(in crate::pool) use slot::{Class, Figures, Freed, Occupant, Slot};
pub(in crate::pool) use tenancy::{Aged, FreedBlock, Give, Standing, Tenancy, Unswept};

/// The slots of a pool, by tenant and number.
#[derive(Default)]
pub(in crate::pool) struct Slots {
    of_tenants: BTreeMap<TenantId, Tenancy>,
    /// `true` since the first block whose memory may be replaced.
    has_movable: bool,
    /// The slots that the locked section has opened or taken, and the most of one section.
    #[cfg(debug_assertions)]
    worked_on: usize,
    #[cfg(debug_assertions)]
    most_worked_on: usize,
    /// The locked sections that have ended.
    #[cfg(debug_assertions)]
    sections: u64,
}

impl Slots {
    pub(in crate::pool) fn open(&mut self, tenant: TenantId, unswept: Arc<dyn Unswept>) {
        self.of_tenants.insert(tenant, Tenancy::new(unswept));
    }

    /// Returns `true` if a tenant has no slots.
    pub(in crate::pool) fn is_empty(&self, tenant: TenantId) -> bool {
        self.of(tenant).is_none_or(Tenancy::is_empty)
    }

    pub(in crate::pool) fn set_standing(&mut self, tenant: TenantId, standing: Standing) {
        if let Some(tenancy) = self.of_mut(tenant) {
            tenancy.standing = standing;
            tenancy.update_bypass();
        }
    }

    /// Notes that idle bytes of a slot that is out are about to be in use again.
    pub(in crate::pool) fn note_revived(&mut self, id: SlotId, bytes: u64) {
        if let Some(tenancy) = self.of_mut(id.tenant) {
            tenancy.note_revived(id.index, bytes);
        }
    }

    pub(in crate::pool) fn close(&mut self, tenant: TenantId) {
        self.of_tenants.remove(&tenant);
    }

    pub(in crate::pool::blocks) fn of(&self, tenant: TenantId) -> Option<&Tenancy> {
        self.of_tenants.get(&tenant)
    }

    pub(in crate::pool::blocks) fn of_mut(&mut self, tenant: TenantId) -> Option<&mut Tenancy> {
        self.of_tenants.get_mut(&tenant)
    }

    pub(in crate::pool::blocks) fn iter(&self) -> impl Iterator<Item = (TenantId, &Tenancy)> {
        self.of_tenants.iter().map(|(&id, tenancy)| (id, tenancy))
    }

    /// Returns the tenants from `first` on.
    pub(super) fn iter_from(&self, first: TenantId) -> impl Iterator<Item = (TenantId, &Tenancy)> {
        let tenants = self.of_tenants.range(first..);
        tenants.map(|(&id, tenancy)| (id, tenancy))
    }

    pub(in crate::pool::blocks) fn tenants(&self) -> Vec<TenantId> {
        self.of_tenants.keys().copied().collect()
    }

    /// Returns all tenants, in the order of their numbers, and `true` if their slots can give memory.
    pub(in crate::pool) fn givers(&self, give: Give) -> impl Iterator<Item = (TenantId, bool)> {
        let gives = move |it: &Tenancy| it.next_giving(give, None).is_some();
        self.iter().map(move |(id, tenancy)| (id, gives(tenancy)))
    }

    /// Returns the next memory after `after` that a tenant's slots can give, the oldest first.
    pub(in crate::pool) fn next_giving(
        &self,
        id: TenantId,
        give: Give,
        after: Option<Aged>,
    ) -> Option<Aged> {
        self.of(id)?.next_giving(give, after)
    }

    #[inline]
    pub(in crate::pool::blocks) fn get(&self, id: SlotId) -> Option<&Slot> {
        self.of(id.tenant)?.slot(id.index)
    }

    /// Returns a slot for changes that do not alter its place on the lists.
    #[inline]
    pub(in crate::pool::blocks) fn get_mut(&mut self, id: SlotId) -> Option<&mut Slot> {
        self.of_mut(id.tenant)?.slot_mut(id.index)
    }

    /// Takes a slot from its place until the lock is released, and updates the last writers of its
    /// memory, which growing within it postpones.
    pub(in crate::pool::blocks) fn take(&mut self, id: SlotId) -> Option<Box<Slot>> {
        self.note_work();
        let mut slot = self.of_mut(id.tenant)?.take(id.index)?;
        slot.note_writer();
        Some(slot)
    }

    /// Takes a slot out, for an operation that releases the lock, and updates the last writers of
    /// its memory.
    pub(in crate::pool) fn take_out(
        &mut self,
        id: SlotId,
        flight: NonZeroU64,
    ) -> Option<Box<Slot>> {
        self.note_work();
        let mut slot = self.of_mut(id.tenant)?.take_out(id.index, flight)?;
        slot.note_writer();
        Some(slot)
    }

    pub(super) const fn note_movable(&mut self) {
        self.has_movable = true;
    }

    pub(super) const fn has_movable(&self) -> bool {
        self.has_movable
    }

    pub(super) fn put(&mut self, slot: Box<Slot>) {
        if let Some(tenancy) = self.of_mut(slot.id.tenant) {
            tenancy.put(slot);
        }
    }

    pub(super) fn remove(&mut self, id: SlotId) {
        if let Some(tenancy) = self.of_mut(id.tenant) {
            tenancy.remove_slot(id.index);
        }
    }

    pub(in crate::pool) fn is_out(&self, id: SlotId) -> bool {
        self.of(id.tenant).is_some_and(|it| it.is_out(id.index))
    }

    pub(super) fn sleeps(&self, id: SlotId) -> bool {
        self.of(id.tenant).is_some_and(|it| it.sleeps(id.index))
    }

    /// Updates the figures of a slot that is out.
    pub(super) fn renew(&mut self, slot: &Slot) {
        if let Some(tenancy) = self.of_mut(slot.id.tenant) {
            tenancy.renew(slot);
        }
    }

    /// Gives up the slots that an operation had out when a panic ended it.
    pub(in crate::pool::blocks) fn lose(&mut self, flight: NonZeroU64) {
        let tenancies = self.of_tenants.values_mut();
        tenancies.for_each(|tenancy| tenancy.lose(flight));
    }

    /// Changes the bytes that are charged for a slot which a panic has lost, if it has.
    pub(super) fn recount_lost(&mut self, id: SlotId, change: impl FnOnce(u64) -> u64) {
        let tenancy = self.of_mut(id.tenant);
        if let Some(figures) = tenancy.and_then(|it| it.lost_mut(id.index)) {
            figures.in_use = change(figures.in_use);
            figures.kept = figures.in_use;
        }
    }

    #[inline]
    pub(super) const fn note_work(&mut self) {
        #[cfg(debug_assertions)]
        {
            self.worked_on += 1;
        }
    }
}

#[cfg(debug_assertions)]
impl Slots {
    pub(in crate::pool::blocks) fn has_taken(&self) -> bool {
        self.of_tenants.values().any(Tenancy::has_taken)
    }

    pub(in crate::pool::blocks) fn has_lost(&self) -> bool {
        self.of_tenants.values().any(Tenancy::has_lost)
    }

    /// Returns all slots in their places.
    pub(in crate::pool::blocks) fn all(&self) -> impl Iterator<Item = &Slot> {
        self.of_tenants.values().flat_map(|tenancy| {
            let indices = tenancy.indices();
            indices.filter_map(|index| tenancy.slot(index))
        })
    }

    /// Ends the count of the slots that a locked section has worked on.
    pub(in crate::pool::blocks) fn end_section(&mut self) -> u64 {
        let worked_on = std::mem::take(&mut self.worked_on);
        self.most_worked_on = self.most_worked_on.max(worked_on);
        self.sections += 1;
        self.sections
    }

    #[cfg(test)]
    pub(super) const fn most_worked_on(&self) -> usize {
        self.most_worked_on
    }
}
