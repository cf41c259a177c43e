//! Reservations.
//!
//! `unsafe` makes driver calls (see `answer`).
#![allow(unsafe_code)]

use super::CudaDriver;
use super::answer::ask;
use crate::{DeviceAddress, Result};

pub(super) fn reserve(
    driver: &CudaDriver,
    size: u64,
    alignment: u64,
    hint: DeviceAddress,
    flags: u64,
) -> Result<DeviceAddress> {
    let mut address = 0;
    ask!(driver, MemAddressReserve:
        cuMemAddressReserve(&mut address, size as usize, alignment as usize, hint.0, flags))?;
    Ok(DeviceAddress(address))
}

/// # Safety
/// See [`Driver::free_reservation`](crate::Driver::free_reservation).
pub(super) unsafe fn free_reservation(
    driver: &CudaDriver,
    address: DeviceAddress,
    size: u64,
) -> Result<()> {
    ask!(driver, MemAddressFree: cuMemAddressFree(address.0, size as usize))
}
