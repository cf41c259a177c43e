//! Memory pools for cases.
//!
//! `unsafe` is allowed here for the reasons given at the top of `memory`.
#![allow(unsafe_code)]

use cuvmm_driver::{DriverError, MemPoolHandle, MemPoolProps};

use super::Bench;
use super::ledger::{note, strike};

impl Bench {
    pub(crate) fn pool(&mut self, props: &MemPoolProps) -> Result<MemPoolHandle, DriverError> {
        let pool = self.driver.mem_pool_create(self.device, props)?;
        self.ledger.pools.push(pool);
        Ok(pool)
    }

    pub(crate) fn destroy_pool(&mut self, pool: MemPoolHandle) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.mem_pool_destroy(self.device, pool) }?;
        strike(&mut self.ledger.pools, &pool);
        Ok(())
    }

    /// Makes a pool the current one. The default pool is set again after the case.
    pub(crate) fn set_current_pool(&mut self, pool: MemPoolHandle) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.set_current_mem_pool(self.device, pool) }?;
        self.ledger.changed_pool = true;
        Ok(())
    }

    /// Sets the default pool again and destroys the pools, and adds the errors. The memory of
    /// the pools is freed before.
    pub(super) fn give_back_pools(&mut self, troubles: &mut Vec<String>) {
        if std::mem::take(&mut self.ledger.changed_pool) {
            let default = self.driver.default_mem_pool(self.device);
            note(
                troubles,
                default.and_then(|pool| self.set_current_pool(pool)),
            );
            self.ledger.changed_pool = false;
        }
        for pool in std::mem::take(&mut self.ledger.pools) {
            note(troubles, self.destroy_pool(pool));
        }
    }
}
