//! Export of memory pools and of their allocations.
//!
//! A handle names a whole pool; data of 64 bytes names one allocation of it. Neither keeps the
//! memory: the exporting process may free it while an importer uses it, unless it passes through
//! [`share`](crate::share).
//!
//! `unsafe` is used to export a pool, whose handle is alive.
#![allow(unsafe_code)]

use cuvmm_driver::{Call, Exported, HandleTypes, MemPoolTicket};

use super::export::one_type;
use super::mem_pool::Kind;
use super::{MemPool, PoolAllocation};
use crate::error::MemoryError;

impl MemPool {
    /// Exports a handle by which another process can import the pool
    /// (`cuMemPoolExportToShareableHandle`).
    ///
    /// A process with the handle can import any allocation of the pool, now and later, and write to
    /// it. The [data](PoolAllocation::export) of an allocation is not a secret, and the handle
    /// cannot be taken back.
    ///
    /// # Errors
    /// [`MemoryError::NotShareable`] when the pool was not
    /// [created](super::MemPoolBuilder::shareable) for that type (a default pool never is), and
    /// [`MemoryError`] when the driver refuses.
    #[doc(alias = "cuMemPoolExportToShareableHandle")]
    pub fn export(&self, handle_type: HandleTypes) -> Result<Exported, MemoryError> {
        one_type(handle_type)?;
        self.check_shareable(handle_type)?;
        self.note_changed();
        let exported = self
            .call(
                Call::MemPoolExportToShareableHandle,
                |driver, device, pool| {
                    // SAFETY: the handle is alive.
                    unsafe { driver.mem_pool_export(device, pool, handle_type, 0) }
                },
            )
            .map_err(|cause| MemoryError::Export { handle_type, cause })?;
        self.note_exported();
        Ok(exported)
    }

    pub(crate) fn check_shareable(&self, handle_type: HandleTypes) -> Result<(), MemoryError> {
        let shareable = self.shareable();
        // The types that another library has created its pool for are unknown.
        if self.kind() == Kind::Foreign || shareable.contains(handle_type) {
            return Ok(());
        }
        let what = match self.kind() {
            Kind::Default => {
                "the default memory pool of a device, which never is shareable (create one with \
                 `MemPool::builder(..).shareable(..)` and make it current),"
            }
            _ => {
                "the memory pool (create one with `MemPool::builder(..).shareable(..)`, and make it \
                 current for other libraries)"
            }
        };
        Err(MemoryError::NotShareable {
            what,
            handle_type,
            shareable,
        })
    }
}

impl PoolAllocation {
    /// Returns the data by which another process imports this allocation, once it has imported the
    /// pool (`cuMemPoolExportPointer`; before it, if no handle of the pool was exported yet,
    /// `cuMemPoolExportToShareableHandle`, without which the driver refuses).
    ///
    /// # Errors
    /// [`MemoryError`] when the pool is not shareable, or the driver refuses.
    #[doc(alias = "cuMemPoolExportPointer")]
    pub fn export(&self) -> Result<MemPoolTicket, MemoryError> {
        let handle_type = HandleTypes::OS;
        let address = self.address();
        if !self.pool().is_exported() {
            drop(self.pool().export(handle_type)?);
        }
        self.pool()
            .call(Call::MemPoolExportPointer, |driver, device, _| {
                driver.mem_pool_export_pointer(device, address)
            })
            .map_err(|cause| MemoryError::Export { handle_type, cause })
    }
}
