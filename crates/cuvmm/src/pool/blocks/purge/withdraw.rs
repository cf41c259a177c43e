//! Giving memory up: shrinking, freeing, unregistering, and ending leases. Nothing here waits for
//! the GPU. The driver is called only for memory that is [not kept cached](crate::pool::blocks::purge).

use crate::deferred::defer;
use crate::error::BlockError;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::slots::{BlockPlace, SlotId};
use crate::pool::core::{Core, Locked};

impl Locked<'_> {
    /// Shrinks blocks, whose slots are in their places, to the given sizes: all of them or none.
    pub(crate) fn shrink(&mut self, steps: &[(BlockPlace, u64)]) -> Result<(), BlockError> {
        for (place, size) in steps {
            self.may_shrink(place.slot, *size)?;
        }
        let now = self.tick();
        for (place, size) in steps {
            self.shrink_one(place.slot, *size, now);
        }
        self.purge_some();
        Ok(())
    }

    pub(crate) fn free(&mut self, id: SlotId) {
        let now = self.tick();
        self.free_at(id, now);
        self.purge_some();
    }

    /// Unregisters a tenant: it gets no more memory, and its idle memory goes back to the pool.
    pub(in crate::pool) fn unregister(&mut self, id: TenantId) {
        let Some(hooks) = self.memory.terms.unregister(id) else {
            return;
        };
        let Some(tenancy) = self.blocks.slots.of_mut(id) else {
            return;
        };
        // The tenant allocates no more rows, so each slot can go by itself.
        tenancy.rows.forget_all();
        let freed = tenancy.unswept.close();
        self.free_all(&freed);
        self.memory.budget.drain(id);
        self.list_all(id);
        self.update_bypass(id);
        let holders = self.memory.holders.of(id).iter();
        holders.for_each(|held| held.holder().close());
        self.memory.has_deferred = true;
        self.forget_if_drained(id);
        defer(move || drop(hooks));
    }
}

impl Core {
    pub(crate) fn free(&self, place: &BlockPlace) {
        let mut state = self.lock_with(place.slot);
        state.free(place.slot);
        Self::unlock(state);
        self.announce();
    }

    pub(in crate::pool) fn end_lease(&self, place: &BlockPlace) {
        let mut state = self.lock_with(place.slot);
        let given = state.end_lease_at(place.slot);
        state.purge_some();
        Self::unlock(state);
        // Most leases end on blocks that live on: then waiting requests are not woken.
        if given {
            self.announce();
        }
    }

    pub(in crate::pool) fn unregister(&self, tenant: TenantId) {
        let mut state = self.lock();
        state.unregister(tenant);
        Self::unlock(state);
        self.announce();
    }

    pub(crate) fn shrink(&self, steps: &[(BlockPlace, u64)]) -> Result<(), BlockError> {
        self.device.own_process()?;
        let wanted = steps.iter().map(|(place, _)| (place.slot, 0));
        let mut state = self.await_slots(self.lock(), wanted);
        let outcome = state.shrink(steps);
        Self::unlock(state);
        if outcome.is_ok() {
            self.announce();
        }
        outcome
    }
}
