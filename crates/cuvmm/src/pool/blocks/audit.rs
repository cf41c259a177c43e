//! The blocks' part of the checks of a pool's state in debug builds.

use super::Blocks;
use super::slots::{Freed, Slot, Standing, Tenancy};
use crate::pool::accounts::TenantId;

/// With more slots than this only the first, the second, the fourth section and so on are checked.
const MOST_SLOTS: usize = 64;

impl Blocks {
    /// Checks that no slot is taken while the lock is released. Returns `true` if all else is to be
    /// checked too.
    pub(in crate::pool) fn begin_audit(&mut self) -> bool {
        let panics = std::thread::panicking();
        let taken = self.slots.has_taken();
        debug_assert!(
            !taken || panics,
            "a slot is taken while the lock is released"
        );
        let sections = self.slots.end_section();
        let now = self.slots.all().count() <= MOST_SLOTS || sections.is_power_of_two();
        now && !panics && !self.slots.has_lost()
    }

    /// Checks that a tenant's slots and shared memory have `charged` bytes.
    pub(in crate::pool) fn audit_bytes(&self, id: TenantId, charged: u64) {
        let figures = || self.figures_of(id).map(|(figures, _)| figures);
        let parts = figures().map(|it| it.in_use + it.padding + it.precommitted + it.idle);
        let shared = self.slots.of(id).map_or(0, |it| it.share_table.bytes());
        let bytes = parts.sum::<u64>() + shared;
        debug_assert!(
            bytes == charged,
            "{id:?} is charged {charged} for slots and has {bytes}: {:?}, {shared} shared",
            figures().collect::<Vec<_>>()
        );
    }

    /// Checks that a tenant's slots are listed for the memory that they can give and the blocks that
    /// they can serve. The limits may be exceeded since `standing` was last renewed.
    pub(in crate::pool) fn audit(&self, id: TenantId, mut standing: Standing) {
        let Some(tenancy) = self.slots.of(id) else {
            return debug_assert!(false, "{id:?} has no part of the state");
        };
        standing.beyond = tenancy.standing.beyond;
        debug_assert!(tenancy.standing == standing, "{id:?}: {standing:?}");
        let slots = tenancy.indices().filter_map(|index| tenancy.slot(index));
        slots.for_each(|slot| self.audit_slot(slot, tenancy));
        tenancy.audit();
    }

    fn audit_slot(&self, slot: &Slot, tenancy: &Tenancy) {
        let id = slot.id;
        let (serves, gives) = (slot.is_vacant(), slot.has_spare());
        let listed = tenancy.lists(id.index);
        debug_assert!(listed.0 == serves, "{id:?}: vacant is {serves}");
        debug_assert!(listed.1 || !gives, "{id:?} gives and is not listed");
        let to_purge = slot.is_to_purge(self.are_hardened() || tenancy.standing.drains);
        debug_assert!(slot.purging || !to_purge, "{id:?} is not purged");
        let queued = self.queues.has(id);
        debug_assert!(queued || !slot.purging, "{id:?} is not queued");
        let idle = slot.idle() + slot.precommitted();
        let pending = slot.freed_state() != Freed::Leased && idle > slot.stranded();
        debug_assert!(gives || !pending || slot.is_busy(), "{id:?}: {idle} idle");
    }

    /// Returns the bytes that moving blocks are charged for and are still to get, and those that they
    /// have and other blocks are charged for.
    pub(in crate::pool) fn on_the_move(&self) -> (u64, u64) {
        let states = || self.slots.all().map(|slot| &slot.sleep_state);
        let owed = states().map(|state| state.owed()).sum();
        (owed, states().map(|state| state.passed()).sum())
    }
}
