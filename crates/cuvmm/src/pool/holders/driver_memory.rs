//! Memory that the driver's own memory pools hold for a tenant.
//!
//! The pool sees no allocation of these pools. So it charges the most that they may hold before
//! they may hold it, and ends the charge when they cannot hold it any more. Their
//! [figures](super::driver_figures) are read from the driver.

use super::held::HolderId;
use crate::error::{BlockError, MemoryError};
use crate::pool::accounts::TenantId;
use crate::pool::core::Locked;
use crate::pool::line::Wait;
use crate::pool::supply::AtDriver;
use crate::pool::tenant::Tenant;

impl Tenant {
    /// Charges whole granules that memory pools of the driver may hold in addition. Reclaims
    /// memory, calls hooks and waits, as for a block. On failure nothing has changed, except that
    /// unused memory may have been reclaimed.
    pub(crate) fn charge_driver_memory(
        &self,
        holder: HolderId,
        bytes: u64,
        wait: Wait,
    ) -> Result<(), BlockError> {
        let (core, tenant) = (self.core(), self.id());
        core.device.own_process()?;
        core.request(tenant, bytes, wait, |mut state| {
            let charged =
                state.charge_holder(holder, bytes, |state| state.leave_to_driver(tenant, bytes));
            (state, charged)
        })
    }

    /// Counts in the ledger the memory of driver pools, as last read.
    pub(crate) fn count_obtained(&self, holder: HolderId) {
        let core = self.core();
        if core.ledger.get().is_some() {
            core.lock().count_obtained(holder);
        }
    }
}

impl Locked<'_> {
    /// Ensures that the driver may hold `bytes` more, which the tenant has been charged, and counts
    /// them as obtained. Releases memory of the free list for it.
    fn leave_to_driver(&mut self, tenant: TenantId, bytes: u64) -> Result<(), BlockError> {
        while self.memory.budget.totals().left.bytes < bytes {
            if !self.release_largest_free() {
                // Another operation has the rest, and has not given it back yet.
                return Err(self.out_of_memory(tenant, bytes));
            }
        }
        // Counted before the driver is asked, so that no other operation creates the same quota.
        self.memory.budget.created(bytes);
        let (core, policy) = (self.core(), self.memory.policy);
        let left = match policy.leave_free {
            0 => Ok(()),
            // The bytes are among the promised bytes.
            _ => {
                // A panic of the driver takes the bytes from the pool: its libraries may use them.
                let at_driver = AtDriver::begin(self, bytes);
                let left = at_driver.0.unlocked(|| core.check_left(&policy));
                at_driver.end();
                left
            }
        };
        if let Err(cause) = left {
            self.memory.budget.not_created(bytes);
            if !cause.is_out_of_memory() {
                return Err(MemoryError::from(cause).into());
            }
            return Err(self.driver_out_of_memory(tenant, bytes, cause));
        }
        Ok(())
    }
}
