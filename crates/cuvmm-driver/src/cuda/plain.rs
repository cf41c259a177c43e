//! The driver's own allocators: device memory, the current memory pool, pinned host memory.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use std::ptr;

use cuvmm_sys::CUstream;

use super::CudaDriver;
use super::answer::ask_optional;
use crate::{DeviceAddress, Ordinal, Result, StreamHandle};

pub(super) fn alloc(driver: &CudaDriver, device: Ordinal, size: u64) -> Result<DeviceAddress> {
    let _current = driver.enter(device)?;
    let mut address = 0;
    ask_optional!(driver, MemAlloc: cuMemAlloc_v2(&mut address, size as usize))?;
    Ok(DeviceAddress(address))
}

/// # Safety
/// See [`Driver::free`](crate::Driver::free).
pub(super) unsafe fn free(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemFree: cuMemFree_v2(address.0))
}

/// # Safety
/// See [`Driver::alloc_async`](crate::Driver::alloc_async).
pub(super) unsafe fn alloc_async(
    driver: &CudaDriver,
    device: Ordinal,
    size: u64,
    stream: StreamHandle,
) -> Result<DeviceAddress> {
    let _current = driver.enter(device)?;
    let mut address = 0;
    ask_optional!(driver, MemAllocAsync:
        cuMemAllocAsync(&mut address, size as usize, stream.0 as CUstream))?;
    Ok(DeviceAddress(address))
}

/// # Safety
/// See [`Driver::free_async`](crate::Driver::free_async).
pub(super) unsafe fn free_async(
    driver: &CudaDriver,
    device: Ordinal,
    address: DeviceAddress,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemFreeAsync: cuMemFreeAsync(address.0, stream.0 as CUstream))
}

pub(super) fn host_alloc(
    driver: &CudaDriver,
    device: Ordinal,
    size: u64,
    flags: u32,
) -> Result<*mut u8> {
    let _current = driver.enter(device)?;
    let mut pointer = ptr::null_mut();
    ask_optional!(driver, MemHostAlloc: cuMemHostAlloc(&mut pointer, size as usize, flags))?;
    Ok(pointer.cast())
}

/// # Safety
/// See [`Driver::host_free`](crate::Driver::host_free).
pub(super) unsafe fn host_free(
    driver: &CudaDriver,
    device: Ordinal,
    pointer: *mut u8,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemFreeHost: cuMemFreeHost(pointer.cast()))
}

/// # Safety
/// See [`Driver::host_register`](crate::Driver::host_register).
pub(super) unsafe fn host_register(
    driver: &CudaDriver,
    device: Ordinal,
    pointer: *mut u8,
    size: u64,
    flags: u32,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemHostRegister:
        cuMemHostRegister_v2(pointer.cast(), size as usize, flags))
}

/// # Safety
/// See [`Driver::host_unregister`](crate::Driver::host_unregister).
pub(super) unsafe fn host_unregister(
    driver: &CudaDriver,
    device: Ordinal,
    pointer: *mut u8,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemHostUnregister: cuMemHostUnregister(pointer.cast()))
}
