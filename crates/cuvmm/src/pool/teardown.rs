//! Releasing physical memory to the driver: down to a number of bytes, or all of it at the end.

use super::accounts::TenantId;
use super::core::{Core, Locked};
use super::memory::Memory;
use crate::error::CallError;

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
        for id in self.memory.budget.ids().collect::<Vec<_>>() {
            outcome = outcome.and(self.drain_holders(id));
            outcome = outcome.and(self.empty_slots(id));
        }
        self.release_free(0);
        self.release_marked();
        outcome.and(self.empty_quarantined_spaces())
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
        if let Some(joined) = self.ledger.get() {
            // The end of the operation may have returned some.
            let granted = self.look(|state| state.memory.budget.totals().granted);
            joined.member.give(granted.saturating_sub(kept));
            if kept > 0 {
                log!(error, kept, "memory stays charged to the ledger");
            }
        }
        if let Err(error) = shut {
            self.device.report_drop("pool", held, error);
        }
    }
}
