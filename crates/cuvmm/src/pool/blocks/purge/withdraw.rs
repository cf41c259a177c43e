//! Giving memory up: shrinking, freeing, unregistering, and ending leases. Nothing here waits for
//! the GPU. The driver is called only for memory that is [not kept cached](crate::pool::blocks::purge).

use crate::deferred::defer;
use crate::error::BlockError;
use crate::pool::accounts::TenantId;
use crate::pool::blocks::slots::{BlockPlace, SlotId};
use crate::pool::core::{Core, Locked};

impl Core {
    pub(crate) fn free(&self, place: &BlockPlace) {
        let mut state = self.lock_with(place.slot);
        state.free(place.slot);
        Self::unlock(state);
        self.announce();
    }

    pub(in crate::pool::blocks) fn end_lease(&self, place: &BlockPlace) {
        let mut state = self.lock_with(place.slot);
        let given = state.blocks.end_lease(place.slot);
        state.purge_some();
        Self::unlock(state);
        // Most leases end on blocks that live on: then waiting requests are not woken.
        if given {
            self.announce();
        }
    }

    /// Unregisters a tenant: it gets no more memory, and its idle memory goes back to the pool.
    pub(in crate::pool) fn unregister(&self, id: TenantId) {
        let mut state = self.lock();
        if let Some(hooks) = state.memory.budget.unregister(id) {
            state.terms_changed(id);
            state.blocks.drain(id);
            state.forget_if_drained(id);
            defer(move || drop(hooks));
        }
        Self::unlock(state);
        self.announce();
    }

    /// Shrinks blocks to the given sizes: all of them or none.
    pub(in crate::pool::blocks) fn shrink(
        &self,
        steps: &[(BlockPlace, u64)],
    ) -> Result<(), BlockError> {
        self.device.own_process()?;
        let wanted = steps.iter().map(|(place, _)| (place.slot, 0));
        let mut state = self.await_slots(self.lock(), wanted);
        let capturing = state.memory.gate.is_capturing();
        let outcome = state.blocks.shrink(steps, capturing);
        if outcome.is_ok() {
            state.purge_some();
        }
        Self::unlock(state);
        if outcome.is_ok() {
            self.announce();
        }
        outcome
    }
}

impl Locked<'_> {
    /// Ends a block whose slot is in its place.
    pub(in crate::pool) fn free(&mut self, id: SlotId) {
        let capturing = self.memory.gate.is_capturing();
        self.blocks.free(id, capturing);
        self.purge_some();
    }
}
