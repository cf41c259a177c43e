//! Lending to containers, beside what the pool [lends](super::lend) to all holders.

use cuvmm_driver::PhysicalProps;

use super::held::HolderId;
use crate::error::BlockError;
use crate::extents::Space;
use crate::pool::state::gone;
use crate::pool::tenant::Tenant;

impl Tenant {
    /// Returns the properties of the pool's memory.
    pub(crate) fn props(&self) -> PhysicalProps {
        self.core().look(|state| state.memory.policy.props)
    }

    /// Reserves exactly `size` bytes of addresses for a holder (`cuMemAddressReserve`).
    pub(crate) fn reserve_exactly(&self, holder: HolderId, size: u64) -> Result<Space, BlockError> {
        let (core, tenant) = (self.core(), self.id());
        core.device.own_process()?;
        let mut state = core.lock();
        state.memory.check_usable(tenant)?;
        state.make_address_room(size)?;
        let mut spaces = state.reserve_for(tenant, size, 0, 1)?;
        state.memory.holders.add_addresses(holder, size);
        spaces.pop().ok_or_else(gone)
    }

    /// Returns `true` if the tenant can be charged `bytes` more and no memory is reclaimed for that.
    pub(crate) fn has_spare(&self, bytes: u64) -> bool {
        let (core, tenant) = (self.core(), self.id());
        core.look(|state| {
            let (_, missing) = state.memory.budget.missing(tenant, bytes);
            missing == 0 && state.memory.budget.lacks_grant(tenant, bytes) == 0
        })
    }

    /// Returns the bytes that the tenant's heaps, memory pools and containers use.
    pub(crate) fn used_by_holders(&self) -> u64 {
        self.core()
            .look(|state| state.memory.holders.in_use_of(self.id()))
    }
}
