//! The invariants of a pool's state, checked in debug builds at the end of each locked section and
//! wherever a section releases the lock.
//!
//! Keeps I-1.

use super::state::State;

impl State {
    /// Panics if accounts, slots and lists do not agree.
    pub(super) fn audit(&mut self) {
        if !self.blocks.begin_audit() || self.memory.device.is_forked() {
            return;
        }
        self.audit_charges();
        let ids = || self.memory.budget.ids();
        ids().for_each(|id| self.blocks.audit(id, self.standing_of(id)));
        if self.memory.gate.is_idle() {
            self.audit_sources();
        }
    }

    /// Checks that each tenant is charged for exactly the memory of its slots, holders and share
    /// table.
    fn audit_charges(&self) {
        for (id, account) in self.memory.budget.accounts() {
            debug_assert!(self.memory.lowered || !account.beyond, "{id:?} is beyond");
            let mut beside = account.in_flight;
            for (bytes, figures) in self.memory.holders.figures_of(id) {
                debug_assert!(figures.held <= bytes, "{id:?}: {figures:?} of {bytes}");
                beside += bytes;
            }
            self.blocks
                .audit_bytes(id, account.held.wrapping_sub(beside));
        }
        let accounts = self.memory.budget.accounts().map(|(_, account)| account);
        let held: u64 = accounts.map(|account| account.held).sum();
        let all = self.memory.budget.totals().held;
        debug_assert!(held == all, "accounts add up to {held}");
    }

    /// Checks that all memory from the driver is accounted for.
    fn audit_sources(&self) {
        let (owed, passed) = self.blocks.on_the_move();
        let all = self.memory.budget.totals();
        let had = all.obtained + owed - passed;
        let unused = self.memory.supply.free() + self.memory.supply.marked();
        let known = all.held + all.quarantined + unused;
        debug_assert!(
            had == known,
            "{had} came from the driver, {known} are known"
        );
    }
}
