//! The guard that keeps a tenant's memory pool the current one of its device.

use super::TenantMemPool;
use crate::error::{BlockError, CallError};
use crate::own::{CloseError, MemPool};

impl TenantMemPool {
    /// Makes this the pool that `cuMemAllocAsync` allocates from, until the last such guard is
    /// dropped (`cuDeviceGetDefaultMemPool`, `cuDeviceGetMemPool`, `cuDeviceSetMemPool`). Then the
    /// default pool is current, which bounds nothing.
    ///
    /// Another library should not save the current pool, set its own and put the saved one back
    /// while this pool may be exchanged: it would allocate from an older pool, which may hold up to
    /// its maximum and is charged with less. The next operation, and each reading of the figures,
    /// makes the newest pool current instead, and charges what was allocated.
    ///
    /// # Errors
    /// [`BlockError`] when another pool than the default one is current, such as that of another
    /// tenant ([`MemoryError::CurrentPool`](crate::error::MemoryError::CurrentPool)), the tenant was
    /// unregistered, or the driver refuses.
    #[doc(alias = "cuDeviceSetMemPool")]
    pub fn make_current(&self) -> Result<CurrentTenantMemPool, BlockError> {
        self.shared.tenant.check_usable()?;
        self.shared.core.lock().make_current()?;
        Ok(CurrentTenantMemPool {
            pool: self.clone(),
            ended: false,
        })
    }

    /// Returns `true` if `cuMemAllocAsync` allocates from this pool (`cuDeviceGetMemPool`).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    pub fn is_current(&self) -> Result<bool, CallError> {
        self.shared.core.device.own_process()?;
        // Under the lock, so that the pool is not exchanged meanwhile.
        let generations = self.shared.core.lock();
        let current = MemPool::current_of(&self.shared.core.device)?;
        let newest = generations.newest().map(MemPool::as_raw);
        Ok(newest == Some(current))
    }
}

/// Keeps a [`TenantMemPool`] the current pool of its device, also when the driver's pool is
/// exchanged. The default pool is current again when the last such guard is dropped, or when the
/// tenant is unregistered.
///
/// Nothing is set if the program has made another pool current by then.
#[derive(Debug)]
#[must_use = "the default pool is current again when this is dropped"]
pub struct CurrentTenantMemPool {
    pool: TenantMemPool,
    ended: bool,
}

impl CurrentTenantMemPool {
    /// Returns the pool that is current.
    #[must_use]
    pub const fn pool(&self) -> &TenantMemPool {
        &self.pool
    }

    /// Makes the default pool current again, unless another guard lives (`cuDeviceGetMemPool`,
    /// `cuDeviceSetMemPool`), or returns the guard with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the guard in it when the driver refuses.
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let core = &self.pool.shared.core;
        let restored = match core.device.own_process() {
            Ok(()) => core.lock().end_current(),
            Err(forked) => Err(forked),
        };
        self.ended = restored.is_ok();
        CloseError::of(self, restored)
    }
}

impl Drop for CurrentTenantMemPool {
    fn drop(&mut self) {
        let core = &self.pool.shared.core;
        if !self.ended && !core.device.is_forked() {
            core.lock().forget_current();
        }
    }
}
