//! Releasing physical memory to the driver: down to a number of bytes, or all of it at the end.

use super::accounts::TenantId;
use super::blocks::slots::{Slot, SlotId};
use super::core::{Core, Locked};
use super::memory::Memory;
use crate::error::CallError;
use crate::extents::TakenOut;

impl Locked<'_> {
    pub(crate) fn trim(&mut self, keep: u64) -> Result<u64, CallError> {
        let before = self.memory.budget.totals().given_back;
        self.retry_releases(1);
        self.purge_all();
        let excess = |memory: &Memory| memory.budget.totals().obtained.saturating_sub(keep);
        if excess(&self.memory) > self.memory.supply.free() {
            let wanted = excess(&self.memory) - self.memory.supply.free();
            // No tenant makes the request, so every tenant's guarantee counts.
            self.take_back_any(TenantId::NONE, wanted)?;
        }
        let free = self.memory.supply.free();
        self.release_free(free.saturating_sub(excess(&self.memory)));
        // Includes exported memory, released on the way.
        Ok(self.memory.budget.totals().given_back - before)
    }

    /// Gives all memory and addresses back, when no tenant, block or lease handle exists any more.
    pub(super) fn shut(&mut self) -> Result<(), CallError> {
        let outcome = self.give_all_back();
        let (_, refusal) = self.retry_releases(usize::MAX);
        outcome.and(refusal.map_or(Ok(()), Err))
    }

    /// [Shuts](Self::shut) the pool, except for physicals that the driver refuses to release.
    fn give_all_back(&mut self) -> Result<(), CallError> {
        self.memory.device.own_process()?;
        let mut outcome = Ok(());
        for id in self.blocks.slots.tenants() {
            outcome = outcome.and(self.drain_holders(id));
            outcome = outcome.and(self.empty(id));
        }
        self.release_free(0);
        self.release_marked();
        outcome.and(self.empty_quarantined_spaces())
    }

    /// Unmaps all memory of a tenant, each slot behind its fence. Memory whose fence cannot be
    /// proved complete, or that cannot be unmapped, stays; the first reason is the error.
    fn empty(&mut self, id: TenantId) -> Result<(), CallError> {
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
        if outcome.is_ok() {
            self.memory.budget.set_guarantee(id, 0);
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
}

impl Drop for Core {
    fn drop(&mut self) {
        let mut state = self.lock();
        let held = state.memory.budget.totals().obtained;
        let shut = state.give_all_back();
        state.retry_releases(usize::MAX);
        let refused = state.memory.supply.quarantined();
        // Memory that the driver refused to release stays charged to the ledger; its owners report
        // it when they are dropped. All other counted memory was released with its mapping.
        let counted = state.memory.budget.totals().obtained;
        let kept = if shut.is_ok() { refused } else { counted };
        drop(state);
        self.leave_ledger(kept);
        if let Err(error) = shut {
            self.device.report_drop("pool", held, error);
        }
    }
}
