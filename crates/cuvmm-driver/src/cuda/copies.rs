//! Copies and fills.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use cuvmm_sys::CUstream;

use super::CudaDriver;
use super::answer::{ask, ask_optional};
use crate::{DeviceAddress, Ordinal, Result, StreamHandle};

/// # Safety
/// See [`Driver::copy_to_device`](crate::Driver::copy_to_device).
pub(super) unsafe fn copy_to_device(
    driver: &CudaDriver,
    device: Ordinal,
    destination: DeviceAddress,
    source: &[u8],
) -> Result<()> {
    let _current = driver.enter(device)?;
    let (from, size) = (source.as_ptr().cast(), source.len());
    ask!(driver, MemcpyHtoD: cuMemcpyHtoD_v2(destination.0, from, size))
}

/// # Safety
/// See [`Driver::copy_to_host`](crate::Driver::copy_to_host).
pub(super) unsafe fn copy_to_host(
    driver: &CudaDriver,
    device: Ordinal,
    destination: &mut [u8],
    source: DeviceAddress,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let (to, size) = (destination.as_mut_ptr().cast(), destination.len());
    ask!(driver, MemcpyDtoH: cuMemcpyDtoH_v2(to, source.0, size))
}

/// # Safety
/// See [`Driver::copy_on_device`](crate::Driver::copy_on_device).
pub(super) unsafe fn copy_on_device(
    driver: &CudaDriver,
    device: Ordinal,
    destination: DeviceAddress,
    source: DeviceAddress,
    size: u64,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask!(driver, MemcpyDtoD: cuMemcpyDtoD_v2(destination.0, source.0, size as usize))
}

/// # Safety
/// See [`Driver::copy_to_device_async`](crate::Driver::copy_to_device_async).
pub(super) unsafe fn copy_to_device_async(
    driver: &CudaDriver,
    device: Ordinal,
    destination: DeviceAddress,
    source: *const u8,
    size: u64,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let stream = stream.0 as CUstream;
    ask!(driver, MemcpyHtoDAsync:
        cuMemcpyHtoDAsync_v2(destination.0, source.cast(), size as usize, stream))
}

/// # Safety
/// See [`Driver::copy_to_host_async`](crate::Driver::copy_to_host_async).
pub(super) unsafe fn copy_to_host_async(
    driver: &CudaDriver,
    device: Ordinal,
    destination: *mut u8,
    source: DeviceAddress,
    size: u64,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let stream = stream.0 as CUstream;
    ask!(driver, MemcpyDtoHAsync:
        cuMemcpyDtoHAsync_v2(destination.cast(), source.0, size as usize, stream))
}

/// # Safety
/// See [`Driver::copy_on_device_async`](crate::Driver::copy_on_device_async).
pub(super) unsafe fn copy_on_device_async(
    driver: &CudaDriver,
    device: Ordinal,
    destination: DeviceAddress,
    source: DeviceAddress,
    size: u64,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let stream = stream.0 as CUstream;
    ask!(driver, MemcpyDtoDAsync:
        cuMemcpyDtoDAsync_v2(destination.0, source.0, size as usize, stream))
}

/// # Safety
/// See [`Driver::fill`](crate::Driver::fill).
pub(super) unsafe fn fill(
    driver: &CudaDriver,
    device: Ordinal,
    destination: DeviceAddress,
    byte: u8,
    size: u64,
) -> Result<()> {
    let _current = driver.enter(device)?;
    ask_optional!(driver, MemsetD8: cuMemsetD8_v2(destination.0, byte, size as usize))
}

/// # Safety
/// See [`Driver::fill_async`](crate::Driver::fill_async).
pub(super) unsafe fn fill_async(
    driver: &CudaDriver,
    device: Ordinal,
    destination: DeviceAddress,
    byte: u8,
    size: u64,
    stream: StreamHandle,
) -> Result<()> {
    let _current = driver.enter(device)?;
    let stream = stream.0 as CUstream;
    ask_optional!(driver, MemsetD8Async:
        cuMemsetD8Async(destination.0, byte, size as usize, stream))
}
