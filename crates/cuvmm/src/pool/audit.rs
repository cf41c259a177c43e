//! The invariants of a pool's state, checked in debug builds at the end of each locked section and
//! wherever a section releases the lock.
//!
//! Keeps I-1.

use super::blocks::slots::Freed;
use super::state::State;

/// With more slots than this only the first, the second, the fourth section and so on are checked.
const MOST_SLOTS: usize = 64;

impl State {
    /// Panics if accounts, slots and lists do not agree.
    pub(super) fn audit(&mut self) {
        let slots = &mut self.blocks.slots;
        let sections = slots.end_section();
        let (count, lost) = (slots.all().count(), slots.has_lost());
        let now = count <= MOST_SLOTS || sections.is_power_of_two();
        if std::thread::panicking() || lost || !now || self.memory.device.is_forked() {
            return;
        }
        self.audit_charges();
        self.audit_lists();
        if self.memory.gate.is_idle() {
            self.audit_sources();
        }
    }

    /// Checks that each tenant is charged for exactly the memory of its slots, holders and share
    /// table.
    fn audit_charges(&self) {
        for (id, tenancy) in self.blocks.slots.iter() {
            let parts = tenancy.figures().map(|(figures, _)| {
                figures.in_use + figures.padding + figures.precommitted + figures.idle
            });
            let parts = parts.sum::<u64>() + tenancy.share_table.bytes();
            let parts = parts + self.memory.holders.bytes_of(id);
            let account = self.memory.budget.account(id);
            let (held, parts) = (account.held, parts + account.in_flight);
            let figures = || tenancy.figures().map(|(figures, _)| figures);
            for held in self.memory.holders.of(id) {
                let (figures, bytes) = (held.holder().figures(), held.bytes());
                debug_assert!(figures.held <= bytes, "{id:?}: {figures:?} of {bytes}");
            }
            debug_assert!(
                held == parts,
                "{id:?} is charged {held} and has {parts}: {:?}, {} shared",
                figures().collect::<Vec<_>>(),
                tenancy.share_table.bytes()
            );
        }
        let accounts = self.memory.budget.accounts().map(|(_, account)| account);
        let held: u64 = accounts.map(|account| account.held).sum();
        let all = self.memory.budget.totals().held;
        debug_assert!(held == all, "accounts add up to {held}");
    }

    /// Checks that each slot is listed for the memory that it can give and the blocks that it can
    /// serve.
    fn audit_lists(&self) {
        for (id, tenancy) in self.blocks.slots.iter() {
            let standing = tenancy.standing;
            let terms = &self.memory.terms;
            let may_grow = terms.is_registered(id) && !terms.is_beyond(id);
            let is_current = standing.may_grow == may_grow
                && standing.drains == terms.drains(id)
                && standing.lowered == self.memory.lowered;
            debug_assert!(is_current, "{id:?}: {standing:?}");
            let keeps_nothing = self.blocks.are_hardened() || standing.drains;
            for index in tenancy.indices() {
                let Some(slot) = tenancy.slot(index) else {
                    continue;
                };
                let listed = tenancy.lists(index);
                let serves = slot.is_vacant();
                debug_assert!(listed.0 == serves, "{id:?}, {index}: vacant is {serves}");
                let gives = slot.has_spare();
                debug_assert!(
                    listed.1 || !gives,
                    "{id:?}, {index} gives and is not listed"
                );
                let to_purge = slot.is_to_purge(keeps_nothing);
                debug_assert!(slot.purging || !to_purge, "{id:?}, {index} is not purged");
                let queued = self.blocks.has_queued(slot.id);
                debug_assert!(queued || !slot.purging, "{id:?}, {index} is not queued");
                let idle = slot.idle() + slot.precommitted();
                let pending = slot.freed_state() != Freed::Leased && idle > slot.stranded();
                debug_assert!(
                    gives || !pending || slot.is_busy(),
                    "{id:?}, {index}: {idle} idle"
                );
            }
            tenancy.audit();
        }
    }

    /// Checks that all memory from the driver is accounted for.
    fn audit_sources(&self) {
        let states = || self.blocks.slots.all().map(|slot| &slot.sleep_state);
        let owed: u64 = states().map(|state| state.owed()).sum();
        let passed: u64 = states().map(|state| state.passed()).sum();
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
