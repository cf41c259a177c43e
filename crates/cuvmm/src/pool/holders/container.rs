//! Lending to containers, beside what the pool [lends](super::lend) to all holders.

use super::held::HolderId;
use super::lend::Lending;
use crate::error::BlockError;
use crate::extents::{Space, Unmapped};
use crate::pool::accounts::{Amount, Budget, TenantId};
use crate::pool::core::Core;
use crate::pool::state::gone;
use crate::pool::tenant::Tenant;

impl Tenant {
    /// Reserves exactly `size` bytes of addresses for a holder (`cuMemAddressReserve`).
    pub(crate) fn reserve_exactly(&self, holder: HolderId, size: u64) -> Result<Space, BlockError> {
        let mut state = self.lock_usable()?;
        state.make_address_room(size)?;
        let mut spaces = state.reserve_for(self.id(), size, 0, 1)?;
        state.memory.holders.add_addresses(holder, size);
        spaces.pop().ok_or_else(gone)
    }

    /// Counts addresses that an operation reserves to copy through, and that are no tenant's.
    pub(crate) fn hold_addresses(&self, bytes: u64) {
        let budget = &mut self.core().lock().memory.budget;
        let addresses = budget.charge(None, Amount::of(0, 0, bytes));
        budget.keep(addresses);
    }

    /// Ends the count of addresses that were [held](Self::hold_addresses) and are reserved no more.
    pub(crate) fn free_addresses(&self, bytes: u64) {
        let freed = Amount::of(0, 0, bytes);
        self.core().lock().memory.budget.give_up(None, freed);
    }

    /// Returns `true` if the tenant can be charged `bytes` more and no memory is reclaimed for that.
    pub(crate) fn has_spare(&self, bytes: u64) -> bool {
        let (core, tenant) = (self.core(), self.id());
        core.look(|state| has_spare(&state.memory.budget, tenant, bytes))
    }

    /// [Lends](Self::lend) memory if nothing is reclaimed for it, and no request waits for it.
    pub(crate) fn lend_spare(
        &self,
        lending: Lending<'_>,
    ) -> Result<Option<Vec<Unmapped>>, BlockError> {
        let (core, tenant) = (self.core(), self.id());
        core.device.own_process()?;
        let mut state = core.lock();
        state.zeroes = lending.zeroes;
        let has_mappings = state.memory.budget.totals().left.mappings >= lending.sizes.len() as u64;
        let is_spare = has_mappings && has_spare(&state.memory.budget, tenant, lending.bytes());
        let lent = match is_spare && !core.is_awaited() {
            true => state.lend_extents(lending).map(Some),
            false => Ok(None),
        };
        Core::unlock(state);
        lent
    }

    /// Returns the bytes that the tenant's heaps, memory pools and containers use.
    pub(crate) fn used_by_holders(&self) -> u64 {
        self.core().look(|state| {
            let figures = state.memory.holders.figures_of(self.id());
            figures.map(|(_, it)| it.in_use).sum()
        })
    }
}

fn has_spare(budget: &Budget, tenant: TenantId, bytes: u64) -> bool {
    let (_, missing) = budget.missing(tenant, bytes);
    missing == 0 && budget.lacks_grant(tenant, bytes) == 0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::extents::rig::{G, rig};
    use crate::pool::{Limit, Pool};

    #[test]
    fn spare_memory_is_lent_and_none_is_reclaimed_for_it() {
        let rig = rig();
        let pool = Pool::builder(&rig.device).limit(Limit::Bytes(8 * G));
        let pool = pool.build().unwrap();
        let [a, b] = ["a", "b"].map(|name| pool.tenant(name).register().unwrap());
        // Cached for the other tenant.
        drop(b.allocate(2 * G).unwrap());
        let mut region = a.region(16 * G).largest_extent(2 * G).reserve().unwrap();
        let mut ahead = |start: u64| {
            let range = start..start + 2 * G;
            region.map_ahead(std::slice::from_ref(&range)).unwrap()
        };
        a.set_limit(4 * G).unwrap();
        assert!(ahead(0) && ahead(6 * G));
        assert!(!ahead(10 * G), "beyond its own limit");
        a.set_limit(u64::MAX).unwrap();
        assert!(ahead(10 * G));
        assert!(!ahead(12 * G), "no more without the other's");
        assert_eq!(
            (region.committed(), region.lent_figures().ahead),
            (0, 6 * G)
        );
        let committed = [&a, &b].map(|it| it.stats().committed);
        assert_eq!(committed, [6 * G, 2 * G]);
        region.commit(6 * G..8 * G).unwrap();
        assert_eq!(region.lent_figures().ahead, 4 * G);
        assert!(!region.is_bare(&(6 * G..7 * G)) && region.is_bare(&(2 * G..6 * G)));
    }
}
