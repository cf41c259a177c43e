//! Memory pools for cases.
//!
//! `unsafe` is allowed here for the reasons given at the top of `memory`.
#![allow(unsafe_code)]

use cuvmm_driver::{
    AccessDesc, AccessFlags, DeviceAddress, DriverError, Exported, HandleTypes, ImportSource,
    Location, MemPoolAttribute, MemPoolHandle, MemPoolProps, MemPoolTicket, StreamHandle,
};

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

    pub(crate) fn pool_attribute(
        &self,
        pool: MemPoolHandle,
        attribute: MemPoolAttribute,
    ) -> Result<u64, DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.mem_pool_attribute(self.device, pool, attribute) }
    }

    pub(crate) fn set_pool_attribute(
        &self,
        pool: MemPoolHandle,
        attribute: MemPoolAttribute,
        value: u64,
    ) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe {
            self.driver
                .mem_pool_set_attribute(self.device, pool, attribute, value)
        }
    }

    pub(crate) fn trim_pool(&self, pool: MemPoolHandle, keep: u64) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.mem_pool_trim(self.device, pool, keep) }
    }

    pub(crate) fn pool_access(
        &self,
        pool: MemPoolHandle,
        location: Location,
    ) -> Result<AccessFlags, DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.mem_pool_access(self.device, pool, location) }
    }

    pub(crate) fn set_pool_access(
        &self,
        pool: MemPoolHandle,
        access: &[AccessDesc],
    ) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.mem_pool_set_access(self.device, pool, access) }
    }

    /// Makes a pool the current one. The default pool is set again after the case.
    pub(crate) fn set_current_pool(&mut self, pool: MemPoolHandle) -> Result<(), DriverError> {
        // SAFETY: see `memory`.
        unsafe { self.driver.set_current_mem_pool(self.device, pool) }?;
        self.ledger.changed_pool = true;
        Ok(())
    }

    pub(crate) fn alloc_from(
        &mut self,
        pool: MemPoolHandle,
        size: u64,
        stream: StreamHandle,
    ) -> Result<DeviceAddress, DriverError> {
        // SAFETY: see `memory`.
        let address = unsafe {
            self.driver
                .alloc_from_pool_async(self.device, size, pool, stream)
        }?;
        self.ledger.plain.push(address);
        Ok(address)
    }

    pub(crate) fn export_pool(
        &self,
        pool: MemPoolHandle,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<Exported, DriverError> {
        // SAFETY: see `memory`.
        unsafe {
            self.driver
                .mem_pool_export(self.device, pool, handle_type, flags)
        }
    }

    pub(crate) fn import_pool(
        &mut self,
        source: ImportSource,
        handle_type: HandleTypes,
        flags: u64,
    ) -> Result<MemPoolHandle, DriverError> {
        // SAFETY: see `memory`.
        let pool = unsafe {
            self.driver
                .mem_pool_import(self.device, source, handle_type, flags)
        }?;
        self.ledger.pools.push(pool);
        Ok(pool)
    }

    pub(crate) fn import_pointer(
        &mut self,
        pool: MemPoolHandle,
        ticket: &MemPoolTicket,
    ) -> Result<DeviceAddress, DriverError> {
        // SAFETY: see `memory`.
        let address = unsafe {
            self.driver
                .mem_pool_import_pointer(self.device, pool, ticket)
        }?;
        self.ledger.plain.push(address);
        Ok(address)
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
