//! The current memory pool of a device, from which `cuMemAllocAsync` allocates.
//!
//! `unsafe` is used to set a pool. Guards keep its handle and that of the previous pool alive.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use cuvmm_driver::{Call, MemPoolHandle};

use super::MemPool;
use super::close::CloseError;
use crate::device::Device;
use crate::error::{ArgumentError, CallError, MemoryError};

impl MemPool {
    /// Returns the handle of a device's current pool (`cuDeviceGetMemPool`), from which
    /// `cuMemAllocAsync` allocates. Another library may own and destroy it.
    ///
    /// # Errors
    /// [`CallError`] when the driver is older than CUDA 11.2 or refuses.
    #[doc(alias = "cuDeviceGetMemPool")]
    pub fn current_of(device: &Device) -> Result<MemPoolHandle, CallError> {
        device.call(Call::DeviceGetMemPool, |driver, device| {
            driver.current_mem_pool(device)
        })
    }

    /// Returns `true` if `cuMemAllocAsync` allocates from this pool (`cuDeviceGetMemPool`).
    ///
    /// # Errors
    /// [`CallError`] when the driver refuses.
    pub fn is_current(&self) -> Result<bool, CallError> {
        Ok(Self::current_of(self.device())? == self.as_raw())
    }

    /// Makes this the pool that `cuMemAllocAsync` allocates from until the guard is dropped
    /// (`cuDeviceGetDefaultMemPool`, `cuDeviceGetMemPool`, `cuDeviceSetMemPool`). Libraries such as
    /// candle and cudarc then allocate from it, within its maximum.
    ///
    /// # Errors
    /// [`MemoryError`] when the memory is on the host, the pool is part of a
    /// [`TenantMemPool`](crate::TenantMemPool), another pool than the default one is current (its
    /// owner could destroy it before the guard puts it back; see [`CurrentPoolGuard::replace`]), or
    /// the driver refuses.
    #[doc(alias = "cuDeviceSetMemPool")]
    pub fn make_current(&self) -> Result<CurrentPoolGuard<'static>, MemoryError> {
        self.check_not_managed()?;
        self.make_current_instead_of_default()
    }

    /// Makes this pool current, also a tenant's pool.
    pub(crate) fn make_current_instead_of_default(
        &self,
    ) -> Result<CurrentPoolGuard<'static>, MemoryError> {
        let default = Self::default_of(self.device())?;
        let _one_by_one = self.device().set_pool_alone()?;
        if !default.is_current()? {
            let device = self.device().location();
            return Err(MemoryError::CurrentPool(device));
        }
        self.make_current_after(default.as_raw())
    }

    fn make_current_after<'a>(
        &self,
        previous: MemPoolHandle,
    ) -> Result<CurrentPoolGuard<'a>, MemoryError> {
        let device = self.device().location();
        if self.location() != device {
            let (found, wanted) = (self.location(), device);
            let offset = 0;
            return Err(MemoryError::Elsewhere {
                offset,
                found,
                wanted,
            });
        }
        self.set_current()?;
        Ok(CurrentPoolGuard {
            pool: self.clone(),
            previous,
            restored: false,
            _outer: PhantomData,
        })
    }
}

/// Keeps a [`MemPool`] current on its device. Its drop sets the previous pool again, unless another
/// pool is current by then.
#[must_use = "the previous pool is current again when this is dropped"]
#[derive(Debug)]
pub struct CurrentPoolGuard<'a> {
    pool: MemPool,
    /// The default pool, or the pool of the guard that this one borrows.
    previous: MemPoolHandle,
    restored: bool,
    _outer: PhantomData<&'a ()>,
}

impl CurrentPoolGuard<'_> {
    /// Returns the pool of the guard.
    #[must_use]
    pub const fn pool(&self) -> &MemPool {
        &self.pool
    }

    /// Makes another pool of the device current until the inner guard is dropped
    /// (`cuDeviceSetMemPool`). Then this guard's pool is current again.
    ///
    /// # Errors
    /// [`MemoryError`] when the pool's memory is not on this guard's device, the pool is part of a
    /// [`TenantMemPool`](crate::TenantMemPool), or the driver refuses.
    pub fn replace(&self, pool: &MemPool) -> Result<CurrentPoolGuard<'_>, MemoryError> {
        if !pool.device().is_same(self.pool.device()) {
            return Err(ArgumentError::WrongDevice("the memory pool").into());
        }
        pool.check_not_managed()?;
        pool.make_current_after(self.pool.as_raw())
    }

    /// Makes another pool of the device current in place of this guard's pool from now on
    /// (`cuDeviceGetMemPool`, `cuDeviceSetMemPool`). Sets nothing if this guard's pool is no longer
    /// current. A failure changes nothing.
    pub(crate) fn switch(&mut self, pool: &MemPool) -> Result<(), CallError> {
        let one_by_one = self.pool.device().set_pool_alone()?;
        if MemPool::current_of(self.pool.device())? == self.pool.as_raw() {
            pool.set_current()?;
        }
        drop(one_by_one);
        self.pool = pool.clone();
        Ok(())
    }

    /// Makes this guard's pool current again if one of `pools` is current, or, with `default`, the
    /// previous pool (`cuDeviceGetMemPool`, `cuDeviceSetMemPool`). Returns `true` if this guard's
    /// pool is then current.
    pub(crate) fn claim(&self, pools: &[MemPoolHandle], default: bool) -> Result<bool, CallError> {
        let _one_by_one = self.pool.device().set_pool_alone()?;
        let current = MemPool::current_of(self.pool.device())?;
        if current == self.pool.as_raw() {
            return Ok(true);
        }
        if !(pools.contains(&current) || (default && current == self.previous)) {
            return Ok(false);
        }
        self.pool.set_current()?;
        Ok(true)
    }

    /// Sets the previous pool (`cuDeviceGetMemPool`, `cuDeviceSetMemPool`), or returns the guard
    /// with the reason.
    ///
    /// # Errors
    /// [`CloseError`] with the guard in it when the driver refuses.
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        let restored = self.restore();
        CloseError::of(self, restored)
    }

    fn restore(&mut self) -> Result<(), CallError> {
        if self.restored {
            return Ok(());
        }
        let device = self.pool.device();
        let _one_by_one = device.set_pool_alone()?;
        let current = device.give_back(Call::DeviceGetMemPool, |driver, device| {
            driver.current_mem_pool(device)
        })?;
        if current == self.pool.as_raw() {
            let previous = self.previous;
            device.give_back(Call::DeviceSetMemPool, |driver, device| {
                // SAFETY: the previous pool is the default one, or that of the guard that this one
                // borrows.
                unsafe { driver.set_current_mem_pool(device, previous) }
            })?;
        }
        self.restored = true;
        Ok(())
    }
}

impl Drop for CurrentPoolGuard<'_> {
    fn drop(&mut self) {
        let restored = self.restore();
        let device = self.pool.device();
        // On a lost context, the end of the pool makes the default pool current.
        device.report_end("current memory pool", 0, restored);
    }
}
