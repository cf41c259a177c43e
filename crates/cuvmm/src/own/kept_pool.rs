//! The end of the driver's memory pools that were current: they are
//! [kept](Device::kept_memory_pools) instead of destroyed.
//!
//! Keeps I-67.
//!
//! `unsafe` is used for calls with the handle of a pool that is alive, or kept and never destroyed.
#![allow(unsafe_code)]

use cuvmm_driver::{Call, MemPoolAttribute, MemPoolHandle};

use crate::device::Device;
use crate::error::CallError;

/// Empties an ending pool, and ensures that it is not current.
pub(super) fn retire(device: &Device, pool: MemPoolHandle) -> Result<(), CallError> {
    leave_current(device, pool)?;
    empty(device, pool)
}

/// Makes the default pool current in place of an ending pool. No other thread sets a pool
/// meanwhile.
fn leave_current(device: &Device, pool: MemPoolHandle) -> Result<(), CallError> {
    let _one_by_one = device.set_pool_alone()?;
    let current = device.give_back(Call::DeviceGetMemPool, |driver, device| {
        driver.current_mem_pool(device)
    })?;
    if current != pool {
        return Ok(());
    }
    let default = device.give_back(Call::DeviceGetDefaultMemPool, |driver, device| {
        driver.default_mem_pool(device)
    })?;
    device.give_back(Call::DeviceSetMemPool, |driver, device| {
        // SAFETY: a default pool is never destroyed.
        unsafe { driver.set_current_mem_pool(device, default) }
    })
}

/// Releases the unused memory of a pool, and lets the driver release the rest as it is freed.
fn empty(device: &Device, pool: MemPoolHandle) -> Result<(), CallError> {
    device.give_back(Call::MemPoolSetAttribute, |driver, device| {
        let attribute = MemPoolAttribute::RELEASE_THRESHOLD;
        // SAFETY: the handle is alive.
        unsafe { driver.mem_pool_set_attribute(device, pool, attribute, 0) }
    })?;
    device.give_back(Call::MemPoolTrimTo, |driver, device| {
        // SAFETY: the handle is alive.
        unsafe { driver.mem_pool_trim(device, pool, 0) }
    })
}

pub(super) fn reserved(device: &Device, pool: MemPoolHandle) -> Result<u64, CallError> {
    device.call(Call::MemPoolGetAttribute, |driver, device| {
        let attribute = MemPoolAttribute::RESERVED_MEM_CURRENT;
        // SAFETY: kept pools are never destroyed.
        unsafe { driver.mem_pool_attribute(device, pool, attribute) }
    })
}
